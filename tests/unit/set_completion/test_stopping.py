"""The original's stopping rule and file conversion, replayed from what its code gave."""

from collections import OrderedDict

import pytest

from jaxtrain.optim.plateau import Plateau
from jaxtrain.systems.set_completion.original.early_stopping import EarlyStopping
from jaxtrain.systems.set_completion.original.training import convert_ddp_state
from tests.unit.set_completion.golden import table

TABLE = table("schedules")


def name_of(case):
    return "-".join(str(case[key]) for key in ("seq", "patience", "factor", "delta") if key in case)


@pytest.mark.parametrize("case", TABLE["early_stopping"], ids=name_of)
def test_early_stopping_counts_as_the_originals_code_does(case):
    rule = EarlyStopping(case["patience"], case["delta"], tie_is_improvement=True)
    for loss, want in zip(case["losses"], case["trace"], strict=True):
        assert rule(loss) == want["stop"]
        assert (rule.counter, rule.best_score) == (want["counter"], pytest.approx(want["best_score"]))


def test_a_nan_loss_is_a_new_best_for_the_original_and_a_bad_one_by_the_readmes_rule():
    case = TABLE["early_stopping_nan"]
    losses, stops = [float(loss) for loss in case["losses"]], case["stops"]
    patience = next(n for n in range(1, 9) if [*map(EarlyStopping(n, tie_is_improvement=True), losses)] == stops)
    assert patience == 2
    ours = EarlyStopping(3)
    assert [ours.check(loss) for loss in losses] == [False, False, False, True, True]
    assert ours.best_loss == 1.0


def test_with_the_command_lines_defaults_the_rate_drops_as_training_stops():
    case = TABLE["cli_defaults_interplay"]
    plateau, stopping = Plateau(case["scheduler(0.1,2)"][0]["lr"], 0.1, 2), EarlyStopping(3, tie_is_improvement=True)
    for loss, rate, stop in zip(case["losses"], case["scheduler(0.1,2)"], case["early_stopping(3)"], strict=True):
        assert plateau.update(loss) == pytest.approx(rate["lr"], rel=1e-12)
        assert stopping(loss) == stop["stop"]


def test_a_state_dict_of_a_ddp_model_loses_its_prefix_once():
    case = TABLE["convert_ddp_state"]
    found = convert_ddp_state(dict(case["in"]))
    assert isinstance(found, OrderedDict)
    assert [*map(list, found.items())] == case["out"]
