"""Build the splits of a corpus as columns: training sets are masked in each step, evaluation sets once."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.data.collate import stack
from jaxtrain.data.sources import ArraySource
from jaxtrain.errors import UserError
from jaxtrain.systems.set_completion import synthetic
from jaxtrain.systems.set_completion.losses import null_id
from jaxtrain.systems.set_completion.masking import PADDING, hide
from jaxtrain.systems.set_completion.readers import Corpus, read_corpus
from jaxtrain.systems.set_completion.vocabulary import NULL, PAD, default_vocabulary, read_vocabulary

WIDTH = 32  # sets of a user's Dataset are padded to a multiple of it; a legal build has fewer tokens
CHUNK = 4096


def build_data(config, split: str) -> ArraySource | None:
    """Return a split as columns, small enough to be kept on the device; None if it is empty.

    train: `targets` int [sample, position] and `weapon` [sample, 1]; every set is repeated masks_per_set times, and
    masked in the step. validation, test: also `inputs`, masked here with data.split_seed so that all evaluations see
    the same.
    """
    corpus = corpus_of(config, split)
    if corpus is None:
        return None
    columns = {
        "targets": np.repeat(corpus.tokens, config.data.instances, axis=0),
        "weapon": np.repeat(corpus.weapons, config.data.instances, axis=0),
    }
    if split != "train":
        columns["inputs"] = frozen_masks(columns["targets"], config)
    return ArraySource(columns, batched=True)


def corpus_of(config, split: str) -> Corpus | None:
    """Return the sets of a split; None if it is empty or unknown.

    Raises UserError if the model's sizes do not fit the data's ids, or no sets are left to train on.
    """
    corpus = _read(config.data)
    _check(corpus, config)
    data = config.data
    rows = split_rows(len(corpus), data.fraction, data.split_seed, data.validation_size, data.test_size).get(split, [])
    if split == "train" and not len(rows):
        raise UserError(
            f"data: {len(corpus)} sets leave none to train on; raise data.fraction or lower validation_size"
        )
    return corpus.take(rows) if len(rows) else None


def _read(data) -> Corpus:
    made = data.synthetic if data.path is None else None
    return _read_once(data.path, data.table_name, data.max_rows, made)


@functools.lru_cache(maxsize=2)
def _read_once(path: str | None, table_name: str, max_rows: int | None, made) -> Corpus:
    if path is not None:
        return read_corpus(path, table_name, max_rows)
    return synthetic.generate(made.sets, made.weapons, made.archetypes, made.seed, default_vocabulary())[0]


def vocabulary_of(config) -> dict[str, int]:
    """Return the data's vocabulary, token -> id."""
    path = config.data.vocab_path
    return default_vocabulary() if path is None else read_vocabulary(path, (PAD,))


def weapons_of(config) -> dict[str, int]:
    path, made = config.data.weapon_vocab_path, config.data.synthetic
    return {f"weapon_id_{i}": i for i in range(made.weapons)} if path is None else read_vocabulary(path)


def _check(corpus: Corpus, config) -> None:
    vocabulary, model = vocabulary_of(config), config.model
    tokens = max(len(vocabulary), int(corpus.tokens.max()) + 1)
    weapons = max(len(weapons_of(config)), int(corpus.weapons.max()) + 1)
    facts = [
        ("model.vocab_size", model.vocab_size, tokens, model.vocab_size == tokens),
        ("model.pad_token_id", model.padding, vocabulary[PAD], model.padding == vocabulary[PAD]),
        ("model.weapon_vocab_size", model.weapon_vocab_size, weapons, model.weapon_vocab_size >= weapons),
    ]
    if config.data.include_null:
        if NULL not in vocabulary:
            raise UserError(f"data.include_null: the vocabulary has no {NULL}")
        null = null_id(config)
        facts.append(("data.null_token_id", null, vocabulary[NULL], null == vocabulary[NULL]))
    wrong = [f"{key} is {got}, the data want {want}" for key, got, want, fits in facts if not fits]
    if wrong:
        raise UserError("the model does not fit the data: " + "; ".join(wrong))


def frozen_masks(targets: np.ndarray, config) -> np.ndarray:
    """Return the visible ids of every sample; they depend only on data.split_seed and the sample's position."""
    key = jax.random.key(config.data.split_seed)
    draw = jax.jit(
        lambda rows, index: hide(rows, index, key, config.data.skew_factor, config.data.instances, null_id(config))
    )
    parts = []
    for start in range(0, len(targets), CHUNK):
        rows = targets[start : start + CHUNK]
        padded = np.concatenate([rows, np.full((CHUNK - len(rows), rows.shape[1]), PADDING, rows.dtype)])
        parts.append(np.asarray(draw(jnp.asarray(padded), start + jnp.arange(CHUNK)))[: len(rows)])
    return np.concatenate(parts)


def collate_sets(items: Sequence) -> dict[str, np.ndarray]:
    """Pad and stack the items of a user's Dataset.

    Items are (visible ids, [weapon], full set) as from the original's SetDataset, or dicts with `targets`, `weapon`
    and, if already masked, `inputs`.
    """
    if not isinstance(items[0], dict):
        names = ("inputs", "weapon", "targets")
        items = [dict(zip(names, item, strict=False)) for item in items]
    batch = {name: _pad([item[name] for item in items]) for name in ("inputs", "targets") if name in items[0]}
    batch["weapon"] = stack([np.asarray(item["weapon"]).reshape(1) for item in items], "weapon")
    return batch


def _pad(rows: Sequence) -> np.ndarray:
    rows = [np.asarray(row).reshape(-1) for row in rows]
    width = -(-max(map(len, rows)) // WIDTH) * WIDTH or WIDTH
    padded = np.full((len(rows), width), PADDING, np.int32)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return padded


def split_rows(
    rows: int,
    fraction: float = 1.0,
    seed: int | np.random.RandomState | None = None,
    validation_size: float = 0.1,
    test_size: float = 0.2,
) -> dict[str, np.ndarray]:
    """Return row positions by split: a shuffled `fraction` of the rows, cut into contiguous pieces.

    Equals pandas' DataFrame.sample(frac, random_state=seed) followed by the original's slices; the test split takes
    the rows that rounding leaves over.
    """
    count = round(fraction * rows)
    generator = seed if isinstance(seed, np.random.RandomState) else np.random.RandomState(seed)
    order = generator.choice(rows, size=count, replace=False)
    train, validation = int(count * (1 - validation_size - test_size)), int(count * validation_size)
    pieces = np.split(order, [train, train + validation])
    return dict(zip(("train", "validation", "test"), pieces, strict=True))
