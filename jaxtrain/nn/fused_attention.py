"""A GPU's attention for half precision: the scores never reach memory, so long sequences cost time alone.

cuDNN's kernel does what is not dropped out; under `deterministic: true` XLA takes its deterministic backward pass
(openxla/xla#14125). `dropped_attention` does what is, and where cuDNN's fails what has neither mask nor window. Each is
tried beside the plain formula once in a process.
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
LEAST_TOKENS = 64  # with fewer, the scores are no larger than what they are made of
WIDEST = {8: 128, 9: 256}  # head, by major compute capability
_planned: contextvars.ContextVar[tuple[int, int] | None] = contextvars.ContextVar("planned", default=None)


# How many attentions were traced as what: "cuDNN", "Triton", "Triton, with dropout", "formula", or a ring of one.
chosen: collections.Counter[str] = collections.Counter()


@contextlib.contextmanager
def planned_for(capability: tuple[int, int]) -> Iterator[None]:
    """Trace programs, inside, for such a GPU, which is elsewhere: its kernels are taken for granted."""
    token = _planned.set(capability)
    try:
        yield
    finally:
        _planned.reset(token)


def takes(q, k, v, mask=None, causal=False, window=None) -> bool:
    """Tell whether `fused` can do it here: [batch, token, head, width] in half precision, heads a multiple of k's and
    v's, widths in steps of 8, a mask or bias [batch or 1, head or 1, query or 1, key or 1], causal only with as many
    queries as keys, a window only where causal."""
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
    """Tell whether `dropped_attention` can do it here."""
    plain = mask is None and window is None
    return plain and _fits(q, k, v, None, causal, None) and dropped_attention.takes(q) and _drops()


def takes_dropout(q, k, v, mask=None, causal=False, window=None) -> bool:
    """Tell whether `dropped` can do it here: what `takes` says, without mask and window."""
    return _tiled(q, k, v, mask, causal, window)


def dropped(q, k, v, key, kept, *, lengths=None, causal=False, scale=None):
    """Run `dropped_attention.attention`."""
    chosen["Triton, with dropout"] += 1
    return dropped_attention.attention(q, k, v, key, kept, lengths=lengths, causal=causal, scale=scale)


def fused(q, k, v, *, mask=None, bias=None, causal=False, lengths=None, window=None, scale=None):
    """Compute softmax(q k^T scale + bias) v of what `takes` accepts, with a mask or a bias, or int [batch] lengths: how
    many keys of each sample are visible. window: see `jaxtrain.nn.attention`. A row that may attend to nothing (a bias
    of -inf throughout, or as far as it may look) gives 0. Source: jax.nn.dot_product_attention."""
    if not is_available():
        chosen["Triton"] += 1
        return dropped_attention.attention(q, k, v, lengths=lengths, causal=causal, scale=scale)
    chosen["cuDNN"] += 1
    return fused_by_cudnn(q, k, v, mask=mask, bias=bias, causal=causal, lengths=lengths, window=window, scale=scale)


def fused_by_cudnn(q, k, v, *, mask=None, bias=None, causal=False, lengths=None, window=None, scale=None):
    """Run cuDNN's kernel, see `fused`."""
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
    odd = (queries % 2, keys % 2)  # which the kernel refuses under a bias
    if any(odd):
        hidden = ((0, 0), (0, 0), (0, odd[0]), (0, odd[1]))
        finite = jnp.pad(finite, hidden, constant_values=least)
        q = jnp.pad(q, ((0, 0), (0, odd[0]), (0, 0), (0, 0)))
        k, v = (jnp.pad(x, ((0, 0), (0, odd[1]), (0, 0), (0, 0))) for x in (k, v))
    y = _kernel(q, k, v, bias=finite, causal=causal, window=window, scale=scale)[:, :queries]
    seen = seen & jnp.tril(jnp.ones(seen.shape[-2:], bool)) if causal else seen
    return jnp.where(jnp.swapaxes(seen.any(-1), 1, 2)[..., None], y, 0)


def _kernel(q, k, v, *, bias=None, lengths=None, causal=False, window=None, scale=None):
    """On every device its samples and heads. A sample of length 0 gives 0."""
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
    """Tell whether programs are traced for a GPU that is elsewhere."""
    return _planned.get() is not None


def is_available() -> bool:
    """Tell whether the GPU that programs are compiled for runs the kernel."""
    return is_planned() or _runs_here()


def capability() -> tuple[int, int]:
    """Give the compute capability of the GPU that programs are compiled for."""
    planned = _planned.get()
    if planned is not None:
        return planned
    major, _, minor = jax.devices()[0].compute_capability.partition(".")
    return int(major), int(minor)


def _drops() -> bool:
    return is_planned() or _drops_here()


@functools.cache
def _runs_here() -> bool:
    """Forward and backward, odd lengths, grouped heads, under lengths, a mask and a diagonal."""
    return tried("cuDNN's kernel", lambda: difference(fused_by_cudnn, _TRIALS))


@functools.cache
def _drops_here() -> bool:
    """With dropout and without."""

    def kernel(q, k, v, dropout_rate=0.0, rngs=None, **given):
        key = None if rngs is None else rngs()
        return dropped_attention.attention(q, k, v, key, 1 - dropout_rate, **given)

    plain = [(tokens, given) for tokens, given in _TRIALS if "mask" not in given]
    of_formula = {"dropout_rate": 0.25, "rngs": lambda: jax.random.key(7)}
    cases = [*plain, *((tokens, given | of_formula) for tokens, given in plain)]
    return tried("the Triton kernel", lambda: difference(kernel, cases))


def tried(name: str, measure: Callable[[], float]) -> bool:
    """Return True if a small trial gives the formula's results and gradients on every process's device. measure: how
    far it is off."""
    return agreed(name, _tried(name, measure))


def agreed(name: str, works: bool) -> bool:
    """Return True if it works on every process: with other programs on some of them, their collectives would not meet.

    Each process asks at the same place, as all trace the same programs.
    """
    if jax.process_count() == 1 or jax.default_backend() != "gpu":
        return works
    everywhere = launch.agree(f"attention/{name}", str(works)) and works
    if works and not everywhere:
        log.warning("attention runs as plain XLA: %s works here, but not on every process", name)
    return everywhere


TRIAL_TOLERANCE = 2e-2  # of bfloat16 results against float32 ones, relative to their norm
_TRIALS = ((65, {}), (65, {"causal": True}), (64, {"lengths": [64, 40]}), (65, {"mask": [65, 40]}))


def _tried(name: str, measure: Callable[[], float]) -> bool:
    if jax.default_backend() != "gpu":
        return False
    before = chosen.copy()
    try:
        worst = _apart(measure)
    except Exception as error:  # whatever a kernel, its compiler or a library's version may raise
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
    """Measure in a thread of its own, which has no part in a program that is being traced here."""
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
    """Measure how far a kernel's results and gradients in bfloat16 are from the formula's in float32, at most.

    cases: tokens, options. As in a training step, two layers of each are one program with the options of a run, which
    is called again and again and takes over its arguments' memory.
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
    """The result and the gradients of q, k and v."""
    options = {name: jnp.asarray(x) if name == "lengths" else x for name, x in given.items()}
    if "mask" in options:
        options["mask"] = (jnp.arange(tokens) < jnp.asarray(options["mask"])[:, None])[:, None, None]

    def both(q, k, v):
        return attend(attend(q, k, v, **options), k, v, **options)

    value, pull = jax.vjp(both, q, k, v)
    slope = jnp.cos(jnp.arange(value.size, dtype=jnp.float32))  # bfloat16 cannot count so far
    return [value, *pull(slope.astype(value.dtype).reshape(value.shape))]
