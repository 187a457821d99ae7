"""Exchange tensors and JAX arrays: inputs share memory without a copy, outputs are tensors with memory of their own."""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import torch

from jaxtrain.errors import UserError
from torch_bridge.datasets import in_host_memory, is_dense, kind_of
from torch_bridge.lowering.errors import CannotRecord, StaysInTorch, WideIntegers

LARGE_BYTES = 1 << 18  # from this size a copy takes longer than dlpack's 20 us
QUEUED = 2  # programs besides the newest: the device never waits for Python, and few batches are held

_TORCHS = frozenset({torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64})
_ON_GPUS = (_TORCHS - {torch.float64}) | {torch.int8, torch.int16, torch.float16, torch.bfloat16}
_NUMPYS = frozenset(
    map(np.dtype, ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64"))
)


def any_wide(tensors: Iterable[torch.Tensor]) -> bool:
    """Return True if any tensor is in double precision, so that JAX must compute in 64 bits."""
    return any(tensor.dtype in (torch.float64, torch.complex128) for tensor in tensors)


def inexact(tensor: torch.Tensor) -> bool:
    """Return True if the tensor's dtype can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def precision(wide: bool) -> contextlib.AbstractContextManager:
    """Return the context in which JAX computes: 64 bits if `wide`; on a GPU float32 products in torch's current
    precision."""
    width = jax.enable_x64(True) if wide else contextlib.nullcontext()
    if jax.default_backend() == "cpu":
        return width
    both = contextlib.ExitStack()
    both.enter_context(width)
    both.enter_context(products())
    return both


def products() -> contextlib.AbstractContextManager:
    """Return a context in which JAX's float32 products on a GPU have torch's precision: float32, or TF32 after
    torch.set_float32_matmul_precision("high")."""
    if jax.default_backend() == "cpu":
        return contextlib.nullcontext()
    exact = torch.get_float32_matmul_precision() == "highest"
    return jax.default_matmul_precision("float32" if exact else "tensorfloat32")


def to_array(tensor: torch.Tensor) -> jax.Array:
    """Return the tensor's memory as an array; int64 becomes int32 where JAX computes in 32 bits.

    Raises WideIntegers for integers that 32 bits cannot hold, UserError for a device that JAX does not have.
    """
    tensor = narrowed(tensor.detach().contiguous().resolve_conj().resolve_neg())
    try:
        return jax.dlpack.from_dlpack(tensor)
    except (RuntimeError, ValueError, TypeError, BufferError) as error:
        platforms = ", ".join(sorted({device.platform for device in jax.devices()} | {"cpu"}))
        raise UserError(
            f"a {tensor.dtype} tensor on {tensor.device} cannot go to JAX, which has {platforms} here: {error}. Move "
            "the module and its inputs with .to('cpu'), or install jax for that device"
        ) from None


def narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return int64 as int32 where JAX computes in 32 bits. Raises WideIntegers for values that do not fit."""
    if tensor.dtype is torch.int64 and not jax.config.jax_enable_x64:
        narrow = tensor.to(torch.int32)
        if not torch.equal(narrow.to(torch.int64), tensor):
            raise WideIntegers(
                f"an int64 tensor of shape {tuple(tensor.shape)} holds values from {tensor.min()} to {tensor.max()}, "
                "and JAX computes with 32-bit integers here. Map the ids to a smaller range, or call "
                "jax.config.update('jax_enable_x64', True) first"
            )
        tensor = narrow
    return tensor


def to_input(tensor: torch.Tensor) -> jax.Array | np.ndarray:
    """Return a tensor's memory in the form that a compiled function takes fastest.

    A 0-d tensor on the CPU is moved to the device of the other inputs, as in torch.
    """
    anywhere = jax.default_backend() == "cpu" or tensor.dim() == 0
    if not tensor.is_cpu or tensor.dtype not in _TORCHS or not anywhere:
        return to_array(tensor)
    return narrowed(tensor.detach()).numpy()


def _check_tensor(tensor: torch.Tensor) -> None:
    if _is_own_class(type(tensor)):
        raise StaysInTorch(f"it is given a {type(tensor).__name__}, a tensor class with methods of its own")
    if not is_dense(tensor):
        raise CannotRecord(f"it is given a {kind_of(tensor)} tensor, and compiled programs take dense ones")


@functools.cache
def _is_own_class(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in ("torch", "torchvision", "torch_bridge")


def to_batch(tensor: torch.Tensor) -> jax.Array | np.ndarray:
    """Return a batch's tensor as an array in host memory, or on its GPU if JAX computes on GPUs too.

    On a GPU it is a copy, so that torch may write to the tensor at once; `Queue` keeps the copy while a program reads
    it. Raises StaysInTorch for a tensor of a user's own class, CannotRecord for a sparse or nested one.
    """
    _check_tensor(tensor)
    if not tensor.is_cuda or tensor.dtype not in _ON_GPUS or jax.default_backend() != "gpu":
        return in_host_memory(tensor)
    tensor = tensor.detach()
    narrow = narrowed(tensor)
    return to_array(narrow.clone(memory_format=torch.contiguous_format) if narrow is tensor else narrow)


class Queue:
    """Inputs of the few programs that run or wait. They are kept alive until then: once JAX drops an array in torch's
    memory, torch may reuse that memory."""

    def __init__(self) -> None:
        self._waiting: collections.deque[tuple[jax.Array, list[Any]]] = collections.deque()

    def put(self, result: jax.Array, inputs: list[Any]) -> None:
        """Add the program that computes `result` from `inputs`; wait for the program QUEUED places before it."""
        self._waiting.append((result, inputs))
        if len(self._waiting) > QUEUED:
            self._waiting.popleft()[0].block_until_ready()


def to_tensor(array: jax.Array, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy an array into a new tensor, which torch may write to. int32 becomes int64, torch's default integer."""
    return to_tensors([array], dtype)[0]


def to_tensors(arrays: Iterable[jax.Array], dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """Copy arrays into new tensors, as `to_tensor`."""
    tensors = [_own(array, dtype) for array in arrays]
    settle(tensors)
    return tensors


def _own(array: jax.Array, dtype: torch.dtype | None) -> torch.Tensor:
    if array.dtype in _NUMPYS and array.device.platform == "cpu":
        tensor, own = torch.from_numpy(np.array(array)), True  # ten times faster than dlpack's overhead
    else:
        tensor, own = torch.from_dlpack(array), False
    wanted = dtype or (torch.int64 if tensor.dtype is torch.int32 else tensor.dtype)
    if tensor.dtype is not wanted:
        return tensor.to(wanted)
    return tensor if own else tensor.clone()


def is_on(device: torch.device, array: jax.Array) -> bool:
    """Return True if the device is a GPU and holds the whole array."""
    if device.type != "cuda" or len(array.sharding.device_set) != 1:
        return False
    place = array.device
    return place.platform == "gpu" and place.local_hardware_id == device.index


def settle(tensors: Iterable[torch.Tensor]) -> None:
    """Wait until torch has read JAX's memory on a GPU: JAX may reuse it once the array is gone."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


def to_host(arrays: Any) -> Any:
    """Fetch all arrays of a tree; leave those alone of which other processes hold pieces: `lazy_array.to_host` gathers
    one at a time. On a CPU this goes array by array: jax.device_get prepares a transfer for each, which takes ten times
    as long as reading its memory."""
    if any(isinstance(leaf, jax.Array) and not leaf.is_fully_addressable for leaf in jax.tree.leaves(arrays)):
        return arrays
    return jax.tree.map(np.asarray, arrays) if jax.default_backend() == "cpu" else jax.device_get(arrays)


def take(arrays: Iterable[jax.Array], others: Iterable[Any]) -> list[torch.Tensor]:
    """Return arrays that a program has computed as tensors that torch may write to. Unlike `to_tensor`, do not copy an
    array that is large and shares its memory with no other array and none of `others`."""
    arrays = list(arrays)
    large = [array for array in arrays if array.nbytes >= LARGE_BYTES]
    if not large or jax.default_backend() != "cpu":
        return to_tensors(arrays)
    shared = collections.Counter(map(address, (*arrays, *others)))
    alone = {id(array) for array in large if shared[address(array)] == 1 and array.dtype != np.int32}
    return [torch.from_dlpack(array) if id(array) in alone else to_tensor(array) for array in arrays]


def address(value: Any) -> int:
    """Return the memory address of an array's first element."""
    return value.ctypes.data if isinstance(value, np.ndarray) else value.unsafe_buffer_pointer()


class Shared:
    """Cache of arrays that share memory with tensors passed at every call, such as a module's parameters."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[tuple, jax.Array]] = {}

    def array(self, place: int, tensor: torch.Tensor) -> jax.Array:
        """Return the tensor's memory as an array, as `to_array`; return the same array as long as the memory is the
        same."""
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, jax.config.jax_enable_x64
        held = self._held.get(place)
        if held is not None and held[0] == key:
            return held[1]
        array = to_array(tensor)
        self._held.pop(place, None)
        if tensor.is_cpu and array.unsafe_buffer_pointer() == tensor.data_ptr():  # no copy: torch's writes are seen
            self._held[place] = key, array
        return array


@functools.cache
def pull_back() -> Callable[[Any, Any], Any]:
    """Return the compiled backward pass: (pullback of jax.vjp, cotangents) -> gradients."""
    return jax.jit(lambda pullback, cotangents: pullback(cotangents)[0])
