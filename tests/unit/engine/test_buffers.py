"""Memory of batches is used again, and never while somebody holds it."""

import jax
import numpy as np
import pytest

from jaxtrain.data.buffers import KEPT, LEAST_BYTES, Buffers

SHAPE = (LEAST_BYTES // 4,)


def test_memory_that_nobody_holds_is_given_again():
    buffers = Buffers()
    addresses = {buffers.empty(SHAPE, np.float32).ctypes.data for _ in range(10)}
    assert len(addresses) == 1


@pytest.mark.parametrize(
    "holder",
    [
        lambda array: array,
        lambda array: array.reshape(2, -1)[1, ::2],
        lambda array: memoryview(array),
        lambda array: jax.device_put(array[None]),
        lambda array: jax.dlpack.from_dlpack(array),
    ],
    ids=["itself", "a view", "its buffer", "a JAX array", "dlpack"],
)
def test_memory_that_somebody_holds_is_not_written(holder):
    buffers = Buffers()
    held = []
    for value in range(3):
        array = buffers.empty(SHAPE, np.float32)
        array[:] = value
        held.append(holder(array))
        del array
    assert [np.unique(np.asarray(one)).tolist() for one in held] == [[0.0], [1.0], [2.0]]


def test_shapes_and_dtypes_are_kept_apart_and_few():
    buffers = Buffers()
    for rows in range(1, 3 * KEPT):
        for dtype in (np.float32, np.int32):
            array = buffers.empty((rows, *SHAPE), dtype)
            assert (array.shape, array.dtype) == ((rows, *SHAPE), dtype)
    assert len(buffers._given) == KEPT
