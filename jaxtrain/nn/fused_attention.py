"""Fused attention for half precision on GPUs: the scores never go to memory, so long sequences cost only time.

cuDNN's kernel computes attention without dropout; under `deterministic: true` XLA uses its deterministic backward pass
(openxla/xla#14125). `dropped_attention` computes attention with dropout and, if cuDNN's kernel fails, attention without
bias and window. Each kernel is tested against the plain formula once per process.
"""

import collections
import contextlib
import contextvars
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtrain.nn import cudnn, dropped_attention
from jaxtrain.nn.attention_formula import formula
from jaxtrain.runtime import launch, xla_flags
from jaxtrain.runtime.spread import over_devices

log = logging.getLogger(__name__)
LEAST_TOKENS = 64  # with fewer tokens, the scores are no larger than q and k
WIDEST = {8: 128, 9: 256}  # largest head width, by major compute capability
_planned: contextvars.ContextVar[tuple[int, int] | None] = contextvars.ContextVar("planned", default=None)


# Number of attentions traced for each kind: "cuDNN", "Triton", "Triton, with dropout", "formula", "..., in a ring".
chosen: collections.Counter[str] = collections.Counter()


@contextlib.contextmanager
def planned_for(capability: tuple[int, int]) -> Iterator[None]:
    """Trace programs in this context for a GPU that you don't have; its kernels are assumed to work."""
    token = _planned.set(capability)
    try:
        yield
    finally:
        _planned.reset(token)


def takes(q, k, v, mask=None, causal=False, window=None) -> bool:
    """Return True if `fused` can compute this attention here.

    It takes [batch, token, head, width] in half precision, heads a multiple of k's and v's, widths multiples of 8, a
    mask or bias [batch or 1, head or 1, query or 1, key or 1], causal only with equal numbers of queries and keys, a
    window only if causal.
    """
    by_cudnn = (
        _fits(q, k, v, mask, causal, window) and is_available() and q.shape[-1] <= WIDEST.get(capability()[0], 128)
    )
    return by_cudnn or _tiled(q, k, v, mask, causal, window)


def _fits(q, k, v, mask, causal, window) -> bool:
    queries, keys = q.shape[1], k.shape[1]
    return (
        q.ndim == 4
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and len(q) == len(k) == len(v)
        and q.shape[2] % k.shape[2] == 0
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % 8 == 0
        and min(queries, keys) >= LEAST_TOKENS
        and (queries == keys or not causal)
        and (causal or window is None)
        and (mask is None or mask.ndim == 4)
    )


def _tiled(q, k, v, mask, causal, window) -> bool:
    """Return True if `dropped_attention` can compute this attention here."""
    boolean = mask is None or mask.dtype == jnp.bool_
    return boolean and window is None and _fits(q, k, v, mask, causal, None) and dropped_attention.takes(q) and _drops()


def takes_dropout(q, k, v, mask=None, causal=False, window=None) -> bool:
    """Return True if `dropped` can compute this attention here: the conditions of `takes`, no bias and no window."""
    return _tiled(q, k, v, mask, causal, window)


def dropped(q, k, v, key, kept, *, mask=None, lengths=None, causal=False, scale=None):
    """Run `dropped_attention.attention`."""
    chosen["Triton, with dropout"] += 1
    options = {"mask": mask, "lengths": lengths, "causal": causal, "scale": scale}
    return dropped_attention.attention(q, k, v, key, kept, **options)


def fused(q, k, v, *, mask=None, bias=None, causal=False, lengths=None, window=None, scale=None):
    """Compute softmax(q k^T scale + bias) v for arguments that `takes` accepts, with a mask, a bias, or lengths.

    lengths: int [batch], the number of visible keys of each sample. window: see `jaxtrain.nn.attention`. A row that may
    attend to nothing (a bias of -inf for every visible key) gives 0. Source: jax.nn.dot_product_attention.
    """
    if not is_available():
        chosen["Triton"] += 1
        return dropped_attention.attention(q, k, v, mask=mask, lengths=lengths, causal=causal, scale=scale)
    chosen["cuDNN"] += 1
    return fused_by_cudnn(q, k, v, mask=mask, bias=bias, causal=causal, lengths=lengths, window=window, scale=scale)


def fused_by_cudnn(q, k, v, *, mask=None, bias=None, causal=False, lengths=None, window=None, scale=None):
    """Compute `fused` with cuDNN's kernel."""
    given = mask if bias is None else bias
    if given is None:
        return _kernel(q, k, v, lengths=lengths, causal=causal, window=window, scale=scale)
    queries, keys = q.shape[1], k.shape[1]
    given = jnp.broadcast_to(given, (*given.shape[:2], queries, keys))
    least = jnp.finfo(q.dtype).min / 2
    if bias is None:
        finite, seen = jnp.where(given, 0, least).astype(q.dtype), given
    else:
        finite, seen = jnp.maximum(given.astype(q.dtype), least), given > -jnp.inf
    odd = (queries % 2, keys % 2)  # with a bias, the kernel refuses odd lengths
    if any(odd):
        hidden = ((0, 0), (0, 0), (0, odd[0]), (0, odd[1]))
        finite = jnp.pad(finite, hidden, constant_values=least)
        q = jnp.pad(q, ((0, 0), (0, odd[0]), (0, 0), (0, 0)))
        k, v = (jnp.pad(x, ((0, 0), (0, odd[1]), (0, 0), (0, 0))) for x in (k, v))
    y = _kernel(q, k, v, bias=finite, causal=causal, window=window, scale=scale)[:, :queries]
    seen = seen & jnp.tril(jnp.ones(seen.shape[-2:], bool)) if causal else seen
    return jnp.where(jnp.swapaxes(seen.any(-1), 1, 2)[..., None], y, 0)


def _kernel(q, k, v, *, bias=None, lengths=None, causal=False, window=None, scale=None):
    """Run the kernel on every device for its samples and heads. A sample of length 0 gives 0."""
    queries, heads = ("batch", None if causal else "sequence", "heads", None), ("batch", None, "heads", None)
    given = [(bias, ("batch", "heads", queries[1], None)), (lengths, ("batch",))]
    more = [x for x, _ in given if x is not None]

    def run(q, k, v, *more):
        more = iter(more)
        bias_, lengths_ = (next(more) if x is not None else None for x, _ in given)
        some = None if lengths_ is None else jnp.maximum(lengths_.astype(jnp.int32), 1)
        y: Any = cudnn.attention(q, k, v, bias=bias_, lengths=some, causal=causal, window=window or 0, scale=scale)
        return y if lengths_ is None else jnp.where((lengths_ > 0)[:, None, None, None], y, 0)

    kinds = [queries, heads, heads] + [names for x, names in given if x is not None]
    return over_devices(run, (q, k, v, *more), kinds, queries)


def is_planned() -> bool:
    """Return True if programs are traced for a GPU that you don't have."""
    return _planned.get() is not None


def is_available() -> bool:
    """Return True if cuDNN's kernel works on the GPU that programs are compiled for."""
    return is_planned() or _runs_here()


def capability() -> tuple[int, int]:
    """Return the compute capability of the GPU that programs are compiled for."""
    planned = _planned.get()
    if planned is not None:
        return planned
    major, _, minor = jax.devices()[0].compute_capability.partition(".")
    return int(major), int(minor)


def _drops() -> bool:
    return is_planned() or _drops_here()


@functools.cache
def _runs_here() -> bool:
    """Test cuDNN's kernel: forward and backward, odd lengths, grouped heads, with lengths, a mask, and causal."""
    return tried("cuDNN's kernel", lambda: difference(fused_by_cudnn, _TRIALS))


@functools.cache
def _drops_here() -> bool:
    """Test the Triton kernels, with dropout and without."""

    def kernel(q, k, v, dropout_rate=0.0, rngs=None, **given):
        key = None if rngs is None else rngs()
        return dropped_attention.attention(q, k, v, key, 1 - dropout_rate, **given)

    of_formula = {"dropout_rate": 0.25, "rngs": lambda: jax.random.key(7)}
    cases = [*_TRIALS, *((tokens, given | of_formula) for tokens, given in _TRIALS)]
    return tried("the Triton kernel", lambda: difference(kernel, cases))


def tried(name: str, measure: Callable[[], float]) -> bool:
    """Return True if a kernel gives the formula's results and gradients on every process's device. measure: runs a
    small trial and returns its error."""
    return agreed(name, _tried(name, measure))


def agreed(name: str, works: bool) -> bool:
    """Return True if the kernel works on every process; collectives of different programs would not match.

    Every process calls this at the same point, because all trace the same programs.
    """
    if jax.process_count() == 1 or jax.default_backend() != "gpu":
        return works
    everywhere = launch.agree(f"attention/{name}", str(works)) and works
    if works and not everywhere:
        log.warning("attention runs as plain XLA: %s works here, but not on every process", name)
    return everywhere


TRIAL_TOLERANCE = 2e-2  # error of bfloat16 results against float32 ones, relative to the norm
_TRIALS = ((65, {}), (65, {"causal": True}), (64, {"lengths": [64, 40]}), (65, {"mask": [65, 40]}))


def _tried(name: str, measure: Callable[[], float]) -> bool:
    if jax.default_backend() != "gpu":
        return False
    before = chosen.copy()
    try:
        worst = _apart(measure)
    except Exception as error:  # any error of the kernel, its compiler or a library
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        log.warning("attention: %s is left out, as a trial of it failed (%s)", name, told)
        return False
    finally:
        chosen.clear()
        chosen.update(before)
    if not worst < TRIAL_TOLERANCE:
        log.warning("attention: %s is left out, as it is off by %.1e in a trial", name, worst)
        return False
    return True


def _apart(measure: Callable[[], float]) -> float:
    """Call `measure` in a separate thread, so that it is not part of a program that is being traced here."""
    found: list[float] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(measure())
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="attention trial")
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


def difference(kernel: Callable, cases: Sequence[tuple[int, dict]]) -> float:
    """Return the largest relative error of a kernel's bfloat16 results and gradients against the formula in float32.

    cases: (tokens, options). As in a training step, two layers per case form one program with a run's compiler options,
    which is called several times and reuses its arguments' memory.
    """
    draw = lambda case, tokens, i, heads: jax.random.normal(jax.random.key(8 * case + i), (2, tokens, heads, 64))
    arrays = [[draw(n, tokens, i, heads) for i, heads in enumerate((4, 2, 2))] for n, (tokens, _) in enumerate(cases)]

    def run(attend: Callable, arrays: list) -> list:
        return [_two_layers(attend, tokens, given, *each) for (tokens, given), each in zip(cases, arrays, strict=True)]

    wanted = jax.jit(functools.partial(run, formula))(arrays)
    on_gpu = jax.default_backend() == "gpu"
    options = xla_flags.options(1, deterministic=True) if on_gpu else None
    step = cudnn.traced_as(functools.partial(run, kernel), on_gpu)
    program = jax.jit(step, compiler_options=options, donate_argnums=0 if on_gpu else ())
    for _ in range(3):
        got = jax.block_until_ready(program(jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays)))
    size = jnp.linalg.norm
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True)
    return max(float(size((x.astype(jnp.float32) - y).ravel()) / size(y.ravel())) for x, y in pairs)


def _two_layers(attend: Callable, tokens: int, given: dict, q, k, v) -> list:
    """Return the result of two layers and the gradients of q, k and v."""
    options = {name: jnp.asarray(x) if name == "lengths" else x for name, x in given.items()}
    if "mask" in options:
        options["mask"] = (jnp.arange(tokens) < jnp.asarray(options["mask"])[:, None])[:, None, None]

    def both(q, k, v):
        return attend(attend(q, k, v, **options), k, v, **options)

    value, pull = jax.vjp(both, q, k, v)
    slope = jnp.cos(jnp.arange(value.size, dtype=jnp.float32))  # float32: bfloat16 cannot represent the counter
    return [value, *pull(slope.astype(value.dtype).reshape(value.shape))]
