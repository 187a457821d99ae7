"""Several processes train as one; a lost, stopped or disagreeing one is named. Every task: tests/chaos/."""

import concurrent.futures
import pathlib
import signal
import socket
import time

import pytest

from tests.processes import curve, difference, end, finish, free_port, run, start

CONFIG = str(pathlib.Path(__file__).parents[2] / "configs/digits_tiny.yaml")
TORCH = str(pathlib.Path(__file__).parents[2] / "configs/torch_module_tiny.yaml")
QUICK = ("tracking.tensorboard=false", "train.epochs=1", "train.log_every_steps=1", "data.source=numpy")
STEADY = ("optim.schedule.name=constant",)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    run(1, "--config", CONFIG, f"run.dir={folder}", *QUICK)
    return curve(folder)


@pytest.mark.parametrize(
    ("launcher", "processes", "strategy"),
    [
        ("torchrun", 2, "ddp"),
        pytest.param("torchrun", 4, "fsdp", marks=pytest.mark.slow),
        pytest.param("slurm", 2, "fsdp", marks=pytest.mark.slow),
        pytest.param("openmpi", 2, "shard_grad_op", marks=pytest.mark.slow),
    ],
)
def test_processes_train_as_one(launcher, processes, strategy, alone, tmp_path):
    settings = ("--config", CONFIG, f"run.dir={tmp_path}", f"shard.strategy={strategy}", *QUICK)
    outputs = run(processes, *settings, launcher=launcher)
    assert difference(alone, curve(tmp_path)) < 1e-5
    assert "validation loss" in outputs[0]
    assert all("validation loss" not in output for output in outputs[1:])


@pytest.mark.slow
def test_two_processes_with_rows_of_their_own_train_as_one_where_nothing_is_drawn(tmp_path):
    settings = ("--config", CONFIG, *QUICK, "model.dropout=0")
    run(1, *settings, f"run.dir={tmp_path / 'one'}")
    run(2, *settings, f"run.dir={tmp_path / 'two'}", "shard.strategy=ddp_local")
    assert difference(curve(tmp_path / "one"), curve(tmp_path / "two")) < 1e-5


@pytest.mark.slow
def test_a_rest_that_two_processes_cannot_divide_trains_as_on_one(tmp_path):
    few = ("data.kwargs.limit=27", "data.batch_size=8", "data.eval_batch_size=6", "model.kwargs.dropout=0.0")
    settings = ("--config", TORCH, "tracking.tensorboard=false", "train.epochs=1", "train.log_every_steps=1", *few)
    for processes in (1, 2):
        run(processes, *settings, f"run.dir={tmp_path / str(processes)}", "shard.devices=1")
    assert difference(curve(tmp_path / "1"), curve(tmp_path / "2")) < 1e-5


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    """The losses of a run with a constant rate, so that its length changes nothing."""
    folder = tmp_path_factory.mktemp("steady")
    run(1, "--config", CONFIG, f"run.dir={folder}", *QUICK, *STEADY)
    return training(folder)


def training(folder):
    return [point for point in curve(folder) if point[1] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [((2, "fsdp"), (1, "ddp")), ((1, "ddp"), (2, "fsdp"))])
def test_a_run_goes_on_with_other_processes_and_another_strategy(first, second, steady, tmp_path):
    whole = ("--config", CONFIG, f"run.dir={tmp_path}", *QUICK, *STEADY)
    run(first[0], *whole, "train.steps=20", f"shard.strategy={first[1]}")
    run(second[0], *whole, f"shard.strategy={second[1]}")
    assert difference(steady, training(tmp_path)) < 1e-5


LONGER = (*QUICK, "train.epochs=2", "checkpoint.every_steps=20")
LOSSES = (signal.SIGSTOP, signal.SIGKILL)


@pytest.fixture(scope="module", autouse=True)
def losing(request, tmp_path_factory):
    """Runs that lose process 1 of two, by its signal: the file's other tests run while these wait for a heartbeat.
    None where no selected test asks for them."""
    wanted = LOSSES if any("lost" in item.fixturenames for item in request.session.items) else ()
    with concurrent.futures.ThreadPoolExecutor() as both:
        yield {number: both.submit(lose, number, tmp_path_factory.mktemp(number.name)) for number in wanted}


@pytest.fixture
def lost(losing):
    """By signal: exit code and output of process 0, seconds that it took, run folder."""
    return {number: future.result() for number, future in losing.items()}


def lose(number: signal.Signals, folder: pathlib.Path) -> tuple[int, str, float, pathlib.Path]:
    running = start(2, "--config", CONFIG, f"run.dir={folder}", *LONGER)
    deadline = time.monotonic() + 240
    while not list(folder.glob("checkpoints/*/meta.json")) and time.monotonic() < deadline:
        time.sleep(0.05)
    running[1].send_signal(number)
    before = time.monotonic()
    (code, output) = finish(running[:1], 120)[0]
    took = time.monotonic() - before
    end(running)
    return code, output, took, folder


@pytest.mark.slow
@pytest.mark.parametrize("number", LOSSES)
def test_a_stopped_or_killed_process_is_named_within_a_minute(number, lost):
    code, output, took, _ = lost[number]
    assert code == 1, output
    assert "process 1" in output
    assert took < 60


@pytest.mark.slow
def test_a_relaunch_after_the_loss_of_a_process_goes_on(lost, tmp_path):
    folder = lost[signal.SIGKILL][-1]
    run(2, "--config", CONFIG, f"run.dir={folder}", *LONGER)
    run(1, "--config", CONFIG, f"run.dir={tmp_path}", *LONGER)
    assert difference(curve(tmp_path), curve(folder)) < 1e-5


@pytest.mark.slow
def test_processes_with_different_settings_say_which(tmp_path):
    port = free_port()
    first = start(2, "--config", CONFIG, f"run.dir={tmp_path}", *QUICK, port=port)
    end(first[1:])
    other = start(2, "--config", CONFIG, f"run.dir={tmp_path}", *QUICK, "seed=7", port=port)
    end(other[:1])
    results = finish([first[0], other[1]], 200)
    assert [code for code, _ in results] == [2, 2], results
    assert "the processes do not agree" in results[0][1]
    assert "config: " in results[0][1]


@pytest.mark.slow
def test_a_process_number_outside_the_world_is_refused(tmp_path):
    settings = ("--config", CONFIG, f"run.dir={tmp_path}", *QUICK)
    code, output = finish(start(1, *settings, RANK="5", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1"))[0]
    assert code == 2
    assert "process number 5 of 2; wanted 0 to 1" in output


@pytest.mark.slow
def test_an_occupied_coordinator_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        own = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "JAXTRAIN_PORT": port}
        code, output = finish(start(1, "--config", CONFIG, f"run.dir={tmp_path}", *QUICK, **own))[0]
    assert code == 2
    assert f"port {port} for the coordinator is taken" in output


@pytest.mark.slow
def test_an_unreachable_coordinator_is_named_within_the_limit(tmp_path):
    own = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    settings = ("--config", CONFIG, f"run.dir={tmp_path}", *QUICK)
    code, output = finish(start(1, *settings, **own, JAXTRAIN_START_TIMEOUT_S="2"))[0]
    assert code == 2
    assert "cannot reach the coordinator" in output
