"""Groups of parameters: patterns, depths, rates, and epochs in which they train."""

import numpy as np
import pytest

from jaxtrain.config import GroupConfig, OptimConfig
from jaxtrain.errors import UserError
from jaxtrain.optim import groups

KEYS = ["embed.weight", "blocks.0.weight", "blocks.0.norm.bias", "blocks.1.weight", "norm.weight", "head.weight"]


def optim(layer_decay=None, **named) -> OptimConfig:
    return OptimConfig(lr=1.0, layer_decay=layer_decay, groups={k: GroupConfig(**v) for k, v in named.items()})


def members(config: OptimConfig) -> dict[str, str]:
    return {key: groups.name_of(config, key, "default") for key in KEYS}


def test_the_first_pattern_that_matches_wins():
    config = optim(norms={"match": ("*.norm.*", "norm.*")}, body={"match": "blocks.*"})
    assert list(members(config).values()) == ["default", "body", "norms", "body", "norms", "default"]


def test_a_group_without_parameters_is_refused_with_the_nearest_name():
    with pytest.raises(UserError, match=r"no parameter matches 'block.\*'; one is called blocks"):
        groups.check(optim(body={"match": "block.*"}), members(optim()))
    config = optim(body={"match": "blocks.*"}, first={"match": "blocks.0.*"})
    with pytest.raises(UserError, match="first matches 2 parameters .* earlier group"):
        groups.check(config, members(config))
    with pytest.raises(UserError, match="heads unknown; this task has the groups default"):
        groups.check(optim(heads={"lr": 1.0}), members(optim()))


def test_layer_decay_counts_blocks_from_the_top():
    assert list(groups.depths(KEYS).values()) == [3, 2, 2, 1, 0, 0]
    config = optim(0.5, body={"match": "blocks.*", "lr": 4.0})
    labels = groups.labels(config, members(config), KEYS)
    assert labels["blocks.0.weight"] == "body@2"
    rates = groups.rates(config, labels.values())["lr"]
    assert rates == {"body@1": 2.0, "body@2": 1.0, "default@0": 1.0, "default@3": 0.125}


def test_layer_decay_wants_numbered_blocks():
    with pytest.raises(UserError, match="no list of numbered blocks"):
        groups.depths(["a.weight", "b.weight"])


def test_epochs_in_which_a_group_rests():
    late, early = GroupConfig(freeze_until_epoch=2), GroupConfig(freeze_after_epoch=3)
    assert [groups.rests(late, epoch) for epoch in range(4)] == [True, True, False, False]
    assert [groups.rests(early, epoch) for epoch in range(5)] == [False, False, False, True, True]
    assert groups.boundaries(optim(a={"freeze_until_epoch": 2}, b={"freeze_after_epoch": 3})) == [2, 3]


def test_a_group_that_never_trains_is_said_so():
    with pytest.raises(UserError, match="it never trains"):
        GroupConfig(freeze_until_epoch=3, freeze_after_epoch=3)


def test_groups_are_described_with_what_no_group_matches():
    config = optim(body={"match": "blocks.*", "freeze": True})
    lines = groups.describe(config, members(config), dict.fromkeys(KEYS, 10))
    assert lines[0] == "group body: 3 parameters, 30 numbers, frozen"
    assert lines[1].endswith("(no group of optim.groups matches: embed.weight, norm.weight, head.weight)")
    assert np.all([line.startswith("group ") for line in lines])
