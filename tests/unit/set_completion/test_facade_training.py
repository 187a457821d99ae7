"""A user's session with the original's training functions, in the original's call form."""

import copy
import math
from unittest import mock

import numpy as np
import pytest
import torch

from jaxtrain.systems import set_completion as splatnlp
from tests.unit.set_completion.golden import FOLDER, table
from torch_bridge import files

VOCAB = {**{f"t{i}": i for i in range(11)}, "<PAD>": 11}
CONFIG = splatnlp.TrainingConfig(num_epochs=2, learning_rate=1e-2, clip_grad_norm=1.0, device="cpu")


class Bag(torch.nn.Module):
    """A small model of the user's own."""

    def __init__(self):
        super().__init__()
        self.tokens, self.weapons = torch.nn.Embedding(12, 4), torch.nn.Embedding(3, 4)
        self.out = torch.nn.Linear(4, 12)

    def forward(self, ability_tokens, weapon_token, key_padding_mask=None):
        shown = (~key_padding_mask).unsqueeze(-1)
        mean = (self.tokens(ability_tokens) * shown).sum(1) / shown.sum(1).clamp(min=1)
        return self.out(mean + self.weapons(weapon_token[:, 0]))


def batches(count: int = 3):
    draw = np.random.default_rng(0)
    rows = [{"ability_tags": draw.choice(11, 5, replace=False).tolist(), "weapon_id": i % 3} for i in range(4 * count)]
    items = [(torch.tensor(row["ability_tags"][:3]), torch.tensor([row["weapon_id"]])) for row in rows]
    items = [(seen, weapon, torch.tensor(row["ability_tags"])) for (seen, weapon), row in zip(items, rows, strict=True)]
    collate = splatnlp.create_collate_fn(11)
    return [collate(items[4 * i : 4 * i + 4]) for i in range(count)]


def by_hand(model, optimizer, criterion, epochs: int = 1) -> list[float]:
    """torch's own loop; the mean loss of each epoch."""
    losses = []
    for _ in range(epochs):
        for inputs, weapons, targets, _ in batches():
            hot = splatnlp.create_multi_hot_targets(targets, VOCAB, "cpu")
            loss = criterion(model(inputs, weapons, inputs == 11), hot)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return [sum(losses[3 * i : 3 * i + 3]) / 3 for i in range(epochs)]


def test_an_epoch_and_its_validation_are_torchs():
    torch.manual_seed(0)
    model = Bag()
    twin, criterion = copy.deepcopy(model), torch.nn.BCEWithLogitsLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = []
    before = splatnlp.validate(model, batches(), criterion, CONFIG, VOCAB, "<PAD>", False)
    arguments = (model, batches(), optimizer, criterion, CONFIG, VOCAB, "<PAD>", False)
    metrics, step = splatnlp.train_epoch(*arguments, step_callback=lambda number, values: seen.append((number, values)))
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    assert metrics["loss"] == pytest.approx(by_hand(twin, other, criterion)[0], rel=1e-5)
    assert (step, [number for number, _ in seen], set(metrics)) == (
        3,
        [1, 2, 3],
        {"loss", "f1", "precision", "recall", "hamming"},
    )
    assert seen[0][1]["train/lr"] == 1e-2
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, twin.state_dict()[key], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(optimizer.state_dict()["state"][0]["exp_avg"], other.state_dict()["state"][0]["exp_avg"])
    after = splatnlp.validate(model, batches(), criterion, CONFIG, VOCAB, "<PAD>", False)
    assert after["loss"] < before["loss"]
    _, step = splatnlp.train_epoch(*arguments, global_step=step)
    assert (step, optimizer.state_dict()["state"][0]["step"]) == (6, 6)


@pytest.mark.slow
def test_a_criterion_that_cannot_be_recorded_trains_in_torch_and_says_so():
    class Counting(torch.nn.Module):
        def forward(self, logits, targets):
            scale = 2.0 if float(logits.detach().mean()) > -100 else 1.0  # reads a value: no program can hold it
            return scale * torch.nn.functional.binary_cross_entropy_with_logits(logits, targets)

    torch.manual_seed(0)
    model = Bag()
    twin, criterion = copy.deepcopy(model), Counting()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="runs in torch, not compiled"):
        metrics, _ = splatnlp.train_epoch(model, batches(), optimizer, criterion, CONFIG, VOCAB)
    by_torch = by_hand(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), criterion)
    assert metrics["loss"] == pytest.approx(by_torch[0], rel=1e-6)


@pytest.mark.slow
def test_training_writes_epochs_calls_back_and_returns_the_best(tmp_path):
    torch.manual_seed(0)
    model, told = Bag(), []
    history, returned = splatnlp.train_model(
        model,
        batches(),
        batches(2),
        splatnlp.TrainingConfig(num_epochs=3, learning_rate=0.05),
        VOCAB,
        "<PAD>",
        False,
        None,
        checkpoint_dir=tmp_path,
        epoch_callback=lambda *values: told.append(values),
    )
    assert returned is model
    assert [len(history[split]["loss"]) for split in ("train", "val")] == [3, 3]
    assert [number for number, _, _ in told] == [1, 2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch_001.pth", "epoch_002.pth", "epoch_003.pth"]
    best = int(np.argmax(history["val"]["f1"]))
    saved = torch.load(tmp_path / f"epoch_{best + 1:03d}.pth", weights_only=True)
    assert all(torch.equal(value, saved[key]) for key, value in model.state_dict().items())
    assert splatnlp.test_model(model, batches(2), CONFIG, VOCAB)["f1"] == pytest.approx(max(history["val"]["f1"]))


@pytest.mark.slow
def test_a_grid_is_trained_and_the_best_kept():
    made = []

    class Kind(Bag):
        def __init__(self, scale, offset):
            super().__init__()
            made.append((scale, offset))
            self.out.weight.data.mul_(scale)

    grid = {"scale": [1.0, 0.0], "learning_rate": [1e-2, 0.0]}
    config = splatnlp.TrainingConfig(num_epochs=1)
    found = splatnlp.grid_search(Kind, batches(), batches(2), batches(1), config, VOCAB, grid, {"offset": 3})
    assert made == [(1.0, 3), (1.0, 3), (0.0, 3), (0.0, 3)]
    scores = [one["validation"]["f1"] for one in found.results]
    assert found.params == found.results[scores.index(max(scores))]["params"]
    assert splatnlp.test_model(found.model, batches(2), config, VOCAB)["f1"] == pytest.approx(max(scores))
    with pytest.raises(ValueError, match="select_by: got 'train'"):
        splatnlp.grid_search(Kind, [], [], [], config, VOCAB, grid, select_by="train")


def mocks():
    """A model of 4 rows and 12 tokens, an optimizer and a scaler, all of them mocks."""
    logits = torch.zeros(4, 12, requires_grad=True)
    model = mock.Mock(return_value=logits + 0.0)
    model.parameters.return_value = [logits]
    return model, mock.Mock(), mock.MagicMock()


def test_mocks_of_a_model_and_an_optimizer_are_called_once_per_batch():
    model, optimizer, _ = mocks()
    metrics, step = splatnlp.train_epoch(model, batches(1), optimizer, torch.nn.BCEWithLogitsLoss(), CONFIG, VOCAB)
    assert (optimizer.step.call_count, model.train.call_count, step) == (1, 1, 1)
    assert metrics["loss"] == pytest.approx(math.log(2))


def test_a_mock_of_a_scaler_scales_every_step():
    model, optimizer, scaler = mocks()
    for _ in range(2):
        splatnlp.train_epoch(
            model, batches(1), optimizer, torch.nn.BCEWithLogitsLoss(), CONFIG, VOCAB, "<PAD>", False, scaler
        )
    assert (scaler.scale.call_count, scaler.unscale_.call_count, scaler.update.call_count) == (2, 2, 2)
    scaler.step.assert_called_with(optimizer)
    assert optimizer.step.call_count == 0  # the scaler's affair


class Counting(torch.amp.GradScaler):
    scaled = 0

    def scale(self, outputs):
        self.scaled += 1
        return super().scale(outputs)


def test_a_scaler_of_the_users_own_scales_every_step_in_torch():
    model, scaler = Bag(), Counting("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.out.weight.detach().clone()
    with pytest.warns(UserWarning, match="the scaler is your own, which a compiled step would not call"):
        splatnlp.train_epoch(
            model, batches(2), optimizer, torch.nn.BCEWithLogitsLoss(), CONFIG, VOCAB, "<PAD>", False, scaler
        )
    assert scaler.scaled == 2
    assert not torch.equal(model.out.weight, before)


def test_a_hook_on_a_trained_model_keeps_real_tensors():
    torch.manual_seed(0)
    model, criterion, seen = Bag(), torch.nn.BCEWithLogitsLoss(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    splatnlp.train_epoch(model, batches(), optimizer, criterion, CONFIG, VOCAB)
    plain = splatnlp.validate(model, batches(), criterion, CONFIG, VOCAB)
    handle = model.out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert splatnlp.validate(model, batches(), criterion, CONFIG, VOCAB)["loss"] == pytest.approx(plain["loss"])
    with pytest.warns(UserWarning, match="the model has hooks"):
        splatnlp.train_epoch(model, batches(), optimizer, criterion, CONFIG, VOCAB)
    handle.remove()
    assert [tuple(x.shape) for x in seen] == [(4, 4)] * 6
    assert all(type(x) is torch.Tensor and x.isfinite().all() for x in seen)
    assert optimizer.state[model.out.weight]["step"] == 6


def test_rows_that_show_nothing_are_left_out():
    inputs = torch.tensor([[1, 2], [11, 11]])
    batch = (inputs, torch.tensor([[0], [1]]), torch.tensor([[1, 2, 3], [4, 11, 11]]), inputs != 11)
    model = splatnlp.SetCompletionModel(
        12, 3, 8, 8, 12, num_layers=1, num_heads=2, num_inducing_points=2, pad_token_id=11
    )
    metrics = splatnlp.validate(model, [batch], torch.nn.BCEWithLogitsLoss(), CONFIG, VOCAB)
    alone = splatnlp.validate(model, [tuple(part[:1] for part in batch)], torch.nn.BCEWithLogitsLoss(), CONFIG, VOCAB)
    assert np.isfinite(metrics["loss"])
    assert metrics == alone


@pytest.mark.slow
def test_a_whole_run_gives_the_originals_history():
    case, tensors = table("train_loop"), files.load(FOLDER / "train_loop.safetensors")
    tensor = lambda name: torch.from_numpy(np.array(tensors[name]))
    model = splatnlp.SetCompletionModel(**case["config"])
    model.load_state_dict({key: tensor(f"param/{key}") for key in model.state_dict()}, strict=True)
    split = lambda name, count: [
        tuple(tensor(f"in/{name}{i}.{part}") for part in ("inputs", "weapons", "targets")) for i in range(count)
    ]
    vocab, log = {**{f"t{i}": i for i in range(15)}, "<PAD>": 15}, []
    config = splatnlp.TrainingConfig(**case["training_config"], device="cpu")
    history, _ = splatnlp.train_model(
        model, split("train", 4), split("val", 2), config, vocab, step_callback=lambda *values: log.append(list(values))
    )
    for name in ("train", "val"):
        for metric in ("loss", "f1", "precision", "recall"):
            assert history[name][metric] == pytest.approx(case["metrics_history"][name][metric], abs=1e-5)
    assert [number for number, _ in log] == [number for number, _ in case["step_callback_log"]]
    for (_, got), (_, want) in zip(log, case["step_callback_log"], strict=True):
        assert got == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("name", ["train_epoch", "validate", "test_model"])
def test_a_process_among_several_does_not_work_alone_in_silence(name, monkeypatch):
    model = Bag()
    parts = {
        "train_epoch": (torch.optim.SGD(model.parameters(), 0.1), torch.nn.BCEWithLogitsLoss()),
        "validate": (torch.nn.BCEWithLogitsLoss(),),
    }
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match="there are several processes"):
        getattr(splatnlp, name)(model, batches(), *parts.get(name, ()), CONFIG, VOCAB, verbose=False, ddp=True)
