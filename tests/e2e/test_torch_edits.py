"""What a loop changes in torch between two compiled steps counts, whichever way it is written."""

import collections
import copy
import os
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain import UserError
from tests.e2e.loops import assert_same, batches, check, mse, pair, sgd, torch_step
from torch_bridge import torch_edits

pytestmark = pytest.mark.slow


def decay(module, optimizer, start):
    for parameter in module.parameters():
        parameter.data.mul_(0.9)


def assign(module, optimizer, start):
    module[0].weight.data = module[0].weight.data * 0.9


def one_entry(module, optimizer, start):
    module[0].weight.detach().numpy()[3, 2] = 0.0


def replace(module, optimizer, start):
    module.load_state_dict(start[0], assign=True)
    optimizer.param_groups[0]["params"] = list(module.parameters())


def new_layer(module, optimizer, start):
    module[2] = nn.Linear(8, 1, bias=False)
    nn.init.ones_(module[2].weight)
    optimizer.param_groups[0]["params"][2:] = module[2].parameters()


def reset(module, optimizer, start):
    optimizer.load_state_dict(start[1])


def scale_moments(module, optimizer, start):
    for entries in optimizer.state.values():
        entries["exp_avg"].mul_(0.5)


def reset_in_place(module, optimizer, start):
    optimizer.state.clear()


def reset_by_assignment(module, optimizer, start):
    optimizer.state = collections.defaultdict(dict)


def forget_one(module, optimizer, start):
    del optimizer.state[module[0].weight]


def replace_parts(module, optimizer, start):
    for entries in optimizer.state.values():
        entries["step"] = torch.tensor(1.0)
        entries["exp_avg"] = torch.zeros_like(entries["exp_avg"])


def replace_one_part_unread(module, optimizer, start):
    optimizer.state[module[0].weight]["step"] = torch.tensor(1.0)


def begin_amsgrad(module, optimizer, start):
    optimizer.param_groups[0]["amsgrad"] = True
    for parameter, entries in optimizer.state.items():
        entries["max_exp_avg_sq"] = torch.zeros(parameter.shape)


def new_group(module, optimizer, start):
    held = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = held[:2]
    optimizer.add_param_group({"params": held[2:], "lr": 1e-3})


def move_state(module, optimizer, start):
    """Replace a parameter as those do that add rows to it."""
    taken = optimizer.state.pop(module[0].weight)
    longer = nn.Parameter(torch.cat([module[0].weight.detach(), torch.zeros(1, 6)]))
    moments = {name: torch.cat([taken[name], torch.zeros(1, 6)]) for name in ("exp_avg", "exp_avg_sq")}
    module[0].weight, module[0].bias = longer, nn.Parameter(torch.zeros(len(longer)))
    module[2].weight = nn.Parameter(torch.ones(1, len(longer)))
    optimizer.param_groups[0]["params"][:3] = [longer, module[0].bias, module[2].weight]
    optimizer.state[longer] = {"step": taken["step"], **moments}


def layer_unknown_to_the_optimizer(module, optimizer, start):
    module[2] = nn.Linear(8, 1)
    nn.init.ones_(module[2].weight), nn.init.ones_(module[2].bias)


def hook(module, optimizer, start):
    module[1].register_forward_hook(lambda _, given, output: output * 2)


def own_forward(module, optimizer, start):
    module[1].forward = torch.relu


EDITS = [
    decay, assign, one_entry, replace, new_layer, reset, scale_moments, reset_in_place, reset_by_assignment, forget_one,
    replace_parts, replace_one_part_unread, begin_amsgrad, new_group, move_state, layer_unknown_to_the_optimizer, hook,
    own_forward,
]  # fmt: skip


@pytest.mark.parametrize("sync", [True, False], ids=["after a sync", "as torch has it"])
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_an_edit_is_taken(edit, sync):
    (theirs, their_optimizer), (ours, optimizer) = pair()
    start = copy.deepcopy((theirs.state_dict(), their_optimizer.state_dict()))
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    for number, batch in enumerate(batches()[:8]):
        plain(batch), step(batch)
        if number % 3 == 2:
            if sync:
                step.sync()
            edit(theirs, their_optimizer, copy.deepcopy(start))
            edit(ours, optimizer, copy.deepcopy(start))
    step.sync()
    assert_same(theirs, ours)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_momentum_that_begins_or_ends_between_steps_is_torchs(momentum):
    (theirs, their_optimizer), (ours, optimizer) = pair(
        optimizer=lambda module: torch.optim.SGD(module.parameters(), 0.05, momentum=momentum)
    )
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    for number, batch in enumerate(batches()):
        for given in (their_optimizer, optimizer):
            given.param_groups[0]["momentum"] = momentum if number % 6 < 3 else 0.9 - momentum
        plain(batch), step(batch)
    step.sync()
    assert_same(theirs, ours)


def test_an_edit_through_an_array_of_before_is_refused_and_can_be_dropped():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    array = ours[0].weight.detach().numpy()
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    for batch in batches()[:5]:
        plain(batch), step(batch)
    array *= 0.9
    for read in (step.sync, lambda: ours(batches()[0][0]), ours.state_dict):
        with pytest.raises(
            UserError, match=r"0.weight was changed in torch .* while the compiled step held newer values"
        ):
            read()
    step.sync(overwrite=True)
    assert_same(theirs, ours)


def test_a_second_sync_leaves_what_torch_changed_after_the_first():
    _, (ours, optimizer) = pair()
    step = jaxtrain.compile(ours, mse, optimizer)
    step(batches()[0])
    step.sync()
    ours[0].weight.data.fill_(7.0)
    step.sync()
    assert float(ours[0].weight.detach().min()) == 7.0


def test_moments_are_the_newest_for_whoever_reads_them():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    for batch in batches()[:8]:
        plain(batch), step(batch)
        scale_moments(theirs, their_optimizer, None), scale_moments(ours, optimizer, None)
    for want, got in zip(their_optimizer.state.values(), optimizer.state.values(), strict=True):
        torch.testing.assert_close(got["exp_avg"], want["exp_avg"], atol=1e-5, rtol=1e-4)
    assert_same(theirs, ours)


def mean_of_weights(module, optimizer):
    return torch.nn.utils.parameters_to_vector(module.parameters()).mean()


READS = {
    "forward": lambda module, optimizer: module(batches()[0][0]),
    "inner forward": lambda module, optimizer: module[0](batches()[0][0]),
    "vector": mean_of_weights,
    "state dict": lambda module, optimizer: module.state_dict()["0.weight"],
    "copy": lambda module, optimizer: copy.deepcopy(module)[0].weight,
    "pickle": lambda module, optimizer: pickle.loads(pickle.dumps(module))[0].weight,
    "shallow copy": lambda module, optimizer: copy.copy(module[0].weight),
    "average": lambda module, optimizer: torch.optim.swa_utils.AveragedModel(module).module[0].weight,
    "optimizer": lambda module, optimizer: optimizer.state_dict()["state"][0]["exp_avg"],
    "entry": lambda module, optimizer: module[0].weight[1, 2],
    "text": lambda module, optimizer: torch.tensor(len(repr(module[0].bias))),
    "functional": lambda module, optimizer: torch.func.functional_call(
        module, dict(module.named_parameters()), (batches()[0][0],)
    ),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_torch_code_reads_the_newest_weights_without_a_sync(read):
    (theirs, their_optimizer), (ours, optimizer) = pair()
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    for batch in batches()[:5]:
        plain(batch), step(batch)
        want, got = read(theirs, their_optimizer), read(ours, optimizer)
        assert type(got) in (torch.Tensor, nn.Parameter)
        torch.testing.assert_close(got.detach(), want.detach(), atol=1e-5, rtol=1e-4)


def test_shapes_and_gradients_are_told_without_fetching_weights():
    _, (ours, optimizer) = pair()
    step = jaxtrain.compile(ours, mse, optimizer)
    step(batches()[0])
    sizes = [(p.shape, p.dtype, p.requires_grad, p.grad, p.numel(), p.device.type) for p in ours.parameters()]
    optimizer.zero_grad()
    assert sizes[0] == ((8, 6), torch.float32, True, None, 48, "cpu")
    assert step.weights.dirty


def test_updates_of_torchs_own_between_compiled_ones():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    by_hand = torch_step(ours, optimizer)
    for number, batch in enumerate(batches()):
        plain(batch)
        (by_hand if number % 3 == 1 else step)(batch)
    assert_same(theirs, ours)


def test_a_number_read_out_of_a_tensor_carries_no_gradient():
    def loss(module, batch):
        value, penalty = mse(module, batch), module(batch[0]).pow(2).mean()
        return value + penalty * (value.item() / (1 + penalty.item()))

    (theirs, their_optimizer), (ours, optimizer) = pair(optimizer=sgd)
    step, plain = jaxtrain.compile(ours, loss, optimizer), torch_step(theirs, their_optimizer, loss)
    for batch in batches()[:5]:
        plain(batch), step(batch)
    step.sync()
    assert_same(theirs, ours)


def test_a_teacher_that_follows_through_data_is_the_loops():
    def distil(module, teacher, batch):
        return F.mse_loss(module(batch[0]), batch[1]) + F.mse_loss(module(batch[0]), teacher(batch[0]))

    (theirs, their_optimizer), (ours, optimizer) = pair()
    their_teacher, teacher = copy.deepcopy(theirs), copy.deepcopy(ours)
    steps = jaxtrain.compile_many({"student": ours, "teacher": teacher}, {"loss": (distil, optimizer)})
    plain = torch_step(theirs, their_optimizer, lambda module, batch: distil(module, their_teacher, batch))
    for batch in batches()[:6]:
        plain(batch), steps(batch)
        steps.sync()
        for student, follower in ((theirs, their_teacher), (ours, teacher)):
            for p, q in zip(student.parameters(), follower.parameters(), strict=True):
                q.data.mul_(0.9).add_(p.data, alpha=0.1)
    assert_same(their_teacher, teacher)


def test_a_distributed_module_of_one_process_is_what_its_loss_calls():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        loss = lambda module, batch: mse(module, batch) + 0.1 * module.module[0].weight.square().sum()
        (theirs, their_optimizer), (ours, optimizer) = pair()
        wrapped = [nn.parallel.DistributedDataParallel(module) for module in (theirs, ours)]
        check((wrapped[0], their_optimizer), (wrapped[1], optimizer), loss_fn=loss)
    finally:
        torch.distributed.destroy_process_group()


def _mean_of_constant(constant):
    return lambda module, batch: F.mse_loss(module(batch[0]), batch[1]) * constant[:3].mean()


@pytest.mark.parametrize("numbers", [3, 1 << 20], ids=["small", "4 MiB"])
def test_a_constant_written_through_numpy_counts_at_the_next_step(numbers):
    (theirs, their_optimizer), (ours, optimizer) = pair()
    their_constant, constant = torch.ones(numbers), torch.ones(numbers)
    plain = torch_step(theirs, their_optimizer, _mean_of_constant(their_constant))
    step = jaxtrain.compile(ours, _mean_of_constant(constant), optimizer)
    for number, batch in enumerate(batches()[:5]):
        if number == 3:
            their_constant.numpy()[1] = constant.numpy()[1] = 7.0
        assert float(step(batch)) == pytest.approx(plain(batch), rel=1e-4)


def test_a_large_constant_changed_in_place_counts_at_the_next_step(monkeypatch):
    monkeypatch.setattr(torch_edits, "EXACT_BYTES", 1 << 16)
    (theirs, their_optimizer), (ours, optimizer) = pair()
    their_constant, constant = torch.ones(1 << 20), torch.ones(1 << 20)
    plain = torch_step(theirs, their_optimizer, _mean_of_constant(their_constant))
    step = jaxtrain.compile(ours, _mean_of_constant(constant), optimizer)
    for number, batch in enumerate(batches()[:4]):
        if number == 2:
            their_constant.mul_(3), constant.mul_(3)
        assert float(step(batch)) == pytest.approx(plain(batch), rel=1e-4)


def test_a_forked_process_is_told_that_its_weights_are_old():
    _, (ours, optimizer) = pair()
    step = jaxtrain.compile(ours, mse, optimizer)
    step(batches()[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(UserError, match=r"a worker process reads weights .* call step\.sync\(\) before"):
            ours.state_dict()
    assert step.weights.dirty


def test_modules_that_share_weights_between_updates_are_read_at_their_newest():
    def game(generator, critic, batch):
        return critic(torch.cat([batch[0], generator(batch[0])], 1)).mean()

    torch.manual_seed(0)
    generator, critic = nn.Linear(6, 2), nn.Linear(8, 1)
    theirs = copy.deepcopy((generator, critic))
    optimizers = [torch.optim.SGD(module.parameters(), 0.1, momentum=0.9) for module in (generator, critic)]
    plain = [torch.optim.SGD(module.parameters(), 0.1, momentum=0.9) for module in theirs]
    steps = jaxtrain.compile_many(
        {"generator": generator, "critic": critic},
        {"up": (game, optimizers[0]), "down": (lambda *given: -game(*given), optimizers[1])},
    )
    for batch in batches()[:5]:
        steps(batch)
        for loss_of, optimizer in zip((game, lambda *given: -game(*given)), plain, strict=True):
            for module in theirs:
                module.zero_grad()
            loss_of(*theirs, batch).backward()
            optimizer.step()
        for module, other in zip((generator, critic), theirs, strict=True):
            assert_same(other, module)
        moments = [optimizer.state_dict()["state"][0]["momentum_buffer"] for optimizer in (optimizers[1], plain[1])]
        torch.testing.assert_close(*moments, atol=1e-5, rtol=1e-4)


def test_a_forward_under_torch_compile_reads_the_newest_weights():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    forward = torch.compile(ours, backend="eager")
    for batch in batches()[:5]:
        plain(batch), step(batch)
        with torch.no_grad():
            torch.testing.assert_close(forward(batch[0]), theirs(batch[0]), atol=1e-5, rtol=1e-4)


def test_a_loss_that_is_exchanged_between_steps_counts():
    (theirs, their_optimizer), (ours, optimizer) = pair()
    step, plain = jaxtrain.compile(ours, mse, optimizer), torch_step(theirs, their_optimizer)
    other = lambda module, batch: 3 * mse(module, batch)
    tripled = torch_step(theirs, their_optimizer, other)
    for number, batch in enumerate(batches()):
        if number == 4:
            step.loss_fn = other
        (plain if number < 4 else tripled)(batch), step(batch)
    step.sync()
    assert_same(theirs, ours)
