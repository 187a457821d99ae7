"""Micro-batches that fit into a given memory, and batches that do."""

import pytest

from jaxtrain.errors import UserError
from jaxtrain.train.compilation import micro_batch
from tests.unit.engine import runs


def made(folder, **settings):
    return runs.trainer(folder, runs.task(runs.Plain), data__batch_size=16, **settings)


@pytest.mark.slow
def test_the_fewest_micro_batches_that_fit_give_the_same_result(tmp_path, monkeypatch):
    taken = {1: 900, 2: 500, 4: 300, 8: 200, 16: 150}
    monkeypatch.setattr(micro_batch, "step_bytes", lambda program, n, size=None: taken[n])
    whole = runs.trained(tmp_path / "whole", data__batch_size=16)
    cut = runs.trained(tmp_path / "cut", data__batch_size=16, data__micro_batch="auto", data__memory_limit_bytes=350)
    assert cut.config.train.accumulate_steps == 4
    assert runs.difference(runs.arrays(cut), runs.arrays(whole)) < 1e-6
    assert (
        "data.micro_batch: auto takes 4 samples at a time (4 micro-batches)" in (tmp_path / "cut/train.log").read_text()
    )


@pytest.mark.slow
def test_the_compilers_own_figures_decide(tmp_path):
    program = made(tmp_path).program
    whole, halves = micro_batch.step_bytes(program, 1, 4096), micro_batch.step_bytes(program, 16, 4096)
    assert halves < whole
    limit = int(micro_batch.step_bytes(program, 1, 256)) + 1
    found = made(tmp_path).find_batch_size(limit)
    assert found >= 240
    assert micro_batch.step_bytes(program, 1, found) <= limit


def test_a_memory_that_holds_not_one_sample_is_told(tmp_path):
    with pytest.raises(UserError, match="even 1 sample.s. at a time take"):
        made(tmp_path, data__micro_batch="auto", data__memory_limit_bytes=100)


def test_a_number_that_does_not_divide_the_batch_is_refused(tmp_path):
    with pytest.raises(UserError, match="data.micro_batch: 3 does not divide the 16 samples"):
        made(tmp_path, data__micro_batch=3)


def test_find_batch_size_wants_a_limit_where_the_device_tells_none(tmp_path):
    with pytest.raises(UserError, match="give limit_bytes"):
        made(tmp_path).find_batch_size()
