"""Words by which processes tell each other, before a call of a compiled step, what it is about to do."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxtrain.runtime import lockstep

FEW, SHORT = 4, 200  # tensors, and letters of numbers, in a message


def word_of(program: Any, key: tuple, foreign: Sequence[Any], free: Sequence[Any]) -> dict[str, str]:
    """Return the word for `lockstep.take_turn`; {} for a single process.

    program: a CapturedProgram. key: names, sizes and options of its XLA program. foreign: the tensors that it reads and
    no module has. free: numbers that Python gives.
    """
    step, rows, capture = program._step, program._step.weights.rows, program._capture
    if rows is None:
        return {}
    shapes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in foreign[:FEW])
    whole = [tensor for tensor in foreign if rows.here(tensor) is None]
    values = [f"{tuple(x.shape)} {lockstep.digest(np.asarray(capture.results.to_batch(x)))}" for x in whole]
    numbers = jax.tree.map(lambda value: f"{value:.9g}", (free, step.updates.numbers(), step.clip_norm))
    return {
        lockstep.NEXT: f"call {step.count + 1} of {capture.loss.name}",
        "the rows of the batch": f"{rows.rows} in tensors of shapes {shapes}",
        "the numbers that Python gives": str(jax.tree.leaves(numbers))[:SHORT],
        "the tensors that are not rows": ", ".join(values),
        "the loss's graph": capture.results.operators(program._captured.program.module.graph, key),
    }
