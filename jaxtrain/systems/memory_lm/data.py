"""Build rows of tokens from the `data` settings: read a dataset, tokenise it once, cache the result on disk."""

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain import hub
from jaxtrain.data.sources import ArraySource
from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import corpus
from jaxtrain.systems.memory_lm.packing import pack
from jaxtrain.systems.memory_lm.text_dataset import Encoder
from jaxtrain.systems.memory_lm.text_stream import TextStream
from jaxtrain.systems.memory_lm.tokenizers import PretrainedTokenizer, load_tokenizer
from torch_bridge.atomic_file import replacing

BUILTIN = "python"
FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")
FORMAT = 1  # version of the cached rows; increase it to invalidate old caches


def build_data(config, split: str) -> ArraySource | TextStream | None:
    """Return training or validation rows; None for other splits, or without an eval_split.

    Raises UserError if the tokenizer has more entries than the model's embedding, or the split has no text.
    """
    data = config.data
    name = {"train": data.dataset_split, "validation": data.eval_split}.get(split)
    if name is None:
        return None
    tokenizer = tokenizer_of(config)
    if tokenizer.vocab_size > vocabulary(config):
        raise UserError(
            f"model.vocab_size: {vocabulary(config)}, but the tokenizer {tokenizer.name} has {tokenizer.vocab_size} "
            f"entries; set model.vocab_size={tokenizer.vocab_size}"
        )
    if split == "train" and data.streaming and data.num_samples is None:
        return streamed(config, tokenizer)
    data, samples = (data, data.num_samples) if split == "train" else (held_out(data), data.eval_samples)
    columns = cached_rows(data, config.compat, tokenizer, name, samples)
    if not len(columns["input_ids"]):
        raise UserError(f"data.dataset_name: {data.dataset_name}, split {name}, holds no text to learn from")
    return ArraySource(with_lengths(columns), batched=True)


def streamed(config, tokenizer) -> TextStream:
    """Return an endless stream of training rows. Raises UserError if the dataset cannot be read."""
    data, original = config.data, config.compat == "original"
    packing = data.packing and not original
    encoder = make_encoder(data, config.compat, tokenizer)
    return TextStream(_load(data, data.dataset_split), encoder, data.max_length, tokenizer.pad_token_id, packing)


def example(config) -> ArraySource:
    """Return a source of zeros with the shapes of the training rows."""
    data = config.data
    zeros = np.broadcast_to(np.int32(0), (data.batch_size, data.max_length))
    names = ("input_ids", "labels", "position_ids", "segment_ids")
    if data.packing and config.compat != "original":
        return ArraySource(dict.fromkeys(names, zeros), batched=True)
    columns = {"input_ids": zeros, "attention_mask": zeros + 1, "labels": zeros}
    return ArraySource(with_lengths(columns), batched=True)


def with_lengths(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Add `lengths` int32 [row] if every row is padded at its end; attention then needs no mask."""
    mask = columns.get("attention_mask")
    if mask is None:
        return dict(columns)
    lengths = (mask != 0).sum(1).astype(np.int32)
    at_end = (mask != 0) == (np.arange(mask.shape[1]) < lengths[:, None])
    return {**columns, "lengths": lengths} if at_end.all() else dict(columns)


def held_out(data):
    """Return the `data` section of the evaluation dataset.

    Raises UserError if that would be the training file again.
    """
    if data.eval_dataset_name is not None:
        return data.model_copy(update={"dataset_name": data.eval_dataset_name, "dataset_subset": None})
    if pathlib.Path(data.dataset_name).is_file():
        raise UserError(
            f"data.eval_dataset_name: missing; data.dataset_name is the one file {data.dataset_name}, without a split "
            f"{data.eval_split}. Name a second file, a folder with a file per split, or data.eval_split=null"
        )
    return data


def vocabulary(config) -> int:
    """Return the number of entries of the model's embedding."""
    if config.model.base_config is not None:
        return config.model.base_config["vocab_size"]
    if config.model.base_model_name is not None:
        from jaxtrain.systems.memory_lm.adapter import backbone_config

        return backbone_config(config.model).vocab_size
    return config.model.vocab_size


def tokenizer_of(config):
    """Return a config's tokenizer: data.tokenizer, else model.tokenizer_name, else the base model's, else bytes.

    The special ids of the section `model` override the tokenizer's own, except for bytes.
    """
    data = config.data
    name = data.tokenizer or config.model.tokenizer_name or config.model.base_model_name or "bytes"
    texts = lambda: training_texts(config)
    tokenizer = load_tokenizer(name, texts() if name.startswith("bpe:") else (), cache_folder(data))
    return with_special_ids(tokenizer, config.model)


def with_special_ids(tokenizer, model):
    """Return a pretrained tokenizer with the bos, eos and pad_token_id that the section `model` sets."""
    special = {name: getattr(model, name) for name in SPECIAL if getattr(model, name) is not None}
    if not special or not isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer
    return PretrainedTokenizer(tokenizer.inner, tokenizer.name, special)


def tokenizer_files(config) -> dict[str, str]:
    """Return the files that AutoTokenizer.from_pretrained reads, by file name; {} for bytes, for which transformers has
    no tokenizer."""
    tokenizer = tokenizer_of(config)
    return tokenizer.files() if isinstance(tokenizer, PretrainedTokenizer) else {}


def training_texts(config) -> Iterator[str]:
    """Yield the texts of the training split, on which a BPE tokenizer is trained."""
    data = config.data
    if data.dataset_name == BUILTIN:
        yield from corpus.documents("train", data.corpus_bytes)
        return
    fields = [data.text_field] if isinstance(data.text_field, str) else data.text_field
    for row in read_rows(data, data.dataset_split, data.num_samples):
        yield from (str(row[field]) for field in fields if row.get(field) is not None)


def cache_folder(data) -> pathlib.Path:
    folder = data.cache_dir
    home = os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")
    return pathlib.Path(folder) if folder else pathlib.Path(home) / "jaxtrain" / "tokens"


def cached_rows(data, compat: str, tokenizer, split: str, num_samples: int | None) -> dict[str, np.ndarray]:
    """Return the rows of a split, cached on disk for every combination of dataset, tokenizer and options."""
    path = cache_folder(data) / f"rows-{_identity(data, compat, tokenizer, split, num_samples)}.npz"
    if path.is_file():
        with np.load(path) as cached:
            return {name: cached[name] for name in cached.files}
    columns = make_rows(data, compat, tokenizer, read_rows(data, split, num_samples))
    with replacing(path, shared=True) as aside, aside.open("wb") as file:
        np.savez(file, **columns)
    return columns


def make_rows(data, compat: str, tokenizer, rows: Iterable[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Return columns of int32 [row, max_length]: packed documents, or one padded document per row."""
    pretraining = data.training_mode == "pretraining"
    encoder = make_encoder(data, compat, tokenizer)
    if data.packing and compat != "original":
        encoded = (encoder.encode(row) for row in rows)
        return pack(encoded, data.max_length, tokenizer.pad_token_id, split=pretraining)
    items = [encoder.padded(row) for row in rows]
    empty = np.zeros((0, data.max_length), np.int32)
    names = ("input_ids", "attention_mask", "labels")
    return {name: np.stack([item[name] for item in items]) if items else empty for name in names}


def make_encoder(data, compat: str, tokenizer) -> Encoder:
    """Return the documents' encoder; it does not truncate documents that are packed for pretraining."""
    original = compat == "original"
    whole = data.packing and not original and data.training_mode == "pretraining"
    return Encoder(
        tokenizer,
        None if whole else data.max_length,
        data.training_mode,
        data.text_field,
        original=original,
        append_eos=data.append_eos,
        chat_template=data.chat_template,
    )


def read_rows(data, split: str, num_samples: int | None) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a dataset as mappings of columns. Raises UserError if it cannot be read."""
    if data.dataset_name == BUILTIN:
        rows = ({"text": text} for text in corpus.documents(split, data.corpus_bytes))
    else:
        rows = iter(_load(data, split))
    for number, row in enumerate(rows):
        if num_samples is not None and number >= num_samples:
            return
        yield row


def _load(data, split: str):
    """Load a split with the library `datasets`: from a local file, a folder with a file per split, or the hub.

    Raises UserError if it cannot be loaded.
    """
    path = pathlib.Path(data.dataset_name)
    if not path.exists():
        hub.cache_only_if_unreachable()
    import datasets

    options: dict[str, Any] = {"split": split} | ({"streaming": True} if data.streaming else {})
    try:
        if path.is_file():
            kind = FILE_KINDS.get(path.suffix)
            if kind is None:
                known = ", ".join(FILE_KINDS)
                raise UserError(f"data.dataset_name: {path}: unknown kind of file, wanted one of {known}")
            files = {split: str(path)}
            return datasets.load_dataset(kind, data_files=files, **options)
        if data.dataset_subset is not None:
            options["name"] = data.dataset_subset
        return datasets.load_dataset(data.dataset_name, **options)
    except UserError:
        raise
    except Exception as error:  # the library raises many kinds of errors
        reason = " ".join(str(error).split())[:300]
        hint = "; data.dataset_split and data.eval_split name them" if "split" in reason.lower() else ""
        raise UserError(f"data.dataset_name: {data.dataset_name}, split {split}: {reason}{hint}") from None


def _identity(data, compat: str, tokenizer, split: str, num_samples: int | None) -> str:
    what = data.model_dump(
        include={
            "dataset_name",
            "dataset_subset",
            "text_field",
            "training_mode",
            "max_length",
            "packing",
            "append_eos",
            "chat_template",
            "corpus_bytes",
        }
    )
    what |= {"split": split, "num_samples": num_samples, "tokenizer": tokenizer.name, "compat": compat}
    what |= {"format": FORMAT, "template": tokenizer.chat_template}
    what |= {"files": _files(data.dataset_name), "tokenizer_files": _files(tokenizer.name)}
    what |= {"revision": _revision(data.dataset_name)}
    what |= {"special": tokenizer.special} if getattr(tokenizer, "special", None) else {}
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _revision(name: str) -> str | None:
    """Return the commit of a hub dataset; None for a local or built-in one, or if the hub does not answer."""
    if name == BUILTIN or pathlib.Path(name).exists():
        return None
    hub.cache_only_if_unreachable()
    import huggingface_hub

    with contextlib.suppress(Exception):  # offline, private or gone: loading reports the error or uses its cache
        return huggingface_hub.HfApi().dataset_info(name, timeout=10).sha
    return None


def _files(name: str) -> list | str:
    """Return the paths, sizes and times of a local dataset's or tokenizer's files, to detect changes.

    For the built-in corpus it is the corpus' identity.
    """
    if name == BUILTIN:
        return corpus.identity()
    path = pathlib.Path(name)
    paths = sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []
    return [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths if p.is_file()]
