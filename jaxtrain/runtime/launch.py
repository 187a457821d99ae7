"""Start a run under any launcher: find this process's rank and the coordinator, and check that all processes joined.

Launchers are recognised by their environment, in this order: explicit JAXTRAIN_* variables, torchrun / accelerate,
Slurm, OpenMPI, Kubernetes indexed jobs. Otherwise the run is a single process.
"""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.runtime import devices, host_memory, leaving, rendezvous
from jaxtrain.runtime.gpus import gpus_of_process, has_gpus, visible_gpus

START_TIMEOUT_S = 120  # until every process has connected to the coordinator
DECIDE_TIMEOUT_S = 3600  # for process 0 to read what a decision needs, such as a large checkpoint
GOODBYE_TIMEOUT_S = 5  # for the other processes to end before process 0 does
SHUTDOWN_TIMEOUT_S = 3600  # for the other processes to end: process 0 may still save, plot or evaluate alone
CHECK_TIMEOUT_S = 60  # until every process has reported its versions, and until the first all-reduce returns


_decisions = itertools.count()  # numbers broadcasts; all processes make them in the same order


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process's rank and its group, as described by the launcher.

    local: local rank on this machine. locals: number of processes on this machine. With several processes per machine,
    each uses the GPU of its local rank, or the only GPU visible to it; a single process uses all GPUs.
    """

    launcher: str
    process: int
    processes: int
    coordinator: str | None = None
    local: int = 0
    locals: int = 1

    def __str__(self):
        several = f"GPU {self.local}" if has_gpus() else "the CPU"
        share = several if self.locals > 1 else "all local devices"
        return f"{self.launcher}: process {self.process} of {self.processes}, {share}, coordinator {self.coordinator}"


def detect(environ: Mapping[str, str] = os.environ) -> Launch:
    """Return the launch that the environment describes. Raises UserError if it is inconsistent."""
    for find in (_explicit, _torchrun, _slurm, _openmpi, _kubernetes):
        launch = find(environ)
        if launch is not None:
            return _checked(launch)
    return Launch("single process", 0, 1)


def setup_distributed(launch: Launch | None = None, timeout_s: float | None = None) -> Launch:
    """Connect this process to the others; call it before any code uses a device. Does nothing for a single process.

    Args:
        launch: which process of how many this is; default: what the launcher's environment says.
        timeout_s: how long to wait for all processes; default: JAXTRAIN_START_TIMEOUT_S or two minutes.

    Raises:
        UserError: if the coordinator cannot be reached, its port is taken, or a process is missing.

    Examples:
        >>> import jaxtrain
        >>> jaxtrain.setup_distributed().processes
        1
    """
    launch = launch or detect()
    timeout_s = timeout_s or _number(os.environ, "JAXTRAIN_START_TIMEOUT_S", START_TIMEOUT_S)
    if launch.processes == 1 or jax.distributed.is_initialized():
        return launch
    host_memory.one_arena()  # before the connection's threads get heaps of their own
    bind, coordinator = None, launch.coordinator
    assert coordinator is not None  # several processes have one
    if launch.process == 0:
        listener = rendezvous.open_port(coordinator, launch.locals == launch.processes)
        address, port = listener.getsockname()[:2]
        bind = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        rendezvous.gather(listener, coordinator, launch.processes, timeout_s)
    else:
        rendezvous.report(coordinator, launch.process, timeout_s)
    own_gpus = None
    if has_gpus():
        own_gpus = gpus_of_process(launch.local, launch.locals, len(visible_gpus()))
        if "nccl_termination_timeout" not in os.environ.get("XLA_FLAGS", ""):
            flags = os.environ.get("XLA_FLAGS", ""), "--xla_gpu_nccl_termination_timeout_seconds=600"
            os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM belongs to runtime.preemption
    try:
        jax.distributed.initialize(
            launch.coordinator,
            launch.processes,
            launch.process,
            local_device_ids=own_gpus,
            cluster_detection_method="deactivate",
            coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", bind),
            initialization_timeout=int(timeout_s),
            heartbeat_timeout_seconds=50,
            shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
        )
    except RuntimeError as error:
        if "before any JAX" in str(error):
            raise UserError(
                f"launch: this process has used JAX before it could connect to the other {launch.processes - 1}; call "
                "jaxtrain.setup_distributed() at the start of the script, before the first array or flax model is made"
            ) from None
        raise UserError(
            f"launch: not all {launch.processes} processes reached {launch.coordinator} within {timeout_s:.0f} s "
            f"({' '.join(str(error).split())[:200]}). Is WORLD_SIZE right, and did every process start?"
        ) from None
    leaving.leave_when_raised(say_goodbye)
    return launch


def cleanup_distributed() -> None:
    """Leave the group of processes. Source of the name: torch.distributed users' scripts."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def preflight(config_text: str, timeout_s: float = CHECK_TIMEOUT_S) -> None:
    """Check that all processes have the same versions, config and kind of devices, and that an all-reduce works.

    config_text: the resolved config. Raises UserError if the devices of JAX_PLATFORMS are missing, and if processes
    differ or are missing; the message names them.
    """
    devices.all_devices()
    if jax.process_count() == 1:
        return
    mine = {
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "config": hashlib.sha256(config_text.encode()).hexdigest()[:12],
        "device": jax.local_devices()[0].device_kind,
        "devices": jax.local_device_count(),
        "host": socket.gethostname(),
    }
    client = coordination()
    client.key_value_set(f"jaxtrain/preflight/{jax.process_index()}", json.dumps(mine))
    told, missing = {}, []
    deadline = time.monotonic() + timeout_s
    for process in range(jax.process_count()):
        left = max(1.0, deadline - time.monotonic())
        try:
            told[process] = json.loads(client.blocking_key_value_get(f"jaxtrain/preflight/{process}", int(left * 1000)))
        except (
            Exception
        ) as error:  # the client raises XlaRuntimeError, which derives from RuntimeError in some versions
            if "DEADLINE" not in str(error):
                raise
            missing.append(process)
    if missing:
        raise UserError(f"launch: no word from process {', '.join(map(str, missing))} within {timeout_s:.0f} s")
    problems = _disagreements(told)
    if problems:
        raise UserError("launch: the processes do not agree:\n  " + "\n  ".join(problems))
    _first_all_reduce(timeout_s)


def wait_for_all(name: str, timeout_s: float = 3600) -> None:
    """Wait until every process has reached this barrier; does nothing for a single process."""
    if jax.process_count() > 1:
        coordination().wait_at_barrier(f"jaxtrain/{name}", int(timeout_s * 1000))


def say_goodbye(timeout_s: float = GOODBYE_TIMEOUT_S) -> None:
    """Let the other processes end before process 0 does; call it before a process ends with an error.

    Often all processes end with the same error. Process 0 runs the coordination service, and without the service the
    others would be aborted before they could report why they end. So it waits up to `timeout_s` for them.
    """
    from jax._src.distributed import global_state

    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(Exception):  # a lost process never answers: end at the timeout, whatever the client raises
        if global_state.process_id != 0:
            coordination().key_value_set(f"jaxtrain/left/{global_state.process_id}", "", allow_overwrite=True)
            return
        for process in range(1, global_state.num_processes):
            left = max(0.01, deadline - time.monotonic())
            coordination().blocking_key_value_get(f"jaxtrain/left/{process}", int(left * 1000))
        time.sleep(0.2)  # time for the others to exit after their message


def broadcast_from_process_zero(topic: str, decide: Callable[[], Any]) -> Any:
    """Return process 0's decision (JSON) on every process, because a shared filesystem may look different to each.

    If `decide` raises a UserError on process 0, every process raises it.
    """
    if jax.process_count() == 1:
        return decide()
    key = f"jaxtrain/decided/{next(_decisions)}/{topic}"
    if jax.process_index() == 0:
        try:
            word = {"value": decide()}
        except UserError as error:
            word = {"error": str(error)}
        coordination().key_value_set(key, json.dumps(word), allow_overwrite=True)
    word = json.loads(coordination().blocking_key_value_get(key, DECIDE_TIMEOUT_S * 1000))
    if "error" in word:
        raise UserError(word["error"])
    return word["value"]


def agree(topic: str, word: str) -> bool:
    """Return True if every process passes the same word for a topic. Use each topic only once."""
    store, prefix = coordination(), f"jaxtrain/said/{topic}"
    store.key_value_set(f"{prefix}/{jax.process_index()}", word, allow_overwrite=True)
    said = {
        store.blocking_key_value_get(f"{prefix}/{process}", DECIDE_TIMEOUT_S * 1000)
        for process in range(jax.process_count())
    }
    return len(said) == 1


def coordination():
    """Return the client of JAX's coordination service, a small key-value store that all processes share."""
    from jax._src.distributed import global_state

    return global_state.client


def _disagreements(told: Mapping[int, dict]) -> list[str]:
    problems = []
    for topic in ("config", "device", "devices"):
        values: dict[str, list[int]] = {}
        for process, word in told.items():
            values.setdefault(str(word[topic]), []).append(process)
        if len(values) > 1:
            problems.append(f"{topic}: " + "; ".join(f"{v} on process {_list(p)}" for v, p in values.items()))
    for name in told[0]["versions"]:
        values = {}
        for process, word in told.items():
            values.setdefault(word["versions"][name], []).append(process)
        if len(values) > 1:
            problems.append(f"{name}: " + "; ".join(f"{v} on process {_list(p)}" for v, p in values.items()))
    return problems


def _first_all_reduce(timeout_s: float) -> None:
    from jax.experimental import multihost_utils

    failed: list[BaseException] = []

    def reduce():
        try:
            multihost_utils.sync_global_devices("jaxtrain preflight")
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=reduce, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive() or failed:
        why = failed[0] if failed else f"no answer within {timeout_s:.0f} s"
        raise UserError(f"launch: the first all-reduce failed ({why}). Can the machines reach each other on all ports?")


def _checked(launch: Launch) -> Launch:
    if not 0 <= launch.process < launch.processes:
        raise UserError(
            f"launch: {launch.launcher} gives process number {launch.process} of {launch.processes}; wanted 0 to "
            f"{launch.processes - 1}. Check RANK and WORLD_SIZE"
        )
    if launch.processes > 1 and launch.coordinator is None:
        raise UserError(
            f"launch: {launch.launcher} started {launch.processes} processes but names no coordinator; set MASTER_ADDR "
            "to the host of process 0"
        )
    return launch


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"-?\d+", text.strip()):
        raise UserError(f"launch: {name} is {text!r}, wanted a whole number")
    return int(text)


def _port(environ: Mapping[str, str], default: int) -> int:
    port = _number(environ, "JAXTRAIN_PORT", default)
    if not 0 < port < 65536:
        raise UserError(
            f"launch: the coordinator's port would be {port} (JAXTRAIN_PORT, or the one after MASTER_PORT), wanted 1 "
            "to 65535; set JAXTRAIN_PORT to one that is free on the machine of process 0"
        )
    return port


def _explicit(environ) -> Launch | None:
    if "JAXTRAIN_PROCESSES" not in environ:
        return None
    processes = _number(environ, "JAXTRAIN_PROCESSES")
    return Launch(
        "explicit",
        _number(environ, "JAXTRAIN_PROCESS", 0 if processes == 1 else None),
        processes,
        environ.get("JAXTRAIN_COORDINATOR"),
        _number(environ, "JAXTRAIN_LOCAL", 0),
        _number(environ, "JAXTRAIN_LOCALS", 1),
    )


def _torchrun(environ) -> Launch | None:
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    master, port = environ.get("MASTER_ADDR"), _number(environ, "MASTER_PORT", 29500)
    return Launch(
        "torchrun",
        _number(environ, "RANK"),
        _number(environ, "WORLD_SIZE"),
        master and f"{master}:{_port(environ, port + 1)}",  # torchrun's own store occupies MASTER_PORT
        _number(environ, "LOCAL_RANK", 0),
        _number(environ, "LOCAL_WORLD_SIZE", 1),
    )


def _slurm(environ) -> Launch | None:
    if "SLURM_PROCID" not in environ or _number(environ, "SLURM_NTASKS", 1) == 1:
        return None
    job = _number(environ, "SLURM_JOB_ID", 0)
    tasks = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE") or "1")  # the first node's, as in 4(x2)
    if tasks is None:
        raise UserError(
            f"launch: SLURM_STEP_TASKS_PER_NODE is {environ['SLURM_STEP_TASKS_PER_NODE']!r}, wanted a number, or 4(x2)"
        )
    master = environ.get("MASTER_ADDR") or first_host(environ.get("SLURM_STEP_NODELIST") or "localhost")
    return Launch(
        "Slurm",
        _number(environ, "SLURM_PROCID"),
        _number(environ, "SLURM_NTASKS"),
        f"{master}:{_port(environ, 61440 + job % 4096)}",
        _number(environ, "SLURM_LOCALID", 0),
        int(tasks.group()),
    )


def _openmpi(environ) -> Launch | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ or _number(environ, "OMPI_COMM_WORLD_SIZE") == 1:
        return None
    locals_ = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    world = _number(environ, "OMPI_COMM_WORLD_SIZE")
    master = environ.get("MASTER_ADDR") or ("localhost" if locals_ == world else None)
    return Launch(
        "OpenMPI",
        _number(environ, "OMPI_COMM_WORLD_RANK"),
        world,
        master and f"{master}:{_port(environ, 61439)}",
        _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", 0),
        locals_,
    )


def _kubernetes(environ) -> Launch | None:
    if "JOB_COMPLETION_INDEX" not in environ or "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    processes = _number(environ, "WORLD_SIZE", 1)
    master = environ.get("MASTER_ADDR")
    return Launch(
        "Kubernetes",
        _number(environ, "JOB_COMPLETION_INDEX"),
        processes,
        master and f"{master}:{_port(environ, 61438)}",
    )


def first_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: `node[003-005,7],other` -> `node003`."""
    match = re.match(r"([^\[,]+)(?:\[([0-9]+))?", nodelist)
    return match.group(1) + (match.group(2) or "") if match else nodelist


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
