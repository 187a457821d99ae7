"""Mask builds: hide r of the L tokens, where r is drawn with probability proportional to r^skew."""

import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

PADDING = -1  # marks positions without a token in id columns of a batch


def removal_probabilities(longest: int, skew: float = 1.2) -> np.ndarray:
    """Return P(r = k) for k = 1 .. longest, proportional to (k / sum(1..longest))^skew."""
    weights = (np.arange(1, longest + 1) / np.arange(1, longest + 1).sum()) ** skew
    return weights / weights.sum()


def hide(targets, index, key, skew: float = 1.2, instances: int = 1, null_id: int | None = None):
    """Return the visible ids of each set, int [batch, position], PADDING for hidden and missing tokens.

    targets: int [batch, position], PADDING at the end of short sets. index: int [batch], the samples' positions in the
    dataset; together with `key` they determine what is hidden, independently of batch and device. instances: samples
    per set; with null_id, the first of them sees only that token. A set of one token has it hidden: its row is null_id,
    or without one all PADDING, which the loss excludes.
    """
    width = targets.shape[1]
    powers = jnp.cumsum(jnp.arange(1, width + 1, dtype=jnp.float32) ** skew)
    length = (targets != PADDING).sum(1)
    most = jnp.maximum(length - 1, 1)

    draw = jax.vmap(lambda i: jax.random.uniform(jax.random.fold_in(key, i), (width + 1,)))(index)
    threshold = draw[:, :1] * powers[most - 1][:, None]
    removed = jnp.minimum(1 + (powers[None, :] <= threshold).sum(1), most)
    score = jnp.where(targets == PADDING, 2.0, draw[:, 1:])  # the tokens with the highest scores are hidden
    last = jnp.take_along_axis(jnp.sort(score, axis=1), jnp.maximum(length - removed - 1, 0)[:, None], axis=1)
    seen = (score <= last) & (targets != PADDING) & (length > removed)[:, None]
    visible = jnp.where(seen, targets, PADDING)
    if null_id is None:
        return visible
    only_null = jnp.where(jnp.arange(width) == 0, null_id, PADDING).astype(visible.dtype)
    first_instance = (index % instances == 0)[:, None] if instances > 1 else False
    return jnp.where(first_instance | (length == 1)[:, None], only_null, visible)


def hide_on_host(tokens: Sequence[int], skew: float = 1.2) -> list[int]:
    """Mask a set as the original does, with numpy's and Python's global generators in the original's order."""
    longest = max(1, len(tokens) - 1)
    removed = int(np.random.choice(np.arange(1, longest + 1), p=removal_probabilities(longest, skew)))
    gone = set(random.sample(range(len(tokens)), removed))
    return [token for i, token in enumerate(tokens) if i not in gone]


class SetDataset:
    """The original's dataset of masked sets: item i is row i // K, instance i % K, masked anew at every access.

    rows: sequence of {"ability_tags": [ids], "weapon_id": id}, or a pandas frame of these columns. Items are (visible,
    [weapon], full set) as int64 arrays, ragged; `jaxtrain.systems.set_completion.data.collate_sets` pads them.
    """

    def __init__(self, rows, vocab_size=None, num_instances_per_set=5, skew_factor=1.2, null_token: int | None = None):
        self.rows = rows.to_dict("records") if hasattr(rows, "to_dict") else list(rows)
        self.vocab_size = vocab_size
        self.skew_factor = skew_factor
        self.null_token = null_token
        self.instances = num_instances_per_set + (null_token is not None)

    def __len__(self) -> int:
        return len(self.rows) * self.instances

    def __getitem__(self, index: int):
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        row, instance = divmod(index % len(self), self.instances)
        tokens, weapon = list(self.rows[row]["ability_tags"]), self.rows[row]["weapon_id"]
        null = self.null_token is not None and instance == 0
        visible = [self.null_token] if null else hide_on_host(tokens, self.skew_factor)
        return tuple(np.asarray(part, np.int64) for part in (visible, [weapon], tokens))
