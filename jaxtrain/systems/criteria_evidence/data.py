"""Build the data sources of a run's splits: read rows, tokenize, pad, and group by length."""

import functools
import logging
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from jaxtrain.data.sources import ArraySource, BucketedSource
from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import csv_files, hf_folder, splits, synthetic, tokenization
from jaxtrain.systems.criteria_evidence.examples import Columns, Examples, make_examples, padded

log = logging.getLogger(__name__)


def build_data(architecture: str, config: Any, split: str):
    """Return the data source of a split, or None if the split is empty."""
    corpus = load(architecture, config)
    rows = corpus.rows_of(split)
    return source_of(corpus, rows, config) if len(rows) else None


def example(architecture: str, config: Any):
    """Return a source of synthetic posts padded to the config's maximum lengths; it reads no files."""
    made_up = {"path": None, "tokenizer": None, "criteria_file": None, "padding": "fixed", "cache_dir": None}
    data = config.data.model_copy(update=made_up)
    model = config.model.model_copy(update={"pretrained": None})
    return build_data(architecture, config.model_copy(update={"data": data, "model": model}), "train")


class Corpus:
    """Tokenized rows of a run's file, with the splits, the tokenizer and the row weights.

    splits: name -> row indices, without dropped rows (answer not found). row_weights: float32 [row] for the loss, or
    None.
    """

    def __init__(self, examples: Examples, tokenizer: Any, rows: list, split_rows: dict, config: Any, with_types: bool):
        self.examples = examples
        self.tokenizer = tokenizer
        self.rows = rows
        self.dropped = sorted(examples.problems) if config.data.on_missing_answer == "drop" else []
        gone = set(self.dropped)
        self.splits = {
            name: np.array([i for i in members if i not in gone], int) for name, members in split_rows.items()
        }
        self.with_types = with_types
        self.row_weights = row_weights(examples.labels, self.splits["train"], config.loss)

    def rows_of(self, split: str) -> np.ndarray:
        """Return the row indices of a split, or of all splits for "all"; an empty array for an unknown name."""
        if split == "all":
            return np.sort(np.concatenate(list(self.splits.values())))
        return self.splits.get(split, np.array([], int))

    def columns(self, rows: Sequence[int], widths: dict[str, int]) -> dict[str, np.ndarray]:
        """Return the tensors of these rows; `widths` is the padded width per side."""
        arrays: dict[str, np.ndarray] = {}
        for side, encoded in self.examples.texts.items():
            tensors = padded(encoded, rows, widths[side], self.tokenizer.pad_id)
            if not self.with_types:
                del tensors["token_type_ids"]
            arrays |= {f"{side}{name}": column for name, column in tensors.items()}
        if self.examples.labels is not None:
            arrays["labels"] = self.examples.labels[rows]
        if self.examples.spans is not None:
            arrays["start_positions"], arrays["end_positions"] = self.examples.spans[rows].T
        if self.row_weights is not None:
            arrays["row_weight"] = self.row_weights[rows]
        return arrays


def load(architecture: str, config: Any) -> Corpus:
    """Return the config's corpus. It is cached, so the same config is read and tokenized once per process."""
    key = "\n".join(section.model_dump_json() for section in (config.data, config.model, config.loss))
    return _load(architecture, key, config.compat, _Opaque(config))


class _Opaque:
    """Wrapper that passes the config through lru_cache without being part of the key (all wrappers are equal).

    The key is the config's JSON text instead.
    """

    def __init__(self, config: Any):
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=4)
def _load(architecture: str, key: str, compat: str, box: _Opaque) -> Corpus:
    config = box.config
    data, model = config.data, config.model
    needed = [data.status_column, data.sentence_column] + ([] if architecture == "criteria" else [data.context_column])
    rows = synthetic.rows(data.synthetic_posts) if data.path is None else csv_files.read_rows(data.path, needed)
    tokenizer = tokenizer_of(config)
    pair = data.pair_with_criterion
    examples = make_examples(
        rows,
        tokenizer,
        architecture,
        pair=model.family == "architectures" if pair is None else pair,
        criterion_texts=csv_files.read_criteria(data.criteria_file) if data.criteria_file else None,
        columns=Columns(
            data.sentence_column, data.status_column, data.context_column, data.sentence_column, data.criterion_column
        ),
        max_length=data.max_length,
        evidence_max_length=data.evidence_max_length,
        cache=None if data.cache_dir is None else pathlib.Path(data.cache_dir),
        presence=_presence(architecture, config),
    )
    check_sizes(examples, tokenizer, config)
    report_problems(examples, data, architecture)
    types = model.encoder.type_vocab_size > 1 or getattr(model, "evidence_encoder", model.encoder).type_vocab_size > 1
    return Corpus(examples, tokenizer, rows, split_rows(rows, config), config, types)


def _presence(architecture: str, config: Any) -> Literal["post", "leak"] | None:
    """Return the `presence` mode of make_examples.

    For family base, evidence is a classification (present or not); for the others it is a span, so None.
    """
    if architecture != "evidence" or config.model.family != "base":
        return None
    return "leak" if config.compat == "original" else "post"


def tokenizer_of(config: Any) -> tokenization.Tokenizer:
    """Return the tokenizer of data.tokenizer or model.pretrained, or the synthetic one for synthetic data.

    Raises UserError if neither is set and data.path names a file.
    """
    source = config.data.tokenizer or config.model.pretrained
    if source is not None:
        return tokenization.load(source)
    if config.data.path is None:
        return synthetic.tokenizer()
    raise UserError("data.tokenizer: is not set and there is no model.pretrained; give a tokenizer.json or a folder")


def tokenizer_files(config: Any) -> dict[str, str]:
    """Return the tokenizer's files of a Hugging Face folder, by file name."""
    return hf_folder.tokenizer_files(config, tokenizer_of(config))


def check_sizes(examples: Examples, tokenizer: tokenization.Tokenizer, config: Any) -> None:
    """Raise UserError if texts are longer than the encoder's positions, a token id is outside its vocabulary, or the
    tokenizer and the encoder have different padding ids."""
    model, widths = config.model, side_widths(examples, config.data)
    for side, encoded in examples.texts.items():
        encoder = model.evidence_encoder if side == "evidence_" else model.encoder
        name = "model.evidence_encoder" if side == "evidence_" else "model.encoder"
        width, key = widths[side], "max_length" if widths[side] == config.data.max_length else "evidence_max_length"
        width = width if config.data.padding == "fixed" else bucket_widths(encoded.lengths, 1)[-1]
        largest = int(encoded.ids.max())
        if width > encoder.longest:
            raise UserError(
                f"{name} takes {encoder.longest} tokens, texts are padded to {width}; set data.{key}={encoder.longest} "
                "or less, or take an encoder with more positions"
            )
        if largest >= encoder.vocab_size or tokenizer.pad_id >= encoder.vocab_size:
            raise UserError(
                f"{name}.vocab_size is {encoder.vocab_size}, the tokenizer ({tokenizer.source}) gives ids up to "
                f"{largest}"
            )
        if tokenizer.pad_id != encoder.pad_token_id:
            raise UserError(
                f"{name}.pad_token_id is {encoder.pad_token_id}, the tokenizer ({tokenizer.source}) pads with "
                f"{tokenizer.pad_id}; they must be of one model"
            )


def report_problems(examples: Examples, data: Any, architecture: str) -> None:
    """Log a warning that lists the rows whose answer was not found.

    Raises UserError with `on_missing_answer: error`, and for `keep` with the architecture evidence.
    """
    if not examples.problems:
        return
    reasons: dict[str, list[int]] = {}
    for row, reason in examples.problems.items():
        reasons.setdefault(reason, []).append(row)
    lines = "; ".join(f"{reason} {len(members)} rows ({_shorten(members)})" for reason, members in reasons.items())
    policy = data.on_missing_answer
    if policy == "keep" and architecture == "evidence":
        raise UserError(
            "data.on_missing_answer: keep needs a classifier (share, joint); for evidence take drop or error"
        )
    text = f"{data.path or 'synthetic posts'}: {len(examples.problems)} answers cannot be used: {lines}"
    if policy == "error":
        raise UserError(f"{text}. Mend the rows, raise data.evidence_max_length, or data.on_missing_answer=drop")
    log.warning("%s. %s", text, "The rows are dropped" if policy == "drop" else "Only their labels count")


def _shorten(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")


def split_rows(rows: list, config: Any) -> dict[str, list[int]]:
    """Return the row indices of every split.

    By default rows are grouped by post; with `compat: original` they are split individually with the run's seed, as
    the original's scripts do. Raises UserError if the column data.post_column is missing.
    """
    data, original = config.data, config.compat == "original"
    kind = data.split or ("rows" if original else "posts")
    if kind == "rows":
        return splits.random_split(len(rows), config.seed if original else data.split_seed, data.ratios)
    if data.post_column not in rows[0]:
        raise UserError(f"data.post_column: no column {data.post_column}; set it, or data.split=rows")
    return splits.group_split([row[data.post_column] for row in rows], data.split_seed, data.ratios)


def row_weights(labels: np.ndarray | None, train: np.ndarray, loss: Any) -> np.ndarray | None:
    """Return each row's class weight, scaled to a mean of 1 over the training rows; None without class weights.

    Raises UserError if loss.class_weights has fewer entries than there are classes.
    """
    if labels is None or loss.class_weights == "none":
        return None
    classes = int(labels.max()) + 1
    counts = np.bincount(labels[train], minlength=classes).astype(float)
    if isinstance(loss.class_weights, list):
        weights = np.array(loss.class_weights, float)
        if len(weights) < classes:
            raise UserError(f"loss.class_weights: {len(weights)} weights for {classes} classes")
    elif loss.class_weights == "balanced":
        weights = 1 / np.maximum(counts, 1)
    else:  # Cui et al. 2019: the effective number of samples
        weights = (1 - loss.effective_beta) / (1 - loss.effective_beta ** np.maximum(counts, 1))
    return (weights / weights[labels[train]].mean())[labels].astype(np.float32)


# --- sources -------------------------------------------------------------------------------------------------------


def source_of(corpus: Corpus, rows: np.ndarray, config: Any) -> "ArraySource | TextSource":
    """Return a source of `rows`: an ArraySource for fixed padding, else a TextSource that pads each batch."""
    if config.data.padding == "fixed":
        return ArraySource(corpus.columns(rows, side_widths(corpus.examples, config.data)), batched=True)
    return TextSource(corpus, rows, config.data.num_buckets)


def side_widths(examples: Examples, data: Any) -> dict[str, int]:
    """Return the maximum width of every side: evidence_max_length for posts, max_length for other texts."""
    return {side: data.evidence_max_length if side in examples.posts else data.max_length for side in examples.texts}


def bucket_widths(lengths: np.ndarray, count: int) -> list[int]:
    """Return up to `count` bucket widths, rounded up to multiples of 8: quantiles of the text lengths at equal shares,
    the last one for the longest text."""
    shares = np.quantile(lengths, np.arange(1, count + 1) / count, method="higher")
    return sorted({int(-(-width // 8) * 8) for width in shares})


class TextSource(BucketedSource):
    """Source of a corpus' rows; each batch is padded to the smallest bucket that holds its longest text.

    If a row has two texts (joint), both use the bucket of the same index, so there are only `batch_shapes` shapes.
    """

    def __init__(self, corpus: Corpus, rows: np.ndarray, count: int):
        self.corpus, self.rows = corpus, rows
        every = np.concatenate([*corpus.splits.values()])
        widths = {side: bucket_widths(e.lengths[every], count) for side, e in corpus.examples.texts.items()}
        self.batch_shapes = max(len(widest) for widest in widths.values())
        self.widths = {
            side: [widest[0]] * (self.batch_shapes - len(widest)) + widest for side, widest in widths.items()
        }
        self.need = np.zeros(len(rows), int)  # bucket index of every row
        for side, encoded in corpus.examples.texts.items():
            self.need = np.maximum(self.need, np.searchsorted(self.widths[side], encoded.lengths[rows]))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> int:
        return int(self.rows[index])

    def collate_for(self, indices: np.ndarray) -> Callable[[Sequence[int]], dict[str, np.ndarray]]:
        bucket = int(self.need[indices].max())
        widths = {side: lengths[bucket] for side, lengths in self.widths.items()}
        return lambda rows: self.corpus.columns(list(rows), widths)
