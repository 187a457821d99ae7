"""A module and a loss are called as a torch user calls them; the weights after 5 steps are torch's."""

import copy
import dataclasses
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import Trainer, TrainingConfig
from jaxtrain.errors import UserError

pytestmark = pytest.mark.slow


@dataclasses.dataclass
class Output:
    logits: torch.Tensor


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)


class ScoresInADataclass(Scores):
    def forward(self, x):
        return Output(self.linear(x))


class OwnLoss(Scores):
    def forward(self, x, y):
        return F.cross_entropy(self.linear(x), y)


class OwnLossOfKeywords(Scores):
    def forward(self, **batch):
        return F.cross_entropy(self.linear(batch["x"]), batch["y"])


class OwnLossOfOptionalLabels(Scores):
    def forward(self, x, y=None):
        logits = self.linear(x)
        return {"loss": F.cross_entropy(logits, y.long()), "logits": logits}


def of_target(output, target):
    return F.cross_entropy(output, target, label_smoothing=0.1)


def of_batch(output, batch):
    return F.cross_entropy(output, batch["y"])


def of_known_labels(output, y):
    known = y != 1
    return F.cross_entropy(output[known], y[known])


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        g = torch.Generator().manual_seed(0)
        self.x, self.y = torch.randn(16, 3, generator=g), torch.randint(0, 2, (16,), generator=g)

    def __len__(self):
        return 16

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.y[index]}


FORMS = {
    "(output, target)": (Scores, of_target),
    "(output, batch)": (Scores, of_batch),
    "a lambda": (Scores, lambda out, labels: F.cross_entropy(out, labels)),
    "a selection": (Scores, of_known_labels),
    "a dataclass": (ScoresInADataclass, lambda out, y: F.cross_entropy(out.logits, y)),
    "forward(x, y)": (OwnLoss, None),
    "forward(**batch)": (OwnLossOfKeywords, None),
    "forward(x, y=None)": (OwnLossOfOptionalLabels, None),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_user_form_of_module_and_loss_trains_as_in_torch(form, tmp_path):
    make, loss = FORMS[form]
    torch.manual_seed(0)
    model, data = make(), Rows()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), 0.5)
    for _ in range(5):
        optimizer.zero_grad()
        if loss is None:
            found = twin(x=data.x, y=data.y)
            value = found["loss"] if isinstance(found, dict) else found
        else:
            value = loss(twin(data.x), {"y": data.y} if loss is of_batch else data.y)
        value.backward()
        optimizer.step()
    config = TrainingConfig(num_epochs=5, batch_size=16, run={"dir": str(tmp_path / "run")})
    Trainer(model, data, data, config, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.5)).train()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)


def weighted(output, target, weight):
    return (F.cross_entropy(output, target, reduction="none") * weight).sum() / weight.sum()


def weighted_by_default(output, y, weight=None):
    return weighted(output, y, torch.ones(len(y)) if weight is None else weight)


def truth_first(y_true, y_pred):
    return F.kl_div(F.log_softmax(y_pred, 1), F.one_hot(y_true, 2).float(), reduction="batchmean") + y_pred[:, 0].mean()


class Weighted(nn.Module):
    def forward(self, output, target, weight):
        return weighted(output, target, weight)


class RowsOfThree(Rows):
    """As a dict of entries named so; without names as tuples."""

    def __init__(self, *names):
        super().__init__()
        self.names, self.weight = names, torch.arange(1.0, 17.0)

    def __getitem__(self, index):
        row = self.x[index], self.y[index], self.weight[index]
        return dict(zip(self.names, row, strict=True)) if self.names else row


NAMED = ("x", "y", "weight")
LOSSES_OF_THREE = {
    "named after entries": (weighted, NAMED, weighted),
    "with a default": (weighted_by_default, NAMED, weighted),
    "a module": (Weighted(), NAMED, weighted),
    "in the order of a tuple": (lambda a, b, c: weighted(a, b, c), (), weighted),
    "a module, of a tuple": (Weighted(), (), weighted),
    "(y_true, y_pred)": (truth_first, NAMED, lambda output, y, weight: truth_first(y, output)),
    "torch's own, without its weight": (F.cross_entropy, NAMED, lambda output, y, weight: F.cross_entropy(output, y)),
}


def trained_and_in_torch(model, data, loss, in_torch, folder):
    """State dicts after 3 steps here and in torch, on all rows."""
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        in_torch(twin(data.x), data.y, data.weight).backward()
        optimizer.step()
    config = TrainingConfig(num_epochs=3, batch_size=16, run={"dir": str(folder / "run")})
    Trainer(model, data, None, config, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.5)).train()
    return model.state_dict(), twin.state_dict()


@pytest.mark.parametrize("case", LOSSES_OF_THREE)
def test_a_loss_gets_the_entries_that_its_arguments_name(case, tmp_path):
    loss, names, in_torch = LOSSES_OF_THREE[case]
    torch.manual_seed(0)
    ours, theirs = trained_and_in_torch(Scores(), RowsOfThree(*names), loss, in_torch, tmp_path)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_loss_whose_arguments_name_no_entries_is_refused_with_the_entries(tmp_path):
    config = TrainingConfig(num_epochs=1, batch_size=16, run={"dir": str(tmp_path / "run")})
    with pytest.raises(UserError, match="takes output, target, m, and the batch has x, y, weight: which is which"):
        Trainer(Scores(), RowsOfThree(*NAMED), None, config, loss=lambda output, target, m: output.mean())


class Pairs(Rows):
    def __getitem__(self, index):
        return self.x[index], {"class": self.y[index], "size": self.x[index].sum()}


def of_nested_targets(output, target):
    return F.cross_entropy(output, target["class"]) + F.mse_loss(output.sum(1), target["size"])


def test_a_metric_gets_the_target_that_its_argument_names_and_targets_may_be_nested(tmp_path):
    model, data = Scores(), Pairs()
    config = TrainingConfig(num_epochs=1, batch_size=16, run={"dir": str(tmp_path / "run")})
    error = {"error": lambda output, target: (output.sum(1) - target["size"]).abs()}
    found = Trainer(model, data, data, config, loss=of_nested_targets, metrics=error).train()
    expected = (model(data.x).sum(1) - data.x.sum(1)).abs().mean().item()
    assert found["val_history"][-1]["error"] == pytest.approx(expected, rel=1e-4)


def test_a_metric_of_the_target_and_then_the_output_gets_them_so(tmp_path):
    model, data = Scores(), RowsOfThree(*NAMED)
    config = TrainingConfig(num_epochs=1, batch_size=16, run={"dir": str(tmp_path / "run")})
    share = {"share": lambda y_true, y_pred: ((y_pred.argmax(1) == 0) & (y_true == 1)) * 1.0}
    found = Trainer(model, data, data, config, loss=F.cross_entropy, metrics=share).train()
    expected = ((model(data.x).argmax(1) == 0) & (data.y == 1)).float().mean().item()
    assert found["val_history"][-1]["share"] == pytest.approx(expected)


class Named(Rows):
    def __getitem__(self, index):
        return self.x[index], "ab"[int(self.y[index])]


def test_strings_for_labels_are_named_with_what_to_do(tmp_path):
    config = TrainingConfig(num_epochs=1, batch_size=16, run={"dir": str(tmp_path / "run")})
    with pytest.raises(UserError, match=r"returns strings for '1', which stay on the host.*classes.index\(name\)"):
        Trainer(Scores(), Named(), None, config, loss=nn.CrossEntropyLoss())


def test_an_empty_validation_set_is_named_so(tmp_path):
    config = TrainingConfig(num_epochs=1, batch_size=16, run={"dir": str(tmp_path / "run")})
    nothing = torch.utils.data.Subset(RowsOfThree(), [])
    with pytest.raises(UserError, match="the validation dataset is empty: give it samples, or None"):
        Trainer(Scores(), RowsOfThree(), nothing, config, loss=weighted).train()


class Endless(torch.utils.data.Sampler):
    def __iter__(self):
        return (place % 16 for place in itertools.count())


def test_a_sampler_that_does_not_end_trains_for_the_steps_that_are_given(tmp_path):
    data = RowsOfThree()
    loader = torch.utils.data.DataLoader(data, 16, sampler=Endless())
    model = Scores()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(twin.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        weighted(twin(data.x), data.y, data.weight).backward()
        optimizer.step()
    config = TrainingConfig(train={"steps": 3}, run={"dir": str(tmp_path / "run")})
    Trainer(model, loader, None, config, loss=weighted, optimizer=torch.optim.SGD(model.parameters(), 0.5)).train()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)
