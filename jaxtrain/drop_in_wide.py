"""Find integers of a batch that do not fit into the 32 bits of a compiled step."""

from typing import Any

from jaxtrain.compiled_step import CompiledStep

LIMIT = 2**31


def wide_entry(step: CompiledStep, batch: Any) -> str:
    """Describe an integer that a prepared step reads from a batch and that does not fit into 32 bits; "" if all fit."""
    bridge = step.weights.bridge
    leaves, spec, batch_type = bridge.flatten(batch, step.items)
    wide = {place: value for place, leaf in enumerate(leaves) if (value := _wide(leaf)) is not None}
    if not wide:
        return ""
    with step.weights.exchange.plainly():
        modes = bridge.flags_of(step.weights.submodules)
    graph, _ = step.record.graph(leaves, spec, modes, batch_type)
    read = [place for place in wide if place not in graph.unread_inputs()]
    return f"the batch holds an integer ({wide[read[0]]}) that does not fit into 32 bits" if read else ""


def _wide(leaf: Any) -> int | None:
    """Return an integer of an array or tensor that 32 bits do not hold, its maximum or minimum; None if all fit."""
    array = str(getattr(leaf, "dtype", "")).rpartition(".")[2] in ("int64", "uint64") and hasattr(leaf, "min")
    if not array or not min(leaf.shape, default=1):
        return None
    least, most = int(leaf.min()), int(leaf.max())
    if least >= -LIMIT and most < LIMIT:
        return None
    return most if most >= LIMIT else least
