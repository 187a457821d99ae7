"""A run with an optimizer, scheduler, collate function, metrics and a callback of the user's own."""

import json
import signal

import pytest

from tests.processes import finish, run, start

MODULE = "tests.e2e.own_parts"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run(1, str(folder / "run"), str(folder / "result"), module=MODULE)
    return json.loads((folder / "result.0").read_text())


@pytest.mark.slow
def test_two_processes_find_the_same_metrics_and_weights(alone, tmp_path):
    run(2, str(tmp_path / "run"), str(tmp_path / "result"), module=MODULE)
    parts = [json.loads((tmp_path / f"result.{rank}").read_text()) for rank in range(2)]
    assert parts[0] == parts[1]
    for ours, theirs in zip(parts[0]["history"], alone["history"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
    assert parts[0]["weights"] == pytest.approx(alone["weights"], rel=1e-4, abs=1e-5)
    assert (parts[0]["seen"], parts[0]["lr"]) == (alone["seen"], alone["lr"])


@pytest.mark.slow
def test_a_run_that_was_killed_goes_on_bit_for_bit(alone, tmp_path):
    places = (str(tmp_path / "run"), str(tmp_path / "result"))
    [(code, output)] = finish(start(1, *places, "7", module=MODULE))
    assert code == -signal.SIGKILL, output
    run(1, *places, module=MODULE)
    assert json.loads((tmp_path / "result.0").read_text()) == alone
