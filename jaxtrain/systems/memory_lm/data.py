"""From `data` settings to rows of tokens: reading, tokenising once, keeping the result."""

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
FORMAT = 1  # of the cached rows; a change makes old ones unread


def build_data(config, split: str) -> ArraySource | TextStream | None:
    """Training or validation rows; None for other splits, or without an eval_split."""
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
    """Training rows without end. Raises UserError for a dataset that cannot be read."""
    data, original = config.data, config.compat == "original"
    packing = data.packing and not original
    encoder = make_encoder(data, config.compat, tokenizer)
    return TextStream(_load(data, data.dataset_split), encoder, data.max_length, tokenizer.pad_token_id, packing)


def example(config) -> ArraySource:
    """Make up a batch with the shapes of the training rows."""
    data = config.data
    zeros = np.broadcast_to(np.int32(0), (data.batch_size, data.max_length))
    names = ("input_ids", "labels", "position_ids", "segment_ids")
    if data.packing and config.compat != "original":
        return ArraySource(dict.fromkeys(names, zeros), batched=True)
    columns = {"input_ids": zeros, "attention_mask": zeros + 1, "labels": zeros}
    return ArraySource(with_lengths(columns), batched=True)


def with_lengths(columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns, and `lengths` int32 [row] where every row is padded at its end: attention needs no mask then."""
    mask = columns.get("attention_mask")
    if mask is None:
        return dict(columns)
    lengths = (mask != 0).sum(1).astype(np.int32)
    at_end = (mask != 0) == (np.arange(mask.shape[1]) < lengths[:, None])
    return {**columns, "lengths": lengths} if at_end.all() else dict(columns)


def held_out(data):
    """The section whose dataset is that of evaluation. Raises UserError where it would be the training file again."""
    if data.eval_dataset_name is not None:
        return data.model_copy(update={"dataset_name": data.eval_dataset_name, "dataset_subset": None})
    if pathlib.Path(data.dataset_name).is_file():
        raise UserError(
            f"data.eval_dataset_name: missing; data.dataset_name is the one file {data.dataset_name}, without a split "
            f"{data.eval_split}. Name a second file, a folder with a file per split, or data.eval_split=null"
        )
    return data


def vocabulary(config) -> int:
    """Entries of the model's embedding."""
    if config.model.base_config is not None:
        return config.model.base_config["vocab_size"]
    if config.model.base_model_name is not None:
        from jaxtrain.systems.memory_lm.adapter import backbone_config

        return backbone_config(config.model).vocab_size
    return config.model.vocab_size


def tokenizer_of(config):
    """The tokenizer of a config: data.tokenizer, else model.tokenizer_name, else the base model's, else bytes.

    The special ids of the section `model` replace its own, except for bytes.
    """
    data = config.data
    name = data.tokenizer or config.model.tokenizer_name or config.model.base_model_name or "bytes"
    texts = lambda: training_texts(config)
    found = load_tokenizer(name, texts() if name.startswith("bpe:") else (), cache_folder(data))
    return with_special_ids(found, config.model)


def with_special_ids(tokenizer, model):
    """A pretrained tokenizer with the bos_token_id, eos_token_id and pad_token_id of a section `model` that has any."""
    special = {name: getattr(model, name) for name in SPECIAL if getattr(model, name) is not None}
    if not special or not isinstance(tokenizer, PretrainedTokenizer):
        return tokenizer
    return PretrainedTokenizer(tokenizer.inner, tokenizer.name, special)


def tokenizer_files(config) -> dict[str, str]:
    """Return the files that AutoTokenizer.from_pretrained reads beside a model, by file name; none for bytes, which
    transformers has no tokenizer for."""
    tokenizer = tokenizer_of(config)
    return tokenizer.files() if isinstance(tokenizer, PretrainedTokenizer) else {}


def training_texts(config) -> Iterator[str]:
    """Iterate over the text that a BPE tokenizer is trained on: the training split's."""
    data = config.data
    if data.dataset_name == BUILTIN:
        yield from corpus.documents("train", data.corpus_bytes)
        return
    fields = [data.text_field] if isinstance(data.text_field, str) else data.text_field
    for row in read_rows(data, data.dataset_split, data.num_samples):
        yield from (str(row[field]) for field in fields if row.get(field) is not None)


def cache_folder(data) -> pathlib.Path:
    given = data.cache_dir
    home = os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")
    return pathlib.Path(given) if given else pathlib.Path(home) / "jaxtrain" / "tokens"


def cached_rows(data, compat: str, tokenizer, split: str, num_samples: int | None) -> dict[str, np.ndarray]:
    """The rows of a split, tokenised once for every (dataset, tokenizer, options) and kept on disk."""
    path = cache_folder(data) / f"rows-{_identity(data, compat, tokenizer, split, num_samples)}.npz"
    if path.is_file():
        with np.load(path) as kept:
            return {name: kept[name] for name in kept.files}
    columns = make_rows(data, compat, tokenizer, read_rows(data, split, num_samples))
    with replacing(path, shared=True) as aside, aside.open("wb") as file:
        np.savez(file, **columns)
    return columns


def make_rows(data, compat: str, tokenizer, rows: Iterable[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Columns of int32 [row, max_length]: packed documents, or one padded document per row."""
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
    """The encoder of documents; whole ones where rows are packed with them."""
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
    """Rows of a dataset, as mappings of columns. Raises UserError where it cannot be read."""
    if data.dataset_name == BUILTIN:
        rows = ({"text": text} for text in corpus.documents(split, data.corpus_bytes))
    else:
        rows = iter(_load(data, split))
    for number, row in enumerate(rows):
        if num_samples is not None and number >= num_samples:
            return
        yield row


def _load(data, split: str):
    """A `datasets` dataset: of a local file, of a folder whose files are named after their splits, or of the hub."""
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
    except Exception as error:  # the library raises a dozen kinds
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
    """The commit of a dataset of the hub; None for any other, and where the hub does not answer."""
    if name == BUILTIN or pathlib.Path(name).exists():
        return None
    hub.cache_only_if_unreachable()
    import huggingface_hub

    with contextlib.suppress(Exception):  # offline, private, gone: loading tells what is wrong, or finds its own copy
        return huggingface_hub.HfApi().dataset_info(name, timeout=10).sha
    return None


def _files(name: str) -> list | str:
    """Return a fingerprint that changes when the dataset or tokenizer of that name does."""
    if name == BUILTIN:
        return corpus.identity()
    path = pathlib.Path(name)
    paths = sorted(path.rglob("*")) if path.is_dir() else [path] if path.exists() else []
    return [[str(p), p.stat().st_size, p.stat().st_mtime_ns] for p in paths if p.is_file()]
