"""Generate token by token with one compiled prefill, one compiled step and a cache of fixed size."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.runtime.prng import key_of
from jaxtrain.systems.memory_lm.cache import Cache


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling options. do_sample=False takes the most likely token; top_k=0 keeps all tokens.

    Raises UserError for values out of range.
    """

    temperature: float = 0.7
    top_p: float = 0.9
    top_k: int = 50
    do_sample: bool = True

    def __post_init__(self):
        if not self.temperature > 0:
            raise UserError(f"temperature: {self.temperature}, wanted more than 0 (greedy is do_sample=False)")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: {self.top_p}, wanted more than 0 and at most 1")
        if self.top_k < 0:
            raise UserError(f"top_k: {self.top_k}, wanted 0 (all tokens) or more")


class Generated(NamedTuple):
    """Result of generation. tokens: int [row, new], the pad token after a row's end. lengths: new tokens per row, the
    end token included. prompts: the given prompts."""

    tokens: np.ndarray
    lengths: np.ndarray
    prompts: list

    def padded(self, pad_token_id: int) -> np.ndarray:
        """Return the prompts padded on the right, then the new tokens: int [row, longest prompt + new]."""
        return np.concatenate([pad_right(self.prompts, pad_token_id)[0], self.tokens], axis=1)


def next_token(logits, sampling: Sampling, key):
    """Choose the next tokens, int [row], from logits [row, vocabulary]. Source of top-p: Holtzman et al. 2020."""
    if not sampling.do_sample:
        return logits.argmax(-1)
    return jax.random.categorical(key, filtered(logits, sampling))


def filtered(logits, sampling: Sampling):
    """Return the logits over temperature, with -inf for tokens that top-k and then top-p exclude.

    The most likely token is always kept.
    """
    logits = logits.astype(jnp.float32) / sampling.temperature
    if sampling.top_k:
        kth = jax.lax.top_k(logits, min(sampling.top_k, logits.shape[-1]))[0][..., -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if sampling.top_p < 1:
        order = jnp.argsort(-logits, axis=-1)
        p = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        drop = jnp.cumsum(p, axis=-1) - p > sampling.top_p  # probability mass before the token
        drop = jnp.take_along_axis(drop, jnp.argsort(order, axis=-1), axis=-1)
        logits = jnp.where(drop, -jnp.inf, logits)
    return logits


def pad_right(prompts: Sequence[Sequence[int]], pad_token_id: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts padded on the right and their mask, int32 and bool [row, longest]."""
    width = max(1, *(len(prompt) for prompt in prompts))
    ids = np.full((len(prompts), width), pad_token_id, np.int32)
    mask = np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
        mask[row, : len(prompt)] = True
    return ids, mask


class Decoder:
    """Model with jitted prefill and step functions; the weights are passed as arguments, not compiled in."""

    def __init__(self, model: nnx.Module):
        self.model = model
        graphdef, self.state = nnx.split(model)

        @functools.partial(jax.jit, donate_argnums=1)
        def prefill(state, cache, ids, mask, positions):
            model = nnx.merge(graphdef, state)
            output = model(ids, mask, positions, cache=cache, prefill=True)
            return model.head(output.hidden), output.cache

        @functools.partial(jax.jit, donate_argnums=1)
        def step(state, cache, ids, mask, positions):
            model = nnx.merge(graphdef, state)
            output = model(ids[:, None], mask[:, None], positions[:, None], cache=cache)
            return model.head(output.hidden)[:, 0], output.cache

        self._prefill, self._step = prefill, step

    def prefill(self, ids, mask, capacity: int) -> tuple[jax.Array, Cache]:
        """Return the logits [row, time, vocabulary] of padded prompts, and the cache. Positions count real tokens."""
        cache = self.model.empty_cache(ids.shape[0], capacity)
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0) * mask
        return self._prefill(self.state, cache, jnp.asarray(ids), jnp.asarray(mask, bool), jnp.asarray(positions))

    def step(self, cache: Cache, tokens, mask, positions) -> tuple[jax.Array, Cache]:
        """Return logits [row, vocabulary] after one more token per row, and the cache; mask: False for ended rows."""
        return self._step(self.state, cache, jnp.asarray(tokens), jnp.asarray(mask, bool), jnp.asarray(positions))


def last_real(logits, mask):
    """Return the logits [row, vocabulary] at each row's last real token from logits [row, time, vocabulary]."""
    mask = np.asarray(mask, bool)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    return logits[np.arange(len(mask)), np.where(mask.any(1), last, 0)]


def generate_ids(
    model: nnx.Module,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    *,
    eos_token_id: int | None = None,
    pad_token_id: int = 0,
    seed: int = 0,
    decoder: Decoder | None = None,
) -> Generated:
    """Continue all prompts in one batch. A row ends after eos_token_id; the rest of it is padding.

    Raises UserError if max_new_tokens is negative, there are no prompts, or a prompt has no token.
    """
    sampling = sampling or Sampling()
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens: {max_new_tokens}, wanted 0 or more")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise UserError("there is no prompt to continue: every prompt needs one token at least")
    ids, mask = pad_right(prompts, pad_token_id)
    rows = len(prompts)
    tokens = np.full((rows, max_new_tokens), pad_token_id, np.int32)
    lengths = np.zeros(rows, np.int64)
    if max_new_tokens == 0:
        return Generated(tokens, lengths, list(prompts))
    decoder = decoder or Decoder(model)
    logits, cache = decoder.prefill(ids, mask, ids.shape[1] + max_new_tokens)
    logits = last_real(logits, mask)
    key, real, live = key_of(seed), mask.sum(1), np.ones(rows, bool)
    for i in range(max_new_tokens):
        chosen = np.asarray(next_token(logits, sampling, jax.random.fold_in(key, i)))
        tokens[:, i] = np.where(live, chosen, pad_token_id)
        lengths += live
        real = real + live
        was_live = live
        if eos_token_id is not None:
            live = live & (chosen != eos_token_id)
        if not live.any() or i + 1 == max_new_tokens:
            return Generated(tokens[:, : i + 1], lengths, list(prompts))
        logits, cache = decoder.step(cache, tokens[:, i], was_live, real - 1)
    return Generated(tokens, lengths, list(prompts))


class Trace(NamedTuple):
    """Intermediate results of greedy decoding. prefill_logits: [row, time, vocabulary]; step_logits: one [row,
    vocabulary] per token fed back; tokens: int [row, steps]."""

    prefill_logits: jax.Array
    prefill_cache: Cache
    step_logits: list
    tokens: np.ndarray


def greedy_trace(model: nnx.Module, ids, mask, steps: int) -> Trace:
    """Decode `steps` greedy tokens after padded prompts, never stopping early; return all intermediate results."""
    decoder = Decoder(model)
    mask = np.asarray(mask, bool)
    prefill_logits, cache = decoder.prefill(ids, mask, ids.shape[1] + steps)
    initial = jax.tree.map(jnp.copy, cache)
    logits, real = last_real(prefill_logits, mask), mask.sum(1)
    tokens, step_logits = [], []
    for _ in range(steps):
        tokens.append(np.asarray(logits.argmax(-1), np.int32))
        real = real + 1
        logits, cache = decoder.step(cache, tokens[-1], np.ones(len(ids), bool), real - 1)
        step_logits.append(logits)
    return Trace(prefill_logits, initial, step_logits, np.stack(tokens, axis=1))
