"""memory_lm on a streamed text in shards: processes and workers share the reading, and the order is one."""

import json
import pathlib
import shutil
import time

import pytest

from tests.e2e.stream_rows import CONFIG, settings, write_files
from tests.processes import curve, difference, end, run, start

pytestmark = pytest.mark.slow
datasets = pytest.importorskip("datasets")
STEPS = 240


def told(folder: pathlib.Path, processes: int, *workers: str) -> list[dict]:
    run(processes, str(folder), str(STEPS), *workers, module="tests.e2e.stream_rows")
    return [json.loads((folder / f"{processes}-{i}.json").read_text()) for i in range(processes)]


def together(parts: list[dict], workers: str) -> list[list[str]]:
    """The rows of every global batch."""
    return [sum(shares, []) for shares in zip(*(part["rows"][workers] for part in parts), strict=True)]


@pytest.fixture(scope="module", params=["jsonl", "parquet"])
def read(request, tmp_path_factory) -> dict[int, list[dict]]:
    """What one process reads, without and with two workers, and each of two."""
    folder = tmp_path_factory.mktemp(request.param)
    write_files(folder, request.param)
    return {processes: told(folder, processes, "0", "2") for processes in (1, 2)}


def test_one_and_two_processes_with_and_without_workers_read_the_same_batches(read):
    wanted = together(read[1], "0")
    assert len({row for rows in wanted for row in rows}) == STEPS * 8
    assert together(read[1], "2") == wanted
    assert together(read[2], "0") == wanted
    assert together(read[2], "2") == wanted


def test_each_of_two_processes_reads_half_of_the_texts_from_files_of_its_own(read):
    (alone,), (first, second) = ([part["read"] for part in read[processes]] for processes in (1, 2))
    assert set(first) <= {"0", "1", "2", "3"}
    assert set(second) - {"0"} <= {"4", "5", "6", "7"}
    assert second["0"] < 60  # of more than 300: the first ones, whose shapes are asked for and compared
    assert abs(sum(first.values()) / sum(alone.values()) - 0.5) < 0.08  # the texts that are tried come on top
    assert abs(sum(second.values()) / sum(alone.values()) - 0.5) < 0.08  # the texts that are tried come on top


def arguments(folder: pathlib.Path, texts: pathlib.Path, steps: int) -> list[str]:
    own = (f"run.dir={folder}", f"train.steps={steps}", "checkpoint.every_steps=5", "checkpoint.keep_last=1000")
    return ["--config", str(CONFIG), *settings(texts), *own]


def test_a_run_killed_on_two_processes_goes_on_on_one_with_the_batches_that_come_next(tmp_path):
    write_files(tmp_path / "texts")
    running = start(2, *arguments(tmp_path / "cut", tmp_path / "texts", 2000), "data.num_workers=1")
    deadline = time.monotonic() + 240
    while not (tmp_path / "cut/checkpoints/20").is_dir() and time.monotonic() < deadline:
        assert all(process.poll() is None for process in running), [process.output() for process in running]
        time.sleep(0.05)
    end(running)
    for checkpoint in (tmp_path / "cut/checkpoints").iterdir():
        if checkpoint.name != "20":
            shutil.rmtree(checkpoint)
    place = json.loads((tmp_path / "cut/checkpoints/20/meta.json").read_text())["stream"]["place"]["jaxtrain.shards"]
    assert sorted(place) == ["0", "1", "2", "3"]
    assert all(shard["state"] for shard in place.values())
    run(1, *arguments(tmp_path / "cut", tmp_path / "texts", 30))
    run(1, *arguments(tmp_path / "whole", tmp_path / "texts", 30))
    assert difference(curve(tmp_path / "cut"), curve(tmp_path / "whole")) < 1e-4
