"""Trainer takes any torch.nn.Module: 100 steps as torch makes them, three kinds of loss, weights in the same object."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from jaxtrain import Trainer, TrainingConfig, UserError
from jaxtrain.systems.torch_module import torch_definition, torch_examples

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """A convolution and a transformer layer on digits."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.norm = nn.GroupNorm(2, 16)
        self.rows = nn.Linear(128, 16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 10)

    def forward(self, image):
        x = F.gelu(self.norm(self.stem(image))).permute(0, 2, 3, 1).flatten(2)
        return self.head(self.encoder(self.rows(x)).mean(1))


class Small(nn.Module):
    """Returns a loss of its own where it is given labels."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, image, label=None):
        logits = self.head(image.flatten(1))
        return logits if label is None else {"loss": F.cross_entropy(logits, label), "logits": logits}


def config(folder, **more) -> TrainingConfig:
    given = {
        "run": {"dir": str(folder), "quiet": True},
        "data": {"batch_size": 32, "drop_last": True},
        "optim": {"lr": 3e-3, "eps": 1e-6, "weight_decay": 0.05, "clip_norm": 0.5, "schedule": {"name": "cosine"}},
        "train": {"steps": 100},
        "evaluation": {"every_epochs": None},
        "shard": {"devices": 1},
        "tracking": {"tensorboard": False},
        "precision": {"matmul": "highest"},
    }
    return TrainingConfig(**{**given, **more})


def digits(split: str = "train") -> torch.utils.data.Dataset:
    return torch_examples.digits(split, limit=320)


def train_in_torch(module, trainer) -> list[float]:
    """The plain torch loop over the trainer's batches."""
    optim = trainer.config.optim
    optimizer = torch.optim.AdamW(module.parameters(), lr=optim.lr, eps=optim.eps, weight_decay=optim.weight_decay)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=trainer.total_steps)
    losses = []
    for step in range(trainer.total_steps):
        batch = trainer.train_loader.host_batch(step)
        loss = F.cross_entropy(module(torch.tensor(batch["image"])), torch.tensor(batch["label"]).long())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), optim.clip_norm)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def distance(first: nn.Module, second: nn.Module) -> float:
    ours, theirs = (torch.cat([p.flatten() for p in module.parameters()]) for module in (first, second))
    return float((ours - theirs).norm() / theirs.norm())


def test_100_steps_are_torchs_to_1e_4_and_end_in_the_same_object(tmp_path):
    torch.manual_seed(0)
    module = Net()
    theirs, weight = copy.deepcopy(module), module.head.weight
    trainer = Trainer(module, digits(), digits("validation"), config(tmp_path), loss=nn.CrossEntropyLoss())
    trainer.train()
    losses = train_in_torch(theirs, trainer)
    assert losses[-1] < 0.7 * losses[0]
    assert distance(module, theirs) < 1e-4
    assert module.head.weight is weight
    image = torch.tensor(trainer.train_loader.host_batch(0)["image"])
    torch.testing.assert_close(module(image), theirs(image), rtol=1e-3, atol=1e-3)
    assert trainer.evaluate()["accuracy"] > 0.3


def by_hand(output, batch):
    """A torch function of (output, batch)."""
    return F.cross_entropy(output, batch["label"].long())


def test_a_loss_module_a_function_and_the_models_own_loss_are_the_same(tmp_path):
    torch.manual_seed(0)
    first, ends = Small(), []
    for name, loss in (("module", nn.CrossEntropyLoss()), ("function", by_hand), ("own", None)):
        module = copy.deepcopy(first)
        Trainer(module, digits(), None, config(tmp_path / name, train={"steps": 3}), loss=loss).train()
        ends.append(module)
    assert distance(ends[0], first) > 1e-3
    assert distance(ends[1], ends[0]) < 1e-6
    assert distance(ends[2], ends[0]) < 1e-6


def counted(output, batch):
    """A mean over some rows, and how many they are."""
    share = (batch["label"] % 3 == 0).float()
    losses = F.cross_entropy(output, batch["label"].long(), reduction="none")
    return (losses * share).sum() / share.sum(), share.sum()


def test_a_loss_with_its_weight_is_accumulated_to_that_of_the_whole_batch(tmp_path):
    torch.manual_seed(0)
    first, ends = Small(), []
    for parts in (1, 4):
        module = copy.deepcopy(first)
        settings = config(tmp_path / str(parts), train={"steps": 3, "accumulate_steps": parts})
        Trainer(module, digits(), None, settings, loss=counted).train()
        ends.append(module)
    assert distance(ends[1], ends[0]) < 1e-5


def test_further_values_of_a_loss_are_logged(tmp_path):
    def loss(output, batch):
        return by_hand(output, batch), {"size": output.pow(2).mean(), "rows": len(output)}

    trainer = Trainer(Small(), digits(), digits(), config(tmp_path, train={"epochs": 1}), loss=loss)
    assert {"size", "rows"} <= trainer.evaluate().keys()
    (epoch,) = trainer.train()["train_history"]
    assert epoch["rows"] == 32.0
    assert epoch["size"] > 0


def test_a_loss_per_class_is_refused_with_its_shape(tmp_path):
    def loss(output, batch):
        return (output - F.one_hot(batch["label"].long(), 10)).pow(2).mean(0)

    with pytest.raises(UserError, match=r"^the loss returned a tensor of shape \(10,\), wanted a scalar, or one value"):
        Trainer(Small(), digits(), None, config(tmp_path), loss=loss).train()


def test_batch_norm_over_a_single_row_is_refused_before_training_as_torch_does(tmp_path):
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    rows = torch.utils.data.Subset(digits(), range(9))
    with pytest.raises(UserError, match="(?s)batches of one sample will come.*Expected more than 1 value per channel"):
        Trainer(module, rows, None, config(tmp_path, data={"batch_size": 4}), loss=nn.CrossEntropyLoss())


def test_weights_can_be_written_back_at_every_checkpoint(tmp_path, monkeypatch):
    module, seen = Small(), []
    checkpoint = {"every_steps": 2, "write_back": True}
    settings = config(tmp_path, train={"steps": 4}, checkpoint=checkpoint)
    trainer = Trainer(module, digits(), None, settings, loss=nn.CrossEntropyLoss())
    write_back = trainer.write_back
    monkeypatch.setattr(trainer, "write_back", lambda: (write_back(), seen.append(module.head.bias.detach().clone())))
    trainer.train()
    assert len(seen) == 3  # steps 2 and 4, and the end
    assert not torch.equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[2], trainer.state_dict()["head.bias"])


def test_a_whole_dataloader_of_tuples_and_a_resumed_run(tmp_path):
    torch.manual_seed(0)
    first = Small()
    loader = lambda: torch.utils.data.DataLoader(torch_examples.digits_tuples("train", 64), 16, shuffle=True)
    ends = []
    for name, stops in (("whole", [8]), ("parts", [3, 8])):
        for stop in stops:
            module = copy.deepcopy(first)
            schedule = {"optim": {"lr": 1e-3, "schedule": {"name": "constant"}}, "train": {"steps": stop}}
            Trainer(module, loader(), None, config(tmp_path / name, **schedule), loss=nn.CrossEntropyLoss()).train()
        ends.append(module)
    assert distance(*ends) == 0.0


def test_a_fine_tuned_hugging_face_classifier_predicts_the_same_in_torch(tmp_path):
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    bert = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, intermediate_size=64))
    before = copy.deepcopy(bert.state_dict())
    settings = config(tmp_path, train={"steps": 20}, data={"batch_size": 16})
    trainer = Trainer(bert, torch_examples.keywords("train"), None, settings)  # the model's own loss, dropout on
    trainer.train()
    assert not torch.equal(bert.state_dict()["classifier.weight"], before["classifier.weight"])
    batch = trainer.train_loader.host_batch(0)
    ours = trainer.task.outputs(trainer.model(), batch)["logits"]
    with torch.no_grad():
        given = {key: torch.tensor(batch[key]).long() for key in ("input_ids", "attention_mask")}
        theirs = bert.eval()(**given).logits
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.argmax(ours, -1), theirs.argmax(-1))
    loss = trainer.task.twin.loss(bert, {key: torch.tensor(value) for key, value in batch.items()}, trainer.config)
    assert float(trainer.task.loss(trainer.model(), batch, trainer.config, None).value) == pytest.approx(
        loss.item(), 1e-5
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"loss": nn.CrossEntropyLoss(), "task": "digits.classify"}, "a torch module is a task of its own"),
        ({"loss": lambda model, batch, rngs: 0.0}, "takes model, batch, rngs, and the batch has 0, 1: which is which"),
        ({}, "the model returns no loss of its own"),
    ],
)
def test_what_does_not_go_together_is_said(options, expected, tmp_path):
    data = torch_examples.digits_tuples("train", 64)
    with pytest.raises(UserError, match=expected):
        Trainer(Small() if options else nn.Flatten(), data, None, config(tmp_path), **options)


def test_a_torch_module_without_data_is_refused(tmp_path):
    with pytest.raises(UserError, match="a torch module needs its dataset"):
        Trainer(Small(), None, None, config(tmp_path), loss=nn.CrossEntropyLoss())


def all_digits() -> torch.utils.data.Dataset:
    """A function without `split`, as `jaxtrain verify --data` may name."""
    return torch_examples.digits("train", limit=32)


@pytest.mark.parametrize("separator", [".", ":"])
def test_verify_and_a_yaml_name_data_in_the_same_ways(separator):
    of = lambda name, split: torch_definition.dataset_of(f"{__name__}{separator}{name}", split, {}, "data.target")
    assert len(of("all_digits", "train")) == 32
    assert of("all_digits", "validation") is None
    assert len(of("digits", "train")) == 320
