"""What a newcomer gets for a slip: one sentence that names the line or argument and what to write, no internals."""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain import Trainer, TrainingConfig
from jaxtrain.errors import UserError

X = torch.arange(96, dtype=torch.float32).reshape(32, 3) / 50 - 1
Y = X.sum(1, keepdim=True)
DATA = torch.utils.data.TensorDataset(X, Y)
INTERNALS = re.compile(r"FakeTensor|Sym(Int|Float)|GuardOn|aot_|dynamo|\bs\d+\b|Incompatible shapes|grad_fn|__dict__")


class Net(nn.Module):
    """Two layers around a function of the test's own."""

    def __init__(self, between=torch.relu):
        super().__init__()
        self.first, self.second, self.between = nn.Linear(3, 4), nn.Linear(4, 1), between

    def forward(self, x):
        return self.second(self.between(self.first(x)))


class Silent(nn.Linear):
    def forward(self, x):
        super().forward(x)


def config(folder, **settings):
    return TrainingConfig(max_steps=1, batch_size=8, output_dir=str(folder), **settings)


def refused(work, kind=UserError):
    with pytest.raises(kind) as error:
        work()
    text = str(error.value)
    assert INTERNALS.search(text) is None, text
    return text


@pytest.mark.parametrize(("loss", "said"), [
    (lambda output, batch: (F.mse_loss(output, batch[1]), output), "a weight is one number"),
    (lambda output, batch: (F.mse_loss(output, batch[1]), "log"), "a weight is one number"),
    (lambda output, batch: F.mse_loss(output, batch[1]).item(), "returned float.*item"),
    (lambda output, batch: None, "returned NoneType"),
    (None, "no loss of its own .*; give one: Trainer"),
])  # fmt: skip
def test_what_a_loss_of_a_trainer_may_return(loss, said, tmp_path):
    text = refused(lambda: Trainer(Net(), DATA, None, config(tmp_path), loss=loss).train())
    assert re.search(said, text)
    assert "cannot be converted" not in text


class Box:
    def __init__(self):
        self.layer = nn.Linear(3, 3)


class Lists(nn.Module):
    """A module that keeps its first layer's weights where torch does not look for them."""

    def __init__(self, part, call):
        super().__init__()
        self.part, self.call, self.head = part, call, nn.Linear(3, 1)

    def forward(self, x):
        return self.head(self.call(self.part, x))


class Inside(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def weight():
    return torch.eye(3).requires_grad_()


def layer():
    return nn.Linear(3, 3)


@pytest.mark.parametrize(("make", "call", "said"), [
    (lambda: [layer(), layer()], lambda part, x: part[1](part[0](x)), ("part[0].weight", "torch.nn.ModuleList(")),
    (lambda: (layer(),), lambda part, x: part[0](x), ("part[0].weight", "in a tuple", "part = torch.nn.ModuleList(")),
    (lambda: {"a": layer()}, lambda part, x: part["a"](x), ("part['a'].weight", "part = torch.nn.ModuleDict(")),
    (lambda: [[layer()]], lambda part, x: part[0][0](x), ("part[0][0].weight", "part = torch.nn.ModuleList(")),
    (lambda: [nn.Sequential(layer())], lambda part, x: part[0](x), ("part[0].0.weight", "torch.nn.ModuleList(")),
    (Box, lambda part, x: part.layer(x), ("part.layer.weight", "Assign the module that has it to an attribute")),
    (weight, lambda part, x: x @ part, ("part, which is no parameter", "a plain tensor", "torch.nn.Parameter(")),
    (lambda: [weight()], lambda part, x: x @ part[0], ("part[0]", "parameters in a list", "torch.nn.ParameterList(")),
    (lambda: {"w": nn.Parameter(weight().detach())}, lambda part, x: x @ part["w"], ("torch.nn.ParameterDict(",)),
    (lambda: weight() * 0.5, lambda part, x: x @ part, ("part is no parameter but was computed from one", "forward")),
])  # fmt: skip
@pytest.mark.parametrize("nested", [False, True])
def test_weights_where_torch_does_not_look_are_named_with_the_remedy(make, call, said, nested, tmp_path):
    module = Inside(Lists(make(), call)) if nested else Lists(make(), call)
    text = refused(lambda: Trainer(module, DATA, None, config(tmp_path), loss=nn.MSELoss()).train())
    for part in said:
        assert part in text
    assert "another module" not in text
    assert ("inner.part" in text) is nested
    assert __file__ in text


def test_weights_of_a_variable_around_a_module_are_told_as_such(tmp_path):
    outside = layer()
    module = Net(lambda hidden: outside(hidden[:, :3]).repeat(1, 2)[:, :4])
    text = refused(lambda: Trainer(module, DATA, None, config(tmp_path), loss=nn.MSELoss()).train())
    assert "nobody would train it" in text
    assert "requires_grad_(False)" in text


def test_a_frozen_list_of_layers_and_a_plain_tensor_train_as_in_torch(tmp_path):
    module = Lists([layer().requires_grad_(False), torch.eye(3)], lambda part, x: part[0](x) @ part[1])
    loss = F.mse_loss(module(X), Y).item()
    trainer = Trainer(module, DATA, DATA, config(tmp_path, optim={"lr": 0.0}), loss=nn.MSELoss())
    assert abs(trainer.train()["best_val_loss"] - loss) < 1e-6


@pytest.mark.parametrize(("loss", "said"), [
    (lambda module, batch: F.mse_loss(module(batch[0]), batch[1]).backward(), "returned None.*runs backward"),
    (lambda module, batch: F.mse_loss(module(batch[0]), batch[1]).detach().numpy(), "NumPy value, .* no gradient"),
    (lambda module, batch: {"loss": F.mse_loss(module(batch[0]), batch[1])}, "returned dict, wanted a scalar"),
    (lambda module, batch: ((module(batch[0]) - batch[1]) ** 2, {"a": batch[1].mean()}), r"of shape \(8, 1\), .*mean"),
    (lambda module, batch: (module(batch[0]) - batch[1]) ** 2, r"of shape \(8, 1\), .*reduce the loss with .mean"),
])  # fmt: skip
def test_what_a_loss_of_a_compiled_step_may_return(loss, said):
    module = Net()
    step = jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters(), 0.1))
    assert re.search(said, refused(lambda: float(step([X[:8], Y[:8]]))))


@pytest.mark.parametrize("seed", [2**64, 2**80, -(2**63) - 1, 1.5, "1"])
def test_a_seed_whose_bits_would_not_all_count_is_refused(seed):
    module = torch.nn.Linear(3, 1)
    with pytest.raises(UserError, match="seed: wanted an integer from -2[*][*]63 to 2[*][*]64 - 1"):
        jaxtrain.compile(module, lambda module, x: module(x).mean(), torch.optim.SGD(module.parameters()), seed=seed)


@pytest.mark.parametrize("other", [2**32 + 1, 2**33 + 1, 2**63 + 1, 1 - 2**63, 2**31 + 1])
def test_every_bit_of_a_seed_counts(other):
    def dropped(seed):
        module = torch.nn.Dropout(0.5)
        weight = torch.nn.Parameter(torch.ones(()))
        module.weight = weight
        loss = lambda module, x: (module(x) * module.weight * torch.arange(64.0)).sum()
        step = jaxtrain.compile(module, loss, torch.optim.SGD([weight], 0.0), seed=seed, wait=True)
        return float(step(torch.ones(64)))

    assert dropped(other) != dropped(1)


def test_a_dimension_out_of_range_is_torchs_error(tmp_path):
    module = Net(lambda hidden: torch.softmax(hidden, 3))
    text = refused(lambda: Trainer(module, DATA, None, config(tmp_path), loss=nn.MSELoss()).train())
    assert "IndexError: Dimension out of range (expected to be in range of [-2, 1], but got 3)" in text
    assert "torch.softmax(hidden, 3)" in text


def test_a_forward_without_a_return_is_said(tmp_path):
    text = refused(lambda: Trainer(Silent(3, 1), DATA, None, config(tmp_path), loss=nn.MSELoss()))
    assert text == "Silent returns None: its forward wants a return statement"


@pytest.mark.parametrize(("data", "said"), [
    ((X, Y), "TensorDataset"), ([X.numpy(), Y.numpy()], "TensorDataset"), ("train.csv", "wanted a torch Dataset"),
])  # fmt: skip
def test_data_that_are_no_dataset_are_told_what_would_be(data, said, tmp_path):
    assert said in refused(lambda: Trainer(Net(), data, None, config(tmp_path), loss=nn.MSELoss()))


def test_a_table_of_pandas_is_told_by_its_columns(tmp_path):
    table = pytest.importorskip("pandas").DataFrame(X.numpy(), columns=["a", "b", "c"])
    text = refused(lambda: Trainer(Net(), table, None, config(tmp_path), loss=nn.MSELoss()))
    assert "table[name].to_numpy()" in text


def test_two_samples_as_a_list_of_arrays_are_a_dataset(tmp_path):
    rows = [np.ones((3,), np.float32), np.zeros((3,), np.float32)]
    loss = lambda output, batch: output.mean()
    Trainer(Net(), rows, None, config(tmp_path), loss=loss)


@pytest.mark.parametrize(("options", "said"), [
    ({"optimizer": "adam"}, "wanted a torch.optim optimizer, .*optim={'name': 'adam'}"),
    ({"optimizer": torch.optim.Adam}, "the class Adam, wanted a torch.optim optimizer"),
    ({"metrics": ["accuracy"]}, "metrics: list, wanted a dict"),
    ({"metrics": "accuracy"}, "metrics: str, wanted a dict"),
    ({"metrics": lambda outputs, batch: 1.0}, "metrics: function, wanted a dict"),
])  # fmt: skip
def test_arguments_of_a_trainer_of_a_wrong_type(options, said, tmp_path):
    settings = config(tmp_path, learning_rate=0.1)  # an optimizer that is none comes before what it would decide
    text = refused(lambda: Trainer(Net(), DATA, DATA, settings, loss=nn.MSELoss(), **options))
    assert re.search(said, text)


def test_a_trainer_without_a_model_says_so(tmp_path):
    loss = lambda model, batch, rngs: 0.0
    assert refused(lambda: Trainer(None, DATA, None, config(tmp_path), loss=loss)).startswith("model: None, and with")


def test_calls_of_a_trainer_that_are_somebody_elses(tmp_path):
    trainer = Trainer(Net(), DATA, None, config(tmp_path), loss=nn.MSELoss())
    assert refused(lambda: trainer.trian(), AttributeError) == "Trainer has no attribute 'trian'"
    with pytest.raises(AttributeError) as error:
        trainer.fit(DATA)
    assert (error.value.name, error.value.obj) == ("fit", trainer)  # from which Python suggests a near name
    assert "data, config and loss go to Trainer" in refused(lambda: trainer.train(DATA))
    assert "torch.load(FILE)" in refused(lambda: trainer.load_state_dict("model.pt"))
    assert trainer.steps_per_epoch == 4


@pytest.mark.parametrize(("key", "said"), [
    ("device", "JAX_PLATFORMS"), ("gpus", "shard.devices"), ("loss_fn", "loss=torch.nn"), ("metrics", "metric"),
    ("lerning_rate", "did you mean `learning_rate`"), ("optimiser", "did you mean `optim"),
])  # fmt: skip
def test_settings_that_are_none_say_where_to_go(key, said):
    assert re.search(said, refused(lambda: TrainingConfig(**{key: 1})))
