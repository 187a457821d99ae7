"""`step.eval()` behaves as the module: a user's validation function takes it as it stands."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.width = 8
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 1)

    def encode(self, x):
        return self.body(x)

    def forward(self, x):
        return self.head(self.encode(x))

    def predict(self, x, *, scale=1.0):
        return self(x) * scale

    @property
    def first(self):
        return self.body[0]


def mse(module, batch):
    return F.mse_loss(module(batch[0]), batch[1])


def batch():
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)


@pytest.fixture(scope="module")
def step():
    module = Net()
    return jaxtrain.compile(module, mse, torch.optim.SGD(module.parameters(), 0.05))


@pytest.fixture
def trained(step):
    """The step after a further update, and a torch module with its weights in evaluation mode."""
    step(batch())
    return step, copy.deepcopy(step.weights.given["module"]).eval()


def with_flags(model, x):
    model.eval()
    with torch.no_grad():
        outputs = model(x)
    model.train()
    return outputs


def with_former_mode(model, x):
    before = model.training
    model.eval()
    outputs = model(x)
    model.train(before)
    return outputs


def with_inference_mode(model, x):
    model = model.eval()
    with torch.inference_mode():
        return model(x.to(next(model.parameters()).device)).clone()


def with_device(model, x):
    return model.to("cpu").eval()(x)


def with_forward(model, x):
    return model.eval().forward(x)


def with_a_method(model, x):
    return model.eval().predict(x)


def in_parts(model, x):
    return model.eval().head(model.encode(x))


def with_flags_in_a_loop(model, x):
    for part in model.modules():
        part.requires_grad_(True)
    model.training = False
    return model(x)


def with_module_class(model, x):
    assert isinstance(model, nn.Module)
    return nn.Module.eval(model)(x)


def in_a_container(model, x):
    return nn.Sequential(model, nn.Identity()).eval()(x)


FORMS = [
    with_flags, with_former_mode, with_inference_mode, with_device, with_forward, with_a_method, in_parts,
    with_flags_in_a_loop, with_module_class, in_a_container,
]  # fmt: skip


@pytest.mark.parametrize("validate", FORMS, ids=lambda form: form.__name__)
def test_a_validation_function_gives_torchs_outputs_and_training_goes_on(trained, validate):
    step, theirs = trained
    torch.testing.assert_close(
        validate(step.eval(), batch()[0]).detach(), theirs(batch()[0]).detach(), rtol=0, atol=1e-6
    )
    step(batch())
    assert step.weights.given["module"].training
    torch.testing.assert_close(  # of the step since, and evaluating again whatever mode the function has left
        step.eval()(batch()[0]),
        copy.deepcopy(step.weights.given["module"]).eval()(batch()[0]).detach(),
        rtol=0,
        atol=1e-6,
    )


def test_its_mode_is_evaluation_and_the_modules_stays(trained):
    step, _ = trained
    module, evaluated = step.weights.given["module"], step.eval()
    assert not evaluated.training
    assert evaluated.eval() is evaluated
    assert module.training
    module.body[1].eval()  # frozen statistics
    assert evaluated.train() is evaluated
    assert evaluated.training
    assert module.body[1].training  # as torch's train() does
    assert not step.eval().training


def test_a_call_in_training_mode_is_torchs(trained):
    step, _ = trained
    theirs = copy.deepcopy(step.weights.given["module"]).train()
    torch.manual_seed(7)
    wanted = theirs(batch()[0])
    torch.manual_seed(7)
    outputs = step.eval().train()(batch()[0])
    torch.testing.assert_close(outputs, wanted, rtol=0, atol=0)
    assert outputs.requires_grad
    torch.testing.assert_close(step.eval().state_dict()["body.1.running_mean"], theirs.body[1].running_mean)


def test_weights_and_attributes_are_the_modules(trained):
    step, theirs = trained
    module, evaluated = step.weights.given["module"], step.eval()
    assert [*map(id, evaluated.parameters())] == [*map(id, module.parameters())]
    assert [name for name, _ in evaluated.named_modules()] == [name for name, _ in module.named_modules()]
    assert list(evaluated.state_dict()) == list(module.state_dict())
    for name, value in evaluated.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=0, atol=0)
    assert evaluated.width == 8
    assert evaluated.first is module.body[0]
    assert repr(evaluated) == repr(module)
    assert {"encode", "body", "parameters"} <= set(dir(evaluated))
    evaluated.note = "of the user's"
    assert module.note == "of the user's"
    with pytest.raises(AttributeError, match="nothing"):
        evaluated.nothing  # noqa: B018


def test_loaded_weights_count_in_the_next_step(trained):
    step, _ = trained
    fresh = Net()
    step.eval().load_state_dict(fresh.state_dict())
    torch.testing.assert_close(step.eval()(batch()[0]), fresh.eval()(batch()[0]).detach(), rtol=0, atol=1e-6)


def test_copies_and_pickles_are_plain_modules(trained):
    step, theirs = trained
    for twin in (copy.deepcopy(step.eval()), pickle.loads(pickle.dumps(step.eval())).eval()):
        assert type(twin) is Net
        torch.testing.assert_close(twin(batch()[0]), theirs(batch()[0]), rtol=0, atol=1e-6)
    assert type(copy.deepcopy(step.eval()).body[1]) is nn.BatchNorm1d


def test_of_several_modules_each_behaves_as_its_own():
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    loss = lambda a, b, batch: F.mse_loss(b(a(batch[0])), batch[1])
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    steps = jaxtrain.compile_many({"first": first, "second": second}, {"all": (loss, optimizer)})
    steps(batch())
    inner = steps.eval("first")(batch()[0])
    torch.testing.assert_close(steps.eval("second")(inner), second(first(batch()[0])).detach(), rtol=0, atol=1e-6)
    assert list(steps.eval("second").state_dict()) == ["weight", "bias"]


def test_a_sequential_is_indexed_counted_and_iterated():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    step = jaxtrain.compile(module, mse, torch.optim.SGD(module.parameters(), 0.05))
    model = step.eval()
    assert (len(model), model[0], [*model], model[1] in model) == (3, module[0], [*module], True)
    assert [type(layer).__name__ for layer in reversed([*model])] == ["Linear", "ReLU", "Linear"]
    assert len(model[:2]) == 2
    net = Net()
    with pytest.raises(TypeError, match="has no len"):
        len(jaxtrain.compile(net, mse, torch.optim.SGD(net.parameters(), 0.05)).eval())


def test_spectral_norm_is_evaluated_after_steps_that_replace_its_vectors():
    """The power iteration assigns its buffers anew in each step; the evaluated module takes the newest."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 8)), nn.Tanh(), nn.Linear(8, 1))
    step = jaxtrain.compile(module, mse, torch.optim.SGD(module.parameters(), 0.1))
    evaluated, (x, y) = step.eval(), batch()
    for _ in range(3):
        step((x, y))
        got = evaluated(x)
        step.sync()
        right = copy.deepcopy(module).eval()(x).detach()
        torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(step.eval()(x), right, rtol=1e-5, atol=1e-6)


def test_a_layer_replaced_after_eval_counts_in_the_next_call():
    module = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    step = jaxtrain.compile(module, mse, optimizer)
    evaluated, (x, y) = step.eval(), batch()
    step((x, y))
    evaluated(x)
    module[2] = nn.Linear(8, 1)
    optimizer.param_groups[0]["params"] = list(module.parameters())
    torch.testing.assert_close(evaluated(x), module(x).detach(), rtol=1e-5, atol=1e-6)
    step((x, y))
    torch.testing.assert_close(evaluated(x), module(x).detach(), rtol=1e-5, atol=1e-6)
