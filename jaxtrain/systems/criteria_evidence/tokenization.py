"""Tokenize texts in parallel, cached on disk by content. Needs the `tokenizers` package (extra `text`)."""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxtrain import hub
from jaxtrain.errors import UserError
from torch_bridge.atomic_file import replacing

if TYPE_CHECKING:
    import tokenizers

PAD_TOKENS = ("[PAD]", "<pad>")


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Tokens of several texts, concatenated without padding.

    bounds: int [text + 1], text i has the tokens bounds[i]:bounds[i + 1]. ids, types: int32 [token]. offsets: int32
    [token, 2], characters in the token's own text, (0, 0) for special tokens. sequence: int8 [token], 0 for the text, 1
    for its pair, -1 for special tokens.
    """

    bounds: np.ndarray
    ids: np.ndarray
    types: np.ndarray
    offsets: np.ndarray
    sequence: np.ndarray

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def row(self, index: int) -> dict[str, np.ndarray]:
        piece = slice(self.bounds[index], self.bounds[index + 1])
        return {name: getattr(self, name)[piece] for name in ("ids", "types", "offsets", "sequence")}

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.bounds)


class Tokenizer:
    """Fast tokenizer with its padding token. `source` says where it came from, `json` is its full definition.

    Raises UserError if it has no padding token.
    """

    def __init__(self, backend: "tokenizers.Tokenizer", pad_token: str | None = None, source: str = ""):
        self.backend = backend
        self.source = source
        backend.no_padding()
        backend.no_truncation()
        self.json = backend.to_str()
        known = [token for token in (pad_token, *PAD_TOKENS) if token and backend.token_to_id(token) is not None]
        if not known:
            raise UserError(f"{source}: the tokenizer has no padding token, wanted one of {', '.join(PAD_TOKENS)}")
        self.pad_token = known[0]
        self.pad_id = backend.token_to_id(self.pad_token)

    @property
    def vocab_size(self) -> int:
        """Return the largest token id plus 1."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int) -> Encoded:
        """Tokenize every text, or (text, pair), truncated to max_length tokens, the longer one of a pair first."""
        self.backend.enable_truncation(max_length, strategy="longest_first")
        inputs = list(texts) if pairs is None else list(zip(texts, pairs, strict=True))
        encodings = self.backend.encode_batch(inputs)  # parallel in Rust
        self.backend.no_truncation()
        bounds = np.cumsum([0, *(len(encoding.ids) for encoding in encodings)]).astype(np.int64)
        join = lambda name, dtype: np.concatenate([np.asarray(getattr(e, name), dtype) for e in encodings])
        sequence = [[-1 if s is None else s for s in encoding.sequence_ids] for encoding in encodings]
        return Encoded(
            bounds,
            join("ids", np.int32),
            join("type_ids", np.int32),
            np.concatenate([np.asarray(e.offsets, np.int32).reshape(-1, 2) for e in encodings]),
            np.concatenate([np.asarray(one, np.int8) for one in sequence]),
        )

    def encode_cached(
        self, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int, folder: pathlib.Path | None
    ) -> Encoded:
        """Return `encode`'s result from the cache in `folder`, or compute and store it; no cache if folder is None.

        The cache key covers the tokenizer, the texts and max_length.
        """
        if folder is None:
            return self.encode(texts, pairs, max_length)
        content = json.dumps([self.json, list(texts), None if pairs is None else list(pairs), max_length])
        path = folder / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.npz"
        if path.is_file():
            with np.load(path) as saved:
                return Encoded(**{field.name: saved[field.name] for field in dataclasses.fields(Encoded)})
        encoded = self.encode(texts, pairs, max_length)
        with replacing(path, shared=True) as aside, aside.open("wb") as file:
            np.savez(file, **dataclasses.asdict(encoded))
        return encoded


def load(source: str | pathlib.Path) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, a Hugging Face folder or a hub id.

    Raises UserError if `source` is none of them, cannot be reached, or has no fast tokenizer.
    """
    path = pathlib.Path(source)
    if path.is_dir() and (path / "tokenizer.json").is_file():
        return _from_file(path / "tokenizer.json", _pad_token(path / "tokenizer_config.json"))
    if path.is_file():
        return _from_file(path, None)
    return _from_transformers(str(source))


def _from_file(path: pathlib.Path, pad_token: str | None) -> Tokenizer:
    import tokenizers

    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise UserError(f"{path}: not a readable tokenizer.json: {error}") from None
    return Tokenizer(backend, pad_token, str(path))


def _pad_token(path: pathlib.Path) -> str | None:
    if not path.is_file():
        return None
    token: Any = json.loads(path.read_text(encoding="utf-8")).get("pad_token")
    return token.get("content") if isinstance(token, dict) else token


def _from_transformers(source: str) -> Tokenizer:
    if not pathlib.Path(source).is_dir():
        hub.cache_only_if_unreachable()
    from transformers import AutoTokenizer

    try:
        slow_or_fast = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"data.tokenizer: {source}: neither a tokenizer.json, a folder that holds one, nor a hub model that can be "
            f"reached from here ({reason}). Offline, give a local Hugging Face folder"
        ) from None
    backend = getattr(slow_or_fast, "backend_tokenizer", None)
    if backend is None:
        raise UserError(f"data.tokenizer: {source} has no fast tokenizer (tokenizer.json)")
    return Tokenizer(backend, slow_or_fast.pad_token, source)
