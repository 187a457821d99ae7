"""Choose a micro-batch or batch size that fits into a device's memory, from the compiler's analysis of the step."""

from typing import Any

import jax

from jaxtrain.errors import UserError
from jaxtrain.train.compilation.out_of_memory import is_out_of_memory

ROOM = 0.95  # usable share of a device's memory; the allocator needs the rest


def limit_of(program: Any, given: int | None = None) -> int | None:
    """Return the bytes a step may use on one device: `given`, else the config's, else the device's; None if unknown."""
    known = given or program.config.data.memory_limit_bytes
    if known is not None:
        return known
    offered = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return None if offered is None else int(ROOM * offered)


def step_bytes(program: Any, accumulate: int, batch_size: int | None = None) -> float:
    """Return the bytes per device of the training step with `accumulate` micro-batches; infinity if compiling it runs
    out of memory. Compiles the step; nothing runs."""
    arguments = program.abstract_arguments(accumulate=accumulate, batch_size=batch_size)
    try:
        compiled = program.jit(program.step(), donate_argnums=0).lower(*arguments).compile()
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return float("inf")
    memory = compiled.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return float(held + memory.temp_size_in_bytes)


def steps_of(program: Any) -> int:
    """Return train.accumulate_steps according to `data.micro_batch`; for "auto" the fewest micro-batches that fit.

    Raises UserError if none fits, if micro-batches would change the result, or if both settings are given.
    """
    data, present = program.config.data, program.config.train.accumulate_steps
    wanted, size = data.micro_batch, data.batch_size
    if wanted is None:
        return present
    if present != 1:
        raise UserError(f"data.micro_batch: decides train.accumulate_steps, which is {present}; leave one of them out")
    if wanted != "auto":
        if size % wanted:
            raise UserError(f"data.micro_batch: {wanted} does not divide the {size} samples of data.batch_size")
        return size // wanted
    limit = limit_of(program)
    if limit is None:
        program.data.notes.append("data.micro_batch: auto keeps whole batches, as this device does not tell its memory")
        return 1
    found = _fewest(program, limit)
    note = f"data.micro_batch: auto takes {size // found} samples at a time ({found} micro-batches)"
    program.data.notes.append(f"{note}, for {limit / 1e9:.3g} GB on each device")
    if found > 1 and program.task.couples_samples:
        raise UserError(
            f"data.micro_batch: auto: a batch of {size} does not fit, and {found} micro-batches would change the "
            "result, as the loss of a sample depends on the others (BatchNorm, a contrastive loss); set "
            f"data.micro_batch={size // found} if that is wanted"
        )
    return found


def _fewest(program: Any, limit: int) -> int:
    """Find the fewest micro-batches that fit, by bisection over compiled steps. Raises UserError if none fits."""
    size = program.config.data.batch_size
    counts = [n for n in range(1, size + 1) if size % n == 0 and (size // n) % program.layout.batch_devices == 0]
    whole = step_bytes(program, counts[0])
    if whole <= limit:
        return counts[0]
    least = step_bytes(program, counts[-1])
    if least > limit:
        raise UserError(
            f"data.micro_batch: auto: even {size // counts[-1]} sample(s) at a time take {least / 1e9:.3g} GB of the "
            f"{limit / 1e9:.3g} GB on each device; shard.strategy=fsdp, train.remat=full or precision.policy=bf16 take "
            "less"
        )
    low, high = 0, len(counts) - 1  # counts[low] does not fit, counts[high] does
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if step_bytes(program, counts[middle]) <= limit else (middle, high)
    return counts[high]


def largest_batch(program: Any, limit: int | None = None) -> int:
    """Return the samples of the largest batch whose step fits, with the config's number of micro-batches.

    limit: bytes on one device; default: the config's or the device's own. Doubles the size, then bisects; compiles a
    step for each size, and runs none. Raises UserError if the memory is unknown or the smallest batch does not fit.
    """
    limit = limit_of(program, limit)
    if limit is None:
        raise UserError("find_batch_size: this device does not tell its memory; give limit_bytes")
    accumulate = program.config.train.accumulate_steps
    unit = program.layout.batch_devices * accumulate
    fits = lambda units: step_bytes(program, accumulate, units * unit) <= limit
    if not fits(1):
        raise UserError(f"find_batch_size: a batch of {unit} takes more than the {limit / 1e9:.3g} GB on each device")
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high * unit > 1 << 24:
            return low * unit
    while high - low > max(1, low // 16):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * unit
