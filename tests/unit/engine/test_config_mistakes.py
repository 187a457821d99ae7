"""Mistakes in settings given in Python are told as a file's are: together, in one UserError, with the nearest key."""

import pytest

from jaxtrain import TrainingConfig, UserError, load_config
from jaxtrain.config import EvaluationConfig, OptimConfig
from jaxtrain.systems.criteria_evidence.config import Data
from jaxtrain.systems.set_completion.config import SetDataConfig


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"lerning_rate": 1}, "lerning_rate: unknown key, did you mean `learning_rate`?"),
        ({"learningrate": 1}, "did you mean `learning_rate`?"),
        ({"weight_deacy": 1}, "did you mean `weight_decay`?"),
        ({"num_epoch": 1}, "did you mean `num_epochs`?"),
        ({"batchsize": 1}, "did you mean `batch_size`?"),
        ({"sed": 1}, "did you mean `seed`?"),
        ({"patience": 1}, "did you mean `evaluation.patience`?"),
        ({"optimizer": "adam"}, "did you mean `optim.name`?"),
        ({"early_stopping": 3}, "did you mean `evaluation.patience`?"),
        ({"bf16": True}, "did you mean `precision.policy`?"),
        ({"optim": {"learning_rate": 1}}, "optim.learning_rate: unknown key, did you mean `lr`?"),
        ({"optim": {"lerning_rate": 1}}, "did you mean `lr`?"),
        ({"train": {"num_epochs": 1}}, "did you mean `epochs`?"),
        ({"optim.lr": 1}, "a file nests it: optim: {lr: ...}"),
        ({"seed": 2**32 + 1}, "seed: input should be less than 4294967296, got 4294967297"),
        ({"seed": -1}, "seed: input should be greater than or equal to 0, got -1"),
    ],
)
def test_a_mistake_names_the_nearest_key(values, told):
    with pytest.raises(UserError) as refused:
        TrainingConfig(**values)
    assert str(refused.value).startswith("TrainingConfig: a mistake\n  ")
    assert told in str(refused.value)
    assert "pydantic" not in str(refused.value)
    with pytest.raises(UserError) as plain:
        TrainingConfig.plain(**values)
    assert str(plain.value) == str(refused.value)


def test_overrides_in_a_list_are_refused_with_the_form_that_is_wanted():
    with pytest.raises(UserError, match="load_config: an override is .* wanted texts after the file"):
        load_config("configs/digits_tiny.yaml", ["optim.lr=1"])


def test_all_mistakes_are_told_together():
    with pytest.raises(UserError, match="3 mistakes"):
        TrainingConfig(lerning_rate=1, batch_size="x", seed=-1)


def test_a_section_tells_its_own():
    with pytest.raises(UserError, match="OptimConfig: a mistake\n  learning_rate: unknown key, did you mean `lr`"):
        OptimConfig(learning_rate=1)
    with pytest.raises(UserError, match="EvaluationConfig: a mistake"):
        EvaluationConfig(mode="largest")


@pytest.mark.parametrize("section", [Data, SetDataConfig])
def test_the_seed_of_a_split_holds_the_bits_that_numpy_takes(section):
    with pytest.raises(UserError, match="split_seed: input should be less than 4294967296, got 4294967297"):
        section(split_seed=2**32 + 1)
