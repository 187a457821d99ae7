"""Tokenizers: bytes, a BPE trained on the training data, or a pretrained one."""

import hashlib
import pathlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxtrain import hub
from jaxtrain.errors import UserError
from torch_bridge.atomic_file import replacing

END = "<|endoftext|>"


class Tokens(NamedTuple):
    """Token ids, and the characters [start, end) of each; offsets are None if the tokenizer does not have them."""

    ids: list[int]
    offsets: list[tuple[int, int]] | None


class ByteTokenizer:
    """Tokenizer of UTF-8 bytes: ids 0 to 255, then the end of a document (256) and padding (257)."""

    name = "bytes"
    vocab_size = 258
    eos_token_id, pad_token_id, bos_token_id = 256, 257, None
    eos_token = END
    padding_side = "right"
    chat_template = None

    def encode(self, text: str, max_length: int | None = None, special: bool = True) -> Tokens:
        """Return the tokens of a text; an end-of-document marker in the text becomes one token."""
        ids, offsets, start = [], [], 0
        for i, part in enumerate(text.split(END)):
            if i:
                ids.append(self.eos_token_id)
                offsets.append((start, start + len(END)))
                start += len(END)
            if part.isascii():
                ids += part.encode()
                offsets += [(start + j, start + j + 1) for j in range(len(part))]
            else:
                for j, character in enumerate(part):
                    encoded = character.encode("utf-8", "surrogatepass")
                    ids += encoded
                    offsets += [(start + j, start + j + 1)] * len(encoded)
            start += len(part)
        return Tokens(ids[:max_length], offsets[:max_length])

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of the ids; invalid UTF-8 becomes the replacement character."""
        parts, run = [], bytearray()
        for token in [*ids, -1]:
            if 0 <= token < 256:
                run.append(token)
                continue
            parts.append(run.decode("utf-8", "replace"))
            run = bytearray()
            if token == self.eos_token_id and not skip_special:
                parts.append(END)
        return "".join(parts)


class PretrainedTokenizer:
    """Wrapper that gives a transformers tokenizer this module's interface.

    special: ids by name (eos_token_id, ...) that override its own. Raises UserError for an id out of range, and for a
    tokenizer with neither padding nor end token.
    """

    def __init__(self, inner: Any, name: str, special: Mapping[str, int] = MappingProxyType({})):
        self.inner = inner
        self.name = name
        self.special = dict(special)
        for key, number in self.special.items():
            if not 0 <= number < len(inner):
                raise UserError(
                    f"model.{key}: {number}, wanted one of the {len(inner)} entries of the tokenizer {name}"
                )
            setattr(inner, key, number)
        if inner.pad_token_id is None and inner.eos_token_id is None:
            raise UserError(f"data.tokenizer: {name} has neither a padding nor an end token")
        self.pad_token_id = inner.eos_token_id if inner.pad_token_id is None else inner.pad_token_id
        self.eos_token_id, self.bos_token_id = inner.eos_token_id, getattr(inner, "bos_token_id", None)
        self.eos_token = getattr(inner, "eos_token", None)
        self.padding_side = getattr(inner, "padding_side", "right")
        self.chat_template = getattr(inner, "chat_template", None)
        self.vocab_size = len(inner) if hasattr(inner, "__len__") else getattr(inner, "vocab_size", 0)

    def encode(self, text: str, max_length: int | None = None, special: bool = True) -> Tokens:
        """Return the tokens of a text without padding. special: add the tokenizer's special tokens around the text."""
        fast = getattr(self.inner, "is_fast", False)
        encoded = self.inner(
            text,
            **({} if special else {"add_special_tokens": False}),
            **({} if max_length is None else {"truncation": True, "max_length": max_length}),
            **({"return_offsets_mapping": True} if fast else {}),
        )
        ids, offsets = as_ids(encoded["input_ids"]), None
        if fast and "offset_mapping" in encoded:
            offsets = list(encoded["offset_mapping"])
        mask = as_ids(encoded["attention_mask"]) if "attention_mask" in encoded else [1]
        if all(mask):
            return Tokens(ids, offsets)
        unpadded = lambda values: [value for value, real in zip(values, mask, strict=True) if real]
        return Tokens(unpadded(ids), None if offsets is None else unpadded(offsets))

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.inner.decode(list(ids), skip_special_tokens=skip_special)

    def files(self) -> dict[str, str]:
        """Return the files that transformers saves (tokenizer.json, tokenizer_config.json, ...), by file name."""
        with tempfile.TemporaryDirectory() as folder:
            self.inner.save_pretrained(folder)
            return {path.name: path.read_text(encoding="utf-8") for path in sorted(pathlib.Path(folder).iterdir())}


def as_ids(encoded: Any) -> list[int]:
    """Return the ids of one text as a list, from a list, array or tensor with or without a batch axis."""
    ids = encoded.tolist() if hasattr(encoded, "tolist") else list(encoded)
    return ids[0] if ids and isinstance(ids[0], list) else ids


def from_json(
    text: str,
    eos: str | None = END,
    bos: str | None = None,
    pad: str | None = None,
    padding_side: str = "right",
    chat_template: str | None = None,
    name: str = "tokenizer.json",
) -> PretrainedTokenizer:
    """Return a tokenizer from the text of a tokenizer.json."""
    import transformers
    from tokenizers import Tokenizer

    inner = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text),
        eos_token=eos,
        bos_token=bos,
        pad_token=pad,
        padding_side=padding_side,
        clean_up_tokenization_spaces=False,
    )
    if chat_template is not None:
        inner.chat_template = chat_template
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return PretrainedTokenizer(inner, f"{name}:{digest}")


def train_bpe(documents: Iterable[str], size: int) -> str:
    """Train a byte-level BPE of `size` entries; return its tokenizer.json.

    Sources: Sennrich et al. 2016; Radford et al. 2019.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END, "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer.to_str()


def load_tokenizer(name: str, documents: Iterable[str] = (), cache: pathlib.Path | None = None):
    """Load bytes; bpe:<size>, trained on `documents` and kept in `cache`; a tokenizer.json, a folder or a hub id.

    Raises UserError if it cannot be found.
    """
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("bpe:"):
        return _bpe(name, documents, cache)
    path = pathlib.Path(name)
    if path.suffix == ".json":
        if not path.is_file():
            raise UserError(f"data.tokenizer: {path} does not exist; wanted a tokenizer.json")
        text = path.read_text()
        return from_json(text, eos=END if END in text else None, pad="<pad>" if '"<pad>"' in text else None, name=name)
    if not path.is_dir():
        hub.cache_only_if_unreachable()
    import transformers

    try:
        inner = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"data.tokenizer: {name}: {reason}. Wanted bytes, bpe:<size>, a folder or a hub id") from None
    return PretrainedTokenizer(inner, name)


def _bpe(name: str, documents: Iterable[str], cache: pathlib.Path | None) -> PretrainedTokenizer:
    size = name.removeprefix("bpe:")
    if not size.isdigit() or int(size) < 260:
        raise UserError(f"data.tokenizer: {name}: wanted bpe:<entries> with at least 260, as bpe:1024")
    texts = list(documents)
    digest = hashlib.sha256("\0".join([size, *texts]).encode("utf-8", "surrogatepass")).hexdigest()[:24]
    path = None if cache is None else cache / f"bpe-{digest}.json"
    if path is not None and path.is_file():
        return from_json(path.read_text(), pad="<pad>", name=name)
    text = train_bpe(texts, int(size))
    if path is not None:
        with replacing(path, shared=True) as aside:
            aside.write_text(text)
    return from_json(text, pad="<pad>", name=name)
