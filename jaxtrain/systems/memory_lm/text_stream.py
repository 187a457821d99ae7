"""Make rows of tokens on demand from a streamed dataset, without holding more of it in memory."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jaxtrain.data.sources import SequentialSource
from jaxtrain.systems.memory_lm.packing import columns_of, divide
from jaxtrain.systems.memory_lm.text_dataset import Encoder
from torch_bridge.sources import divided


class TextStream(SequentialSource):
    """Endless source of the rows of `data.make_rows`, in the order of the dataset.

    Its place, for resuming, is the dataset's state and the number of tokens already used of the current document.
    dataset: a streaming one of the library `datasets`. length: tokens of a row. packing: documents share rows.
    """

    tells_places = True

    def __init__(self, dataset: Any, encoder: Encoder, length: int, pad_token_id: int, packing: bool):
        self.dataset, self.encoder, self.length, self.pad_token_id = dataset, encoder, length, pad_token_id
        self.packing = packing
        self._place: dict[str, Any] | None = None

    def chunks(self, epoch, worker, workers, batch_size, seeded, place=None) -> Iterator[list]:
        self.dataset.set_epoch(epoch)
        rows = (self._packed if self.packing else self._padded)(place or {"dataset": None, "start": 0})
        while chunk := list(itertools.islice(rows, batch_size)):
            yield chunk

    def place(self) -> Any:
        return self._place

    def shard(self, count: int, index: int) -> "TextStream":
        part = divided(self.dataset, count, index)
        return TextStream(part, self.encoder, self.length, self.pad_token_id, self.packing)

    def _documents(self, position: Mapping[str, Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
        """Yield every document with the dataset's state before it."""
        before = position["dataset"]
        if before is not None:
            self.dataset.load_state_dict(before)
        for document in self.dataset:
            yield before, document
            before = self.dataset.state_dict()

    def _padded(self, position) -> Iterator[dict[str, np.ndarray]]:
        at_end = self.encoder.tokenizer.padding_side != "left"
        for _, document in self._documents(position):
            row = self.encoder.padded(document)
            self._place = {"dataset": self.dataset.state_dict(), "start": 0}
            yield row | ({"lengths": row["attention_mask"].sum(dtype=np.int32)} if at_end else {})

    def _packed(self, position) -> Iterator[dict[str, np.ndarray]]:
        pieces, room, start = [], self.length, position["start"]
        for before, document in self._documents(position):
            ids, labels = self.encoder.encode(document)
            while len(ids) - start >= 2:
                take = divide(len(ids) - start, room)
                pieces.append((ids[start : start + take], labels[start : start + take]))
                start, room = start + take, room - take
                if room < 2:
                    self._place = {"dataset": before, "start": start}
                    yield self._row(pieces)
                    pieces, room = [], self.length
            start = 0
        if pieces:
            self._place = {"dataset": self.dataset.state_dict(), "start": 0}
            yield self._row(pieces)

    def _row(self, pieces: list) -> dict[str, np.ndarray]:
        return {name: column[0] for name, column in columns_of([pieces], self.length, self.pad_token_id).items()}
