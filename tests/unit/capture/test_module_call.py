"""A module whose calls run compiled follows what torch code changes about it between calls."""

import concurrent.futures
import copy
import io
import random
import threading
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import prune
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from torch_bridge.capture.compiled_graph import CompiledGraph
from torch_bridge.capture.module_call import compile_calls, compiled_calls

DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(8, 3, generator=DRAW), torch.randint(0, 2, (8,), generator=DRAW)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def both(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The module compiled, and its twin in torch."""
    twin = copy.deepcopy(module)
    compile_calls([module])
    return module, twin


def results(module: nn.Module, x: torch.Tensor = X) -> list[torch.Tensor | None]:
    """Outputs, then gradients."""
    module.zero_grad()
    outputs = module(x)
    F.cross_entropy(outputs, Y).backward()
    return [outputs.detach(), *(p.grad for p in module.parameters())]


def assert_same(module: nn.Module, twin: nn.Module) -> None:
    torch.testing.assert_close(results(module), results(twin))


def add_hook(module):
    module[1].register_forward_hook(lambda _, given, output: output * 2)


def add_root_hooks(module):
    module.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    module.register_full_backward_hook(lambda _, inputs, outputs: None)


def set_forward(module):
    module[1].forward = torch.relu


def replace_part(module):
    module[1] = nn.Sigmoid()


def widen(module):
    torch.manual_seed(1)
    module[2] = nn.Linear(4, 5)


def append(module):
    module.append(nn.Softplus())


def tie(module):
    module[2].weight = nn.Parameter(module[0].weight.detach()[:2].repeat(1, 2)[:, :4].clone())
    module[0].bias = module[2].bias = None


def prune_part(module):
    prune.l1_unstructured(module[0], "weight", 0.5)


CHANGES = [add_hook, add_root_hooks, set_forward, replace_part, widen, append, tie, prune_part]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_torch_code_changes_after_the_first_call_counts(change):
    module, twin = both(net())
    assert_same(module, twin)
    for one in (module, twin):
        change(one)
    assert_same(module, twin)


def test_a_hook_that_is_removed_counts_no_more():
    module, twin = both(net())
    handles = [one[1].register_forward_hook(lambda _, given, output: output * 2) for one in (module, twin)]
    assert_same(module, twin)
    for handle in handles:
        handle.remove()
    assert_same(module, twin)


def test_weights_that_are_no_longer_tied_train_apart():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x).tanh())

    module, twin = both(Tied())
    assert_same(module, twin)
    for one in (module, twin):
        one.b.weight = nn.Parameter(one.b.weight.detach().clone())
    assert_same(module, twin)


@pytest.mark.parametrize("hook", [lambda grad: grad * 0.5, lambda grad: grad.clamp(-0.01, 0.01)])
def test_a_hook_of_a_parameter_runs_once(hook):
    module, twin = both(net())
    for one in (module, twin):
        one[0].weight.register_hook(hook)
    assert_same(module, twin)


def test_hooks_that_keep_gradients_leave_the_model_compiled():
    module, twin = both(net())
    kept = [], []
    for one, seen in zip((module, twin), kept, strict=True):
        one[0].weight.register_hook(lambda grad, seen=seen: seen.append(grad))
        one[2].weight.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
    assert_same(module, twin)
    mine, theirs = (sorted(seen, key=len) for seen in kept)
    torch.testing.assert_close(mine, theirs)


def test_a_hook_for_all_modules_sees_every_part():
    module, _ = both(net())
    module(X)
    seen = []
    handle = register_module_forward_hook(lambda part, given, output: seen.append(type(part).__name__))
    module(X)
    handle.remove()
    assert seen == ["Linear", "Tanh", "Linear", "Sequential"]


class Guided(nn.Module):
    """Takes a part of its output without gradient, and computes otherwise where gradients are off."""

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x):
        with torch.no_grad():
            weight = self.body(x).softmax(-1)
        return self.body(x) * weight * (1 if torch.is_grad_enabled() else 3)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_a_call_without_gradients_first_leaves_training_as_it_is(mode):
    module, twin = both(Guided())
    with mode():
        outputs = [one(X).clone() for one in (module, twin)]
    torch.testing.assert_close(*outputs)
    assert_same(module, twin)


def test_autocast_counts_as_it_is_at_the_call():
    module, _ = both(net())
    dtypes = [module(X).dtype]
    with torch.autocast("cpu", torch.bfloat16):
        dtypes.append(module(X).dtype)
    dtypes.append(module(X).dtype)
    assert dtypes == [torch.float32, torch.bfloat16, torch.float32]


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x):
        for part in self.parts:
            if torch.rand(()).item() < 0.5:
                x = x + part(x).tanh()
        return x


def test_a_forward_that_cannot_be_recorded_draws_torchs_numbers():
    module, twin = both(Drops())
    torch.manual_seed(3)
    got = [module(X) for _ in range(4)]
    torch.manual_seed(3)
    torch.testing.assert_close(got, [twin(X) for _ in range(4)])


class Lazy(nn.Module):
    def __init__(self, always: bool):
        super().__init__()
        self.body, self.ready, self.always = net(), [], always

    def forward(self, x):
        if self.always or not self.ready:
            self.ready.append("ready")
        return self.body(x)


@pytest.mark.parametrize("always", [False, True])
def test_what_a_call_changes_in_python_the_first_time_does_not_keep_it_in_torch(always):
    module, twin = both(Lazy(always))
    for _ in range(3):
        assert_same(module, twin)
    assert module.ready == twin.ready


class Writes(nn.Module):
    def __init__(self, in_place: bool):
        super().__init__()
        self.body, self.in_place = net(), in_place

    def forward(self, given):
        if self.in_place:
            given["x"].add_(1)
        else:
            given["y"] = self.body(given["x"])
        return self.body(given["x"])


@pytest.mark.parametrize("in_place", [False, True])
def test_what_a_forward_writes_to_its_arguments_is_there(in_place):
    module, twin = both(Writes(in_place))
    mine, theirs = {"x": X.clone()}, {"x": X.clone()}
    torch.testing.assert_close(module(mine), twin(theirs))
    torch.testing.assert_close(mine, theirs)


def doubled(self, x):
    return nn.Sequential.forward(self, x) * 2


def test_a_forward_that_is_set_on_the_module_counts():
    module, twin = both(net())
    module.forward, twin.forward = types.MethodType(doubled, module), types.MethodType(doubled, twin)
    assert_same(module, twin)


def test_a_pickle_holds_the_plain_module():
    module, twin = both(net())
    file = io.BytesIO()
    torch.save(module, file)
    assert b"torch_bridge" not in file.getvalue()
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(X), twin(X))


def test_a_sparse_gradient_stays_sparse():
    module, _ = both(nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True), nn.Linear(3, 2)))
    for _ in range(2):  # the first call could be one that sets something up
        module(torch.tensor([[0, 1], [3, 1]])).sum().backward()
        assert module[0].weight.grad.is_sparse


def test_torch_exports_the_plain_module():
    module, twin = both(net())
    module(X)
    torch.testing.assert_close(torch.export.export(module, (X,)).module()(X * 2), twin(X * 2))


def test_torch_func_and_torch_compile_run_the_plain_module():
    module, twin = both(net())
    weights = {name: p.detach() * 2 for name, p in module.named_parameters()}
    slopes = [
        torch.func.grad(lambda w, one=one: F.cross_entropy(torch.func.functional_call(one, w, (X,)), Y))(weights)
        for one in (module, twin)
    ]
    torch.testing.assert_close(*slopes)
    torch.testing.assert_close(torch.compile(module, backend="eager")(X), twin(X))


def test_a_part_of_another_model_keeps_its_programs_apart():
    module, twin = both(net())
    compile_calls(module)
    random.seed(0)
    assert_same(module, twin)


class CrossEntropy(nn.Module):
    def forward(self, x, y):
        return nn.functional.cross_entropy(x, y)


def test_inputs_of_another_dtype_are_computed_in_it():
    net, x, y = CrossEntropy(), torch.randn(4, 5), torch.tensor([0, 3, 1, 4])
    wanted = net(x.double(), y)
    compile_calls([net])
    assert net(x, y).dtype is torch.float32
    assert net(x.double(), y).dtype is torch.float64
    assert float(net(x.double(), y) - wanted) == pytest.approx(0, abs=1e-14)


class HandsOn(nn.Module):
    """Returns its input, a weight and a buffer beside what it computes, as models with weight tying or masks do."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale = nn.Linear(4, 4), nn.Parameter(torch.full((4,), 0.5))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        return {"y": self.layer(x) * self.scale, "x": x, "rest": (self.scale, self.seen, x.detach(), x + 0)}


def test_what_a_forward_hands_on_is_the_same_tensor():
    module, x = HandsOn(), torch.randn(3, 4)
    plain = module(x)
    with compiled_calls(module):
        found = module(x)
        scale, seen, detached, copied = found["rest"]
        assert (found["x"] is x, scale is module.scale, seen is module.seen) == (True, True, True)
        assert detached is not x
        assert copied is not x
        seen.add_(1)  # a loop that counts there
        assert module.seen.sum() == 4
        (found["y"].sum() + scale.sum()).backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    (plain["y"].sum() + module.scale.sum()).backward()
    for ours, theirs in zip(gradients, module.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad)


VIEWS = {
    "a column": lambda module, x: x[:, 0],
    "a shape": lambda module, x: x.view(x.shape[0], 2, -1),
    "a part": lambda module, x: x.chunk(2, dim=1)[1],
    "a weight": lambda module, x: module.weight.view(-1),
}


class View(nn.Linear):
    def __init__(self, made):
        super().__init__(4, 4)
        self.made = made

    def forward(self, x):
        return super().forward(x), self.made(self, x)


@pytest.mark.parametrize("made", VIEWS)
def test_a_view_of_what_the_module_was_given_shares_its_memory_as_in_torch(made):
    module, x = View(VIEWS[made]), torch.ones(3, 4)
    compile_calls([module])
    with torch.no_grad():
        module(x)[1].fill_(7.0)
        assert bool((VIEWS[made](module, x) == 7).all())


def test_the_whole_module_is_one_graph_of_each_pass(monkeypatch):
    module, _ = both(net())
    results(module)
    calls, run = [], CompiledGraph.__call__
    monkeypatch.setattr(CompiledGraph, "__call__", lambda self, arguments: calls.append(1) or run(self, arguments))
    results(module)
    assert len(calls) == 2


def test_after_torchs_own_error_the_next_batch_runs_in_the_same_graphs(monkeypatch):
    module, twin = both(net())
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        module(torch.ones(8, 5))
    assert_same(module, twin)
    calls, run = [], CompiledGraph.__call__
    monkeypatch.setattr(CompiledGraph, "__call__", lambda self, arguments: calls.append(1) or run(self, arguments))
    results(module)
    assert len(calls) == 2


def test_a_gradient_penalty_is_torchs():
    module, twin = both(net())
    for one in (module, twin):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(one(x).logsumexp(1).sum(), x, create_graph=True)
        slope.pow(2).sum().backward()
    torch.testing.assert_close(module[0].weight.grad, twin[0].weight.grad)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{"num_layers": 2, "batch_first": True}, {"bidirectional": True, "bias": False}])
def test_recurrent_layers_have_torchs_outputs_and_gradients(kind, options):
    torch.manual_seed(0)
    module, twin = both(kind(3, 4, **options))
    x = torch.randn(5, 2, 3)
    found = []
    for one in (module, twin):
        y, state = one(x)
        (y.square().sum() + pytree.tree_leaves(state)[-1].sum()).backward()
        found.append([y.detach(), *(p.grad for p in one.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


class Forces(nn.Module):
    """An energy and its forces, as interatomic potentials compute them."""

    def __init__(self):
        super().__init__()
        self.body = net()

    def forward(self, x):
        x = x.detach().requires_grad_()
        energy = self.body(x).square().sum()
        return energy, torch.autograd.grad(energy, x, create_graph=True)[0]


def test_gradients_that_a_forward_takes_are_differentiated_again():
    module, twin = both(Forces())
    found = []
    for one in (module, twin):
        for _ in range(2):
            one.zero_grad()
            energy, forces = one(X)
            (energy + forces.square().sum()).backward()
        found.append([energy.detach(), forces.detach(), *(p.grad for p in one.parameters())])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


class CheckpointedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(checkpoint(self.first, x, use_reentrant=False))


def test_a_checkpointed_batch_norm_counts_twice_as_in_torch():
    module, twin = both(CheckpointedNorm())
    for _ in range(2):
        assert_same(module, twin)
    torch.testing.assert_close(module.state_dict(), twin.state_dict())
    assert module.first[1].num_batches_tracked == 4


def test_two_threads_call_compiled_modules_at_once(monkeypatch):
    computed, run = [], CompiledGraph.__call__
    monkeypatch.setattr(
        CompiledGraph, "__call__", lambda self, given: computed.append(threading.get_ident()) or run(self, given)
    )
    pairs = [both(net()) for _ in range(2)]
    for module, _ in pairs:
        module(X)
    computed.clear()
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        outputs = list(threads.map(lambda pair: [pair[0](X).detach() for _ in range(50)], pairs))
    assert len(computed) == 100
    for (_, twin), found in zip(pairs, outputs, strict=True):
        torch.testing.assert_close(found, [twin(X).detach()] * 50)
