"""Loops as users write them around `jaxtrain.compile`: the list, and the test that holds each of them to torch."""

import copy
import pathlib

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.optim import lr_scheduler

import jaxtrain
from tests.e2e.loops import batches, mse, net, torch_step

HERE = pathlib.Path(__file__).parent
ELSEWHERE = {
    "scheduler stepped every update": "test_compiled_step.py::test_a_torch_scheduler_is_obeyed_handed_over_or_stepped",
    "accumulation over calls": "test_compiled_step.py::test_accumulation_averages_the_gradients_of_n_calls",
    "gradient clipping": "test_compiled_step.py::test_clipping_is_torchs",
    "short last batch, batch norm": "test_compiled_step.py::test_a_short_last_batch_and_batch_norm_run_in_their_true",
    "unfreezing in the middle": "test_compiled_step.py::test_unfreezing_in_the_middle_trains_on",
    "groups with their own rates": "test_compiled_step.py::test_groups_with_their_own_rates",
    "tied weights": "test_compiled_step.py::test_tied_weights_stay_tied",
    "gradient penalty": "test_compiled_step.py::test_a_gradient_penalty",
    "named batches, values to log": "test_compiled_step.py::test_named_batches_and_values_to_log",
    "two optimizers (GAN)": "test_compiled_step.py::test_a_gan_alternates_as_its_loop_does",
    "teacher and student": "test_compiled_step.py::test_a_frozen_teacher_guides_a_student",
    "evaluation in between": "test_compiled_loops.py::test_evaluation_in_between_sees_the_newest_weights",
    "logging every n, early break": "test_compiled_loops.py::test_a_loop_may_read_log_and_break",
    "going on from a state dict": "test_compiled_loops.py::test_a_loop_goes_on_from_its_state_dict_bit_for_bit",
    "DDP under torchrun": "test_ddp_loops.py::test_a_loop_gives_torchs_losses_weights_and_buffers_in_each_process",
    "mixed precision": "test_compiled_loops.py::test_bf16_stays_near_torchs_autocast",
}


class Plain:
    """torch's own loop body under the names of a compiled step."""

    def __init__(self, module, loss_fn, optimizer, **options):
        self.module, self.step = module, torch_step(module, optimizer, loss_fn, **options)

    def __call__(self, batch):
        return self.step(batch)

    def eval(self):
        def forward(*inputs):
            with torch.no_grad():
                return self.module(*inputs)

        return forward

    def sync(self):
        pass


def epochs_of_a_shuffled_loader(make):
    module = net()
    x, y = (torch.cat(parts) for parts in zip(*batches(), strict=True))
    draw = torch.Generator().manual_seed(3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 16, shuffle=True, generator=draw)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    scheduler, step = lr_scheduler.StepLR(optimizer, 1, 0.5), make(module, mse, optimizer)
    for _ in range(3):
        for batch in loader:
            step(batch)
        scheduler.step()
    return module, step


def a_plateau_that_watches_the_validation_loss(make):
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), 0.1)
    scheduler, step = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), make(module, mse, optimizer)
    held_out = batches(1, 32)[0]
    for batch in batches():
        step(batch)
        scheduler.step(float(F.mse_loss(torch.as_tensor(np.asarray(step.eval()(held_out[0]))), held_out[1])))
    assert optimizer.param_groups[0]["lr"] < 0.1
    return module, step


def warmup_by_hand(make):
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), 0.0)
    step = make(module, mse, optimizer)
    for number, batch in enumerate(batches()):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (number + 1) / 5)
        step(batch)
    return module, step


def accumulation_by_hand(make):
    module = net()
    loss = lambda module, parts: sum(mse(module, part) for part in parts) / len(parts)
    step = make(module, loss, torch.optim.AdamW(module.parameters(), 1e-2))
    data = batches()
    for first in range(0, len(data), 4):
        step(data[first : first + 4])
    return module, step


def penalties_over_the_parameters(make):
    module = net()
    loss = lambda module, batch: mse(module, batch) + 1e-3 * sum(p.abs().sum() for p in module.parameters())
    decayed = [p for p in module.parameters() if p.dim() > 1]
    plain = [p for p in module.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], 1e-2)
    step = make(module, loss, optimizer)
    for batch in batches():
        step(batch)
    return module, step


def mixing_pairs_of_samples(make):
    module = net()

    def loss(module, batch):
        x, y, share = batch
        return F.mse_loss(module(share * x + (1 - share) * x.flip(0)), share * y + (1 - share) * y.flip(0))

    step = make(module, loss, torch.optim.AdamW(module.parameters(), 1e-2))
    draw = np.random.default_rng(0)
    for x, y in batches():
        step((x, y, torch.tensor(draw.beta(0.4, 0.4), dtype=torch.float32)))
    return module, step


def the_best_weights_are_kept(make):
    module = net()
    step = make(module, mse, torch.optim.SGD(module.parameters(), 0.5))
    best, kept = float("inf"), None
    for batch in batches():
        loss = float(step(batch))
        if loss < best:
            step.sync()
            best, kept = loss, copy.deepcopy(module.state_dict())
    step.sync()
    module.load_state_dict(kept)
    return module, Plain(module, mse, torch.optim.SGD(module.parameters(), 0.5))


def an_average_of_the_weights(make):
    module = net()
    average = copy.deepcopy(module)
    step = make(module, mse, torch.optim.AdamW(module.parameters(), 1e-2))
    for number, batch in enumerate(batches()):
        step(batch)
        if number % 3 == 2:
            step.sync()
            with torch.no_grad():
                for mean, new in zip(average.parameters(), module.parameters(), strict=True):
                    mean.lerp_(new, 0.5)
    return average, step


LOOPS = (
    epochs_of_a_shuffled_loader,
    a_plateau_that_watches_the_validation_loss,
    warmup_by_hand,
    accumulation_by_hand,
    penalties_over_the_parameters,
    mixing_pairs_of_samples,
    the_best_weights_are_kept,
    an_average_of_the_weights,
)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_users_loop_gives_torchs_weights(loop):
    want, _ = loop(Plain)
    got, step = loop(jaxtrain.compile)
    step.sync()
    for (name, theirs), ours in zip(want.state_dict().items(), got.state_dict().values(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5, err_msg=name)


def test_every_loop_of_the_list_has_its_test():
    assert len(LOOPS) + len(ELSEWHERE) >= 20
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}" in (HERE / file).read_text(), place


def test_losses_are_to_torch_and_numpy_what_torchs_are():
    found = []
    for ours in (False, True):
        module = net()
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        step = jaxtrain.compile(module, mse, optimizer) if ours else torch_step(module, optimizer)
        losses = [step(batch) for batch in batches(3)]
        found.append([torch.tensor(losses), torch.as_tensor(losses[0]), np.mean(losses), sum(losses) / len(losses)])
        assert not ours or all(isinstance(loss, torch.Tensor) for loss in losses)
    for theirs, mine in zip(*found, strict=True):
        assert torch.as_tensor(mine).tolist() == pytest.approx(torch.as_tensor(theirs).tolist(), rel=1e-5)


@pytest.mark.parametrize(("clip_norm", "told"), [(None, 1), (1.0, 0)])
def test_a_line_left_over_that_clips_nothing_is_told_once(clip_norm, told, caplog):
    module = net()
    step = jaxtrain.compile(module, mse, torch.optim.SGD(module.parameters(), 0.1), clip_norm=clip_norm)
    for batch in batches(2):
        step(batch)
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    assert caplog.text.count(f"clip_grad_norm_ at {__file__}:") == told


def test_losses_are_added_up_without_being_read():
    module = net()
    step = jaxtrain.compile(module, mse, torch.optim.SGD(module.parameters(), 0.05))
    total = 0.0
    for batch in batches(3):
        total += step(batch) * 8
    assert total.detach()._read is None


def test_values_to_log_keep_their_order_and_kinds():
    def loss_fn(module, batch):
        loss = mse(module, batch)
        return loss, {"rows": (batch[0] > 0).sum(), "half": loss.detach() / 2, "any": (batch[0] > 0).any()}

    module = net()
    step = jaxtrain.compile(module, loss_fn, torch.optim.SGD(module.parameters(), 0.05))
    (batch,) = batches(1)
    loss, values = step(batch)
    kinds = {name: value.dtype for name, value in values.items()}
    assert list(kinds.items()) == [("rows", torch.int64), ("half", torch.float32), ("any", torch.bool)]
    assert values["rows"].item() == int((batch[0] > 0).sum())
    assert values["half"].item() == pytest.approx(float(loss) / 2)


def test_a_loss_may_weigh_with_the_loss_of_the_step_before():
    found = []
    for ours in (False, True):
        module, last = net(), {"loss": None}

        def loss_fn(module, batch, last=last):
            return mse(module, batch) if last["loss"] is None else mse(module, batch) * (1 + last["loss"])

        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        step = jaxtrain.compile(module, loss_fn, optimizer) if ours else torch_step(module, optimizer, loss_fn)
        losses = []
        for batch in batches(4):
            last["loss"] = torch.as_tensor(step(batch))
            losses.append(float(last["loss"]))
        found.append(losses)
    assert found[1] == pytest.approx(found[0], rel=1e-5)


@pytest.mark.parametrize("order", [1, 2])
def test_a_bias_that_forces_do_not_reach_is_left_alone(order):
    """Weight decay would move it."""

    def forces(module, batch):
        x = batch[0].clone().requires_grad_(True)
        (found,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        if order == 2:
            (found,) = torch.autograd.grad(found[:, 0].sum(), x, create_graph=True)
        return F.mse_loss(found.mean(1, keepdim=True), batch[1])

    found = []
    for ours in (False, True):
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), 0.05, weight_decay=0.5)
        step = jaxtrain.compile(module, forces, optimizer) if ours else torch_step(module, optimizer, forces)
        losses = [float(step(batch)) for batch in batches(2)]
        found.append((losses, sorted(optimizer.state_dict()["state"]), module[-1].bias.tolist()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    assert found[1][1:] == found[0][1:]


def test_a_parameter_that_gives_only_a_shape_is_left_alone():
    class Labels(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.other = net(), net()

        def forward(self, x):
            return F.mse_loss(self.body(x), torch.ones_like(self.other(x)))

    module = Labels()
    before = copy.deepcopy(module.other.state_dict())
    optimizer = torch.optim.AdamW(module.parameters(), 0.05, weight_decay=0.5)
    step = jaxtrain.compile(module, lambda module, batch: module(batch[0]), optimizer)
    step(batches(1)[0])
    step.sync()
    torch.testing.assert_close(module.other.state_dict(), before)


class Weighted(torch.nn.Module):
    """A criterion with a parameter of its own, as of losses weighed by their uncertainty."""

    def __init__(self):
        super().__init__()
        self.log_variance = torch.nn.Parameter(torch.zeros(()))

    def forward(self, y, wanted):
        return F.mse_loss(y, wanted) * torch.exp(-self.log_variance) + self.log_variance


def test_a_criterion_with_parameters_trains_beside_the_module_and_around_the_loss():
    found = []
    for way in ("torch", "beside", "around"):
        modules = {"net": net(), "criterion": Weighted()}
        optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], 0.05)

        def loss_fn(module, criterion, batch):
            return criterion(module(batch[0]), batch[1])

        def of_one(module, batch, criterion=modules["criterion"]):
            return loss_fn(module, criterion, batch)

        if way == "torch":
            step = torch_step(modules["net"], optimizer, of_one)
        elif way == "beside":
            step = jaxtrain.compile_many(modules, {"step": (loss_fn, optimizer)})["step"]
        else:
            step = jaxtrain.compile(modules["net"], of_one, optimizer)
        found.append([float(step(batch)) for batch in batches(3)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2] == pytest.approx(found[0], rel=1e-5)


class Attention(torch.nn.Module):
    """Of a graph, with a softmax over the edges of each node."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 4)

    def forward(self, x, edges):
        h = self.layer(x)
        source, target = edges
        scores = h.sum(1)[source]
        highest = torch.full((len(x),), -1e9).scatter_reduce(0, target, scores, "amax")
        weights = (scores - highest[target]).exp()
        return h + torch.zeros_like(h).index_add(0, target, weights[:, None] * h[source])


def test_a_graph_attention_runs_compiled_inside_a_loss_in_torch():
    draw = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 8, (2, 20), generator=draw)
    labels, labelled = torch.randint(0, 4, (8,), generator=draw), torch.randn(8, generator=draw) > 0

    def loss_fn(module, batch):
        return F.cross_entropy(module(batch[0], edges)[labelled], labels[labelled])  # as many rows as the mask says

    found = []
    for ours in (False, True):
        torch.manual_seed(0)
        module = Attention()
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        step = jaxtrain.compile(module, loss_fn, optimizer) if ours else torch_step(module, optimizer, loss_fn)
        found.append([float(step(batch)) for batch in batches(3)])
    assert found[1] == pytest.approx(found[0], rel=1e-5)
