"""Processes meet before JAX connects them: who is missing is named, strangers are sent away."""

import concurrent.futures
import socket
import time

import pytest

from jaxtrain.errors import UserError
from jaxtrain.runtime import joining, launch, rendezvous


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def meet(port: int, others: list[int], processes: int, timeout_s: float) -> list[BaseException | None]:
    """What process 0 and each of the others end with."""
    coordinator = f"127.0.0.1:{port}"
    listener = rendezvous.open_port(coordinator, one_machine=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(rendezvous.gather, listener, coordinator, processes, timeout_s)
        rest = [pool.submit(rendezvous.report, coordinator, process, timeout_s) for process in others]
        return [future.exception() for future in (first, *rest)]


def test_all_processes_go_on_once_the_last_has_come_and_the_port_is_free_again(port):
    assert meet(port, [1, 2, 3], 4, 30) == [None] * 4
    rendezvous.open_port(f"127.0.0.1:{port}", one_machine=True).close()


def test_every_process_is_told_who_is_missing(port):
    found = meet(port, [1, 3], 5, 1.0)
    assert [type(error) for error in found] == [UserError] * 3
    assert all("not all 5 processes reached" in str(e) and "no word from process 2, 4" in str(e) for e in found)


def test_two_processes_of_one_number_are_refused(port):
    assert all("two processes call themselves number 1" in str(error) for error in meet(port, [1, 1], 3, 30))


def test_a_stranger_on_the_port_changes_nothing(port):
    coordinator = f"127.0.0.1:{port}"
    listener = rendezvous.open_port(coordinator, one_machine=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(rendezvous.gather, listener, coordinator, 2, 30)
        for words in (b"GET / HTTP/1.1\n", b"\x00" * 5000, b"jaxtrain 7 me\n", b"", b"jaxtrain 1"):
            stranger = socket.create_connection(("127.0.0.1", port))
            stranger.sendall(words)
            stranger.close()
        time.sleep(0.5)
        pool.submit(rendezvous.report, coordinator, 1, 30).result()
        assert first.exception() is None


@pytest.mark.parametrize(
    ("host", "one_machine", "bound"),
    [("127.0.0.1", False, {"127.0.0.1"}), ("localhost", False, {"127.0.0.1", "::1"}), ("me", False, {"::", "0.0.0.0"}),
     ("me", True, {"127.0.1.1"}), ("service", True, {"::", "0.0.0.0"})],
)  # fmt: skip
def test_the_port_is_open_at_the_coordinators_address_alone_where_it_has_one(
    host, one_machine, bound, port, monkeypatch
):
    known = {"me": "127.0.1.1", "service": "192.0.2.1"}  # as Debian's /etc/hosts has it; another machine's address
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, *a, **k: real(known.get(name, name), *a, **k))
    with rendezvous.open_port(f"{host}:{port}", one_machine) as listener:
        assert listener.getsockname()[0] in bound


def test_a_port_that_is_taken_is_named(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(UserError, match=f"port {port} for the coordinator is taken"):
            rendezvous.open_port(f"127.0.0.1:{port}", one_machine=True)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "65535"},
            "port would be 65536 .* JAXTRAIN_PORT",
        ),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "x"},
            "SLURM_STEP_TASKS_PER_NODE is 'x'",
        ),
    ],
)
def test_a_launch_that_cannot_be_is_refused_by_its_variable(environ, expected):
    with pytest.raises(UserError, match=expected):
        launch.detect(environ)


def test_a_variable_of_slurm_that_is_empty_is_as_good_as_none():
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": ""}
    assert launch.detect(environ).locals == 1


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}


@pytest.mark.parametrize(
    ("environ", "joins"),
    [
        (TORCHRUN, True),
        ({**SLURM, "SLURM_STEP_NODELIST": "n1"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "MASTER_ADDR": "h"}, True),
        (SLURM, False),  # the script of a batch, before srun
        ({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}, False),
        ({**TORCHRUN, "JAXTRAIN_PROCESSES": "1"}, False),  # it shall train alone
        ({}, False),
    ],
)
def test_a_script_joins_the_processes_of_its_launcher(environ, joins, monkeypatch):
    joined = []
    monkeypatch.setattr(launch, "setup_distributed", joined.append)
    monkeypatch.setattr(launch, "preflight", joined.append)
    found = joining.join("the config", environ)
    assert joined == ([found, "the config"] if joins else [])


def test_a_script_whose_others_never_come_is_told_how_to_train_alone(monkeypatch):
    def fail(found):
        raise UserError("launch: no word from process 1")

    monkeypatch.setattr(launch, "setup_distributed", fail)
    with pytest.raises(UserError, match="JAXTRAIN_PROCESSES=1"):
        joining.join("", TORCHRUN)
