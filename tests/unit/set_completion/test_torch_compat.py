"""The names that the original's text uses, as a script would after changing its imports."""

import numpy as np
import pytest
import torch

from jaxtrain import Trainer, config_io
from jaxtrain.systems.set_completion import (
    TASKS,
    ActivationBuffer,
    EarlyStopping,
    SetDataset,
    convert_ddp_state,
    create_collate_fn,
    fit,
)
from tests.unit.set_completion.golden import CONFIGS


def test_new_activations_overwrite_the_oldest_ones():
    buffer = ActivationBuffer(size=8, dim=2, device="cpu")
    rows = torch.arange(22.0).reshape(11, 2)
    buffer.add(rows[:6])
    assert (buffer.position, len(buffer)) == (6, 6)
    buffer.add(rows[6:])
    assert (buffer.position, len(buffer)) == (3, 8)
    assert torch.equal(buffer.buffer, torch.cat([rows[8:], rows[3:8]]))
    seen = torch.cat(list(buffer.get_loader(batch_size=3)))
    assert sorted(seen[:, 0].tolist()) == sorted(rows[3:, 0].tolist())


def test_early_stopping_checks_as_the_readme_says():
    early = EarlyStopping(patience=2, min_delta=0.1)
    assert [early.check(loss) for loss in (1.0, 0.95, 0.8, 0.8, 0.71)] == [False, False, False, False, True]
    assert (early.best_loss, early.counter) == (0.8, 2)


def test_a_ddp_checkpoint_loads_into_the_plain_module():
    plain = torch.nn.Linear(2, 2)
    wrapped = {f"module.{key}": value for key, value in plain.state_dict().items()}
    torch.nn.Linear(2, 2).load_state_dict(convert_ddp_state(wrapped), strict=True)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """The original's dataset over a few sets, and a tiny model's config."""
    draw = np.random.default_rng(0)
    sets = [draw.choice(139, size=draw.integers(3, 9), replace=False).tolist() for _ in range(48)]
    rows = [{"ability_tags": tokens, "weapon_id": i % 3} for i, tokens in enumerate(sets)]
    own = ["train.epochs=3", "run.quiet=true", "tracking.tensorboard=false", "shard.devices=1", "model.dropout=0"]
    own += [f"run.dir={tmp_path_factory.mktemp('run')}", "train.steps_per_call=1", "evaluation.patience=2"]
    config = config_io.load(CONFIGS / "splat_tiny.yaml", own)[1]
    return SetDataset(rows, num_instances_per_set=2), SetDataset(rows, num_instances_per_set=1), config


def test_fit_trains_the_originals_dataset(parts):
    train, validation, config = parts
    before = Trainer(None, train, validation, config, task=TASKS["complete"]).evaluate()
    history = fit(None, train, validation, config)
    assert len(history["train_history"]) == len(history["val_history"]) == 3
    assert history["best_val_loss"] < before["loss"]


def test_the_collate_function_pads_and_masks(parts):
    items = [parts[0][i] for i in range(4)]
    inputs, weapons, targets, mask = create_collate_fn(139)(items)
    assert inputs.shape == mask.shape == (4, max(len(item[0]) for item in items))
    assert weapons.shape == (4, 1)
    assert (inputs[~mask] == 139).all()
    assert targets.shape[1] == max(len(item[2]) for item in items)
