"""Explain out-of-memory errors, with the sizes of the compiled step and advice."""

import dataclasses
from typing import Any

import jax

from jaxtrain.errors import UserError


class OutOfMemoryError(UserError):
    """The device cannot hold the step; the message says which settings would shrink it, and by how much."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device. params: all weights and buffers. optimizer: its state. columns: a dataset on the device.
    work: activations, gradients and XLA's workspace; None if the program did not compile. capacity: None if unknown.
    """

    params: int
    optimizer: int
    columns: int
    work: int | None
    capacity: int | None

    @property
    def total(self) -> int:
        return self.params + self.optimizer + self.columns + (self.work or 0)


def is_out_of_memory(error: BaseException) -> bool:
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "Out of memory" in text or "out of memory" in text


def measure(state: Any, columns: Any, program: Any) -> Memory:
    """Measure the memory of a step. state: a TrainState. columns: the dataset. program: the compiled step, or None."""
    analysis = program.memory_analysis() if program is not None else None
    stats = jax.local_devices()[0].memory_stats() or {}
    return Memory(
        params=bytes_per_device((state.params, state.frozen, state.buffers, state.ema)),
        optimizer=bytes_per_device(state.opt_state),
        columns=bytes_per_device(columns),
        work=None if analysis is None else int(analysis.temp_size_in_bytes),
        capacity=stats.get("bytes_limit"),
    )


def bytes_per_device(tree: Any) -> int:
    """Return the bytes that a tree of arrays takes on one device."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            continue
        shape = leaf.sharding.shard_shape(leaf.shape) if getattr(leaf, "sharding", None) is not None else leaf.shape
        size = leaf.dtype.itemsize
        for n in shape:
            size *= n
        total += size
    return total


def explain(config: Any, memory: Memory, devices: int) -> str:
    """Return a message that says what needs how much memory, then which settings help, each with its savings."""
    known = f"{_gb(memory.params)} parameters, {_gb(memory.optimizer)} optimizer"
    if memory.columns:
        known += f", {_gb(memory.columns)} dataset"
    if memory.work is not None:
        known += f", {_gb(memory.work)} activations and workspace"
    capacity = f", which offers {_gb(memory.capacity)}" if memory.capacity else ""
    lines = [f"out of memory: the training step needs {_gb(memory.total)} on each device{capacity} ({known})."]
    options = [*_less_work(config, memory), *_less_state(config, memory, devices)]
    return "\n  ".join([lines[0] + " What helps:", *(f"- {line}" for line in options)])


def _less_work(config: Any, memory: Memory) -> list[str]:
    batch, accumulate, work = config.data.batch_size, config.train.accumulate_steps, memory.work
    micro = batch // accumulate
    about = lambda share: f", about {_gb(int(work * share))} less" if work else ""
    lines = []
    if micro > 1:
        lines.append(
            f"train.accumulate_steps={accumulate * 2}: micro-batches of {micro // 2} instead of {micro}, the same "
            f"batch of {batch}{about(0.5)}"
        )
        lines.append(f"data.batch_size={batch // 2}{about(0.5)}")
    if config.train.remat != "full":
        stronger = {"none": "dots or full", "dots": "full"}[config.train.remat]
        lines.append(f"train.remat={stronger}: activations are computed again instead of kept, up to a third slower")
    if config.precision.policy == "fp32":
        lines.append(f"precision.policy=bf16: activations take half{about(0.5)}")
    if config.train.steps_per_call > 1:
        lines.append("train.steps_per_call=1: one batch on the device at a time")
    return lines


def _less_state(config: Any, memory: Memory, devices: int) -> list[str]:
    lines = []
    if memory.columns:
        lines.append(f"data.placement=host: the dataset stays off the device, {_gb(memory.columns)} less")
    if devices > 1 and config.shard.strategy in ("ddp", "ddp_local"):
        saved = (memory.params + memory.optimizer) * (devices - 1) // devices
        lines.append(f"shard.strategy=fsdp: parameters and optimizer over {devices} devices, {_gb(saved)} less")
    elif devices == 1:
        lines.append("more devices with shard.strategy=fsdp: parameters and optimizer are divided by their number")
    if config.optim.name in ("adam", "adamw"):
        lines.append(f"optim.name=adafactor: nearly no optimizer memory, {_gb(memory.optimizer)} less")
    return lines


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 5e6 else f"{size / 1e6:.2f} MB"
