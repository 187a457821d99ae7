"""The public trainings: a few are measured here, and the page tells what the figures say."""

import json

import pytest

from benchmarks import public_trainings
from benchmarks.public_trainings import __main__ as command


@pytest.fixture(scope="module")
def entries():
    return {entry.name: entry for entry in command.entries(public_trainings.FAMILIES)}


@pytest.mark.parametrize("name", ["flow matching", "WGAN-GP", "matrix factorisation", "DQN"])
def test_a_public_training_is_compiled_and_gives_torchs_losses(name, entries):
    row = command.measure(entries[name])
    assert (row["how"], row["why"]) == ("compiled", "")
    assert row["difference"] <= 1e-4


@pytest.mark.slow
def test_the_reason_is_told_where_torch_runs_the_steps(entries):
    row = command.measure(entries["DETR"])
    assert (row["how"], row["difference"] <= 1e-4) == ("torch", True)
    assert "linear_sum_assignment(cost.cpu().numpy())" in row["why"]


def test_the_table_has_forty_trainings_within_a_ten_thousandth_or_refused(entries):
    rows = json.loads(command.RESULTS.read_text())
    assert len(set(rows) & set(entries)) >= 40
    far = {name: row for name, row in rows.items() if row["how"] != "refused" and row["difference"] > command.LIMIT}
    assert far == {}
    assert all(row["why"] for row in rows.values() if row["how"] in ("refused", "torch"))


def test_the_page_is_the_commands(entries):
    rows = json.loads(command.RESULTS.read_text())
    known = {name: rows[name] for name in entries if name in rows}
    assert command.PAGE.read_text() == command.page(known)
