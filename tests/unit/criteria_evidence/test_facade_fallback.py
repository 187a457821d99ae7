"""The original's Trainer where its steps cannot be compiled: mocks, and models that branch on values."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from jaxtrain.systems import criteria_evidence as psy


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.out = nn.Embedding(20, 4), nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask):
        return self.out((self.tokens(input_ids) * attention_mask[..., None]).mean(1))


class Branching(Bag):
    def forward(self, input_ids, attention_mask):
        logits = super().forward(input_ids, attention_mask)
        return logits / 2 if logits.abs().sum() > 1e6 else logits


def batches(count: int = 3):
    torch.manual_seed(1)
    draw = lambda: torch.randint(0, 20, (4, 5))
    return [
        {"input_ids": draw(), "attention_mask": torch.ones(4, 5), "labels": torch.arange(4) % 2} for _ in range(count)
    ]


def trainer_of(model, optimizer, **options):
    return psy.Trainer(model, batches(), batches(2), optimizer, nn.CrossEntropyLoss(), num_epochs=1, **options)


@pytest.mark.slow
def test_a_branch_on_values_trains_in_torch_and_is_named(tmp_path):
    torch.manual_seed(0)
    model = Branching()
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = trainer_of(model, optimizer, gradient_clip=0.05, gradient_accumulation_steps=2, save_dir=tmp_path)
    with pytest.warns(UserWarning, match="(?s)Trainer: training runs in torch, not compiled.*branch"):
        found = trainer.train_epoch()
    other, losses = torch.optim.SGD(twin.parameters(), lr=0.1), []
    for number, batch in enumerate(batches()):
        loss = nn.functional.cross_entropy(twin(batch["input_ids"], batch["attention_mask"]), batch["labels"])
        (loss / 2).backward()
        losses.append(loss.item())
        if number == 1:
            nn.utils.clip_grad_norm_(twin.parameters(), 0.05)
            other.step()
            other.zero_grad()
    assert found["train_loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)
    torch.testing.assert_close(model.state_dict(), twin.state_dict())
    assert trainer.global_step == 1
    logits = twin(*(torch.cat([batch[name] for batch in batches(2)]) for name in ("input_ids", "attention_mask")))
    right = logits.argmax(1) == torch.arange(8) % 2
    assert trainer.validate()["val_accuracy"] == pytest.approx(right.float().mean().item())
    assert trainer.train()["total_epochs"] == 1
    assert (tmp_path / "latest_checkpoint.pt").is_file()


def mocks():
    """A model and an optimizer of a test's own."""
    logits = torch.zeros(4, 2, requires_grad=True)
    model = mock.MagicMock(return_value=logits)
    model.to.return_value = model
    model.parameters.side_effect = lambda: iter([logits])
    return model, mock.MagicMock(param_groups=[{"lr": 0.1}])


def test_mocks_are_called_once_per_batch():
    model, optimizer = mocks()
    schedule = mock.Mock()
    trainer = trainer_of(model, optimizer, scheduler=schedule)
    found = trainer.train_epoch()
    assert (model.call_count, optimizer.step.call_count, schedule.step.call_count) == (3, 3, 3)
    assert found == pytest.approx({"train_loss": 0.6931472, "train_accuracy": 0.5})
    assert trainer.validate()["val_loss"] == pytest.approx(0.6931472)


def test_a_mock_of_a_criterion_is_called_at_every_batch():
    model = Bag()
    trainer = trainer_of(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer.criterion = mock.Mock(side_effect=nn.functional.cross_entropy)
    trainer.train_epoch()
    assert trainer.criterion.call_count == 3
    trainer.validate()
    assert trainer.criterion.call_count == 5


def test_a_section_of_the_config_is_enough():
    model = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    optimizer = psy.create_optimizer(model, {"name": "Adam", "lr": 0.5, "betas": [0.8, 0.9], "eps": 1e-6})
    assert type(optimizer) is torch.optim.Adam
    assert {(group["lr"], group["betas"], group["eps"]) for group in optimizer.param_groups} == {
        (0.5, (0.8, 0.9), 1e-6)
    }
    assert psy.create_scheduler(optimizer, {"type": "none"}, 100) is None
    warmed = psy.create_scheduler(optimizer, {"type": "linear", "warmup_ratio": 0.1}, 100)
    optimizer.step()
    warmed.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    for section, words in (({"name": "lion"}, "lion"), ({"optimizer": {"name": "lion"}}, "lion")):
        with pytest.raises(ValueError, match=words):
            psy.create_optimizer(model, section)


def test_a_model_and_an_optimizer_put_into_the_trainer_are_those_that_train():
    first = Bag()
    trainer = trainer_of(first, torch.optim.SGD(first.parameters(), lr=0.1))
    trainer.model, trainer.optimizer = mocks()
    trainer.train_epoch()
    assert (trainer.model.call_count, trainer.optimizer.step.call_count) == (3, 3)


@pytest.mark.parametrize("dtype", ["bfloat16", torch.bfloat16])
def test_the_amp_dtype_is_a_name_or_torchs(dtype):
    model = Bag()
    assert trainer_of(model, torch.optim.SGD(model.parameters(), lr=0.1), amp_dtype=dtype).amp_dtype is torch.bfloat16
