"""Datasets of the families `Project` and `architectures`: rows of a CSV as padded token tensors.

Items hold whatever the tokenizer returns, so your own tokenizer works too. As in the original, reading a row whose
answer cannot be found raises an error; jaxtrain.run drops such rows and logs how many.
"""

import csv
import pathlib
from collections.abc import Mapping
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import csv_files, tokenization
from jaxtrain.systems.criteria_evidence.examples import find_answer_span, token_span_from_char

ANNOTATIONS, MATCHED = "data/redsm5/redsm5_annotations.csv", "data/processed/redsm5_matched_evidence.csv"
CRITERIA = "data/raw/redsm5/dsm_criteria.json"


class MissingFile(UserError, FileNotFoundError):
    """Raised if the CSV does not exist; also a FileNotFoundError."""


class MissingColumn(UserError, KeyError):
    """Raised if the CSV lacks a column that the dataset reads; also a KeyError."""

    def __str__(self) -> str:
        return str(self.args[0])


def read_rows(path: str | pathlib.Path, columns: tuple[str, ...]) -> list[dict[str, str]]:
    """Return all rows of a CSV.

    Raises FileNotFoundError, KeyError for a missing column, ValueError without a header or rows.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise MissingFile(f"{path}: no such file; wanted a CSV with the columns {', '.join(columns)}")
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
        if not reader.fieldnames:
            raise UserError(f"{path}: is empty; wanted a header with the columns {', '.join(columns)}")
    if not rows:
        raise UserError(f"{path}: has a header but no rows")
    absent = [name for name in columns if name not in rows[0]]
    if absent:
        raise MissingColumn(f"{path}: no column {', '.join(absent)}; it has {', '.join(rows[0])}")
    return rows


class _Dataset(torch.utils.data.Dataset):
    """Base of the four datasets.

    tokenizer: a transformers tokenizer, anything with the same call, or the name of one: a folder, a tokenizer.json or
    a hub id; tokenizer_name is read if it is None. criterion_column, dsm_criteria_path: where a row's criterion and its
    text are. pair: tokenize (text, criterion) pairs; by default if one of these two is given, and always in the family
    `architectures`.
    """

    path = ANNOTATIONS
    pairs = False

    def __init__(
        self,
        csv_path: str | pathlib.Path | None,
        tokenizer: Any,
        max_length: int,
        columns: tuple[str, ...],
        padding: Any,
        truncation: Any,
        criterion_column: str | None,
        dsm_criteria_path: str | pathlib.Path | None,
        pair: bool | None,
    ):
        self.csv_path = pathlib.Path(self.path if csv_path is None else csv_path)
        self.tokenizer = as_tokenizer(tokenizer)
        self.max_length, self.padding, self.truncation = max_length, padding, truncation
        asked = criterion_column is not None or dsm_criteria_path is not None
        self.pair = self.pairs or asked if pair is None else pair
        self.criterion_column = criterion_column
        self.rows = self.examples = read_rows(self.csv_path, columns)
        self.criteria_map = csv_files.read_criteria(dsm_criteria_path) if dsm_criteria_path else {}
        self.criterion_columns = [*([criterion_column] if criterion_column else []), *csv_files.IDENTIFIERS]
        self.available_criterion_columns = [name for name in self.criterion_columns if name in self.rows[0]]
        self.has_direct_text_column = "criterion_text" in self.rows[0]
        self.criteria = [csv_files.criterion_text(row, self.criteria_map, criterion_column) for row in self.rows]

    def __len__(self) -> int:
        return len(self.rows)

    def tokens(self, index: int, text: str, length: int, offsets: bool = False) -> Any:
        texts = (text, self.criteria[index]) if self.pair else (text,)
        options: dict[str, Any] = {"padding": self.padding, "truncation": self.truncation, "max_length": length}
        options |= {"return_offsets_mapping": True} if offsets else {}
        return self.tokenizer(*texts, **options, return_tensors="pt")

    def answered(self, index: int, context: str, answer: str, length: int) -> dict[str, torch.Tensor]:
        """Return the context's tokens, and the answer's first and last token; raises ValueError if it is not found."""
        start, end = find_answer_span(context, answer)
        encoding = self.tokens(index, context, length, offsets=True)
        places = [tuple(int(x) for x in pair) for pair in plain(encoding["offset_mapping"])]
        first, last = token_span_from_char(places, start, end, encoding.sequence_ids(0) if self.pair else None)
        item = {name: value for name, value in rowed(encoding).items() if name != "offset_mapping"}
        return item | {"start_positions": torch.tensor(first), "end_positions": torch.tensor(last)}

    def label(self, index: int, column: str) -> torch.Tensor:
        return torch.tensor(int(self.rows[index][column]), dtype=torch.long)


def plain(value: Any) -> list:
    """Return a tensor or list as a list, without its batch axis if it has one."""
    value = value.tolist() if isinstance(value, torch.Tensor) else list(value)
    return (
        value[0]
        if value and isinstance(value[0], list) and value[0] and isinstance(value[0][0], (list, tuple))
        else value
    )


def rowed(encoding: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tokenizer's tensors without their batch axis of size 1."""
    tensors = {name: torch.as_tensor(value) for name, value in encoding.items()}
    return {
        name: value.squeeze(0) if value.shape[:1] == (1,) and value.ndim > 1 else value
        for name, value in tensors.items()
    }


class CriteriaDataset(_Dataset):
    """Dataset of sentences with their status: the tokenizer's tensors [max_length] and labels int64."""

    def __init__(
        self,
        csv_path: str | pathlib.Path | None = None,
        tokenizer: Any = None,
        tokenizer_name: str = "bert-base-uncased",
        text_column: str = "sentence_text",
        label_column: str = "status",
        criterion_column: str | None = None,
        max_length: int = 256,
        padding: bool | str = "max_length",
        truncation: bool | str = True,
        dsm_criteria_path: str | pathlib.Path | None = None,
        *,
        pair: bool | None = None,
    ):
        self.text_column, self.label_column = text_column, label_column
        tokenizer = tokenizer_name if tokenizer is None else tokenizer
        options = (padding, truncation, criterion_column, dsm_criteria_path, pair)
        super().__init__(csv_path, tokenizer, max_length, (text_column, label_column), *options)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = rowed(self.tokens(index, self.rows[index][self.text_column], self.max_length))
        return item | {"labels": self.label(index, self.label_column)}


class EvidenceDataset(_Dataset):
    """Dataset of posts with the position of the supporting sentence.

    Items hold the tokenizer's tensors [max_length], and start_positions and end_positions int64.
    """

    path = MATCHED

    def __init__(
        self,
        csv_path: str | pathlib.Path | None = None,
        tokenizer: Any = None,
        tokenizer_name: str = "bert-base-uncased",
        context_column: str = "post_text",
        answer_column: str = "sentence_text",
        max_length: int = 512,
        padding: bool | str = "max_length",
        truncation: bool | str = True,
        criterion_column: str | None = None,
        dsm_criteria_path: str | pathlib.Path | None = None,
        *,
        pair: bool | None = None,
    ):
        self.context_column, self.answer_column = context_column, answer_column
        tokenizer = tokenizer_name if tokenizer is None else tokenizer
        options = (padding, truncation, criterion_column, dsm_criteria_path, pair)
        super().__init__(csv_path, tokenizer, max_length, (context_column, answer_column), *options)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return self.answered(index, row[self.context_column], row[self.answer_column], self.max_length)


class ShareDataset(EvidenceDataset):
    """Dataset of posts with span and status: items of EvidenceDataset plus labels int64."""

    def __init__(
        self,
        csv_path: str | pathlib.Path | None = None,
        tokenizer: Any = None,
        tokenizer_name: str = "bert-base-uncased",
        context_column: str = "post_text",
        answer_column: str = "sentence_text",
        label_column: str = "status",
        max_length: int = 512,
        padding: bool | str = "max_length",
        truncation: bool | str = True,
        criterion_column: str | None = None,
        dsm_criteria_path: str | pathlib.Path | None = None,
        *,
        pair: bool | None = None,
    ):
        columns = (context_column, answer_column, max_length, padding, truncation, criterion_column)
        super().__init__(csv_path, tokenizer, tokenizer_name, *columns, dsm_criteria_path, pair=pair)
        self.label_column = label_column
        read_rows(self.csv_path, (label_column,))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return super().__getitem__(index) | {"labels": self.label(index, self.label_column)}


class JointDataset(_Dataset):
    """Dataset of sentence and post: tensors under criteria_* and evidence_*, labels, start_positions, end_positions."""

    path = MATCHED

    def __init__(
        self,
        csv_path: str | pathlib.Path | None = None,
        criteria_tokenizer: Any = None,
        evidence_tokenizer: Any = None,
        criteria_tokenizer_name: str = "bert-base-uncased",
        evidence_tokenizer_name: str = "bert-base-uncased",
        sentence_column: str = "sentence_text",
        context_column: str = "post_text",
        label_column: str = "status",
        criteria_max_length: int = 256,
        evidence_max_length: int = 512,
        padding: bool | str = "max_length",
        truncation: bool | str = True,
        criterion_column: str | None = None,
        dsm_criteria_path: str | pathlib.Path | None = None,
        *,
        pair: bool | None = None,
    ):
        self.sentence_column, self.context_column, self.label_column = sentence_column, context_column, label_column
        self.criteria_max_length, self.evidence_max_length = criteria_max_length, evidence_max_length
        columns = (sentence_column, context_column, label_column)
        options = (padding, truncation, criterion_column, dsm_criteria_path, pair)
        first = criteria_tokenizer_name if criteria_tokenizer is None else criteria_tokenizer
        super().__init__(csv_path, first, criteria_max_length, columns, *options)
        self.criteria_tokenizer = self.tokenizer
        second = evidence_tokenizer_name if evidence_tokenizer is None else evidence_tokenizer
        self.evidence_tokenizer = as_tokenizer(second)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        self.tokenizer = self.criteria_tokenizer
        first = rowed(self.tokens(index, row[self.sentence_column], self.max_length))
        self.tokenizer = self.evidence_tokenizer
        second = self.answered(index, row[self.context_column], row[self.sentence_column], self.evidence_max_length)
        spans = {name: second.pop(name) for name in ("start_positions", "end_positions")}
        item = {f"criteria_{name}": value for name, value in first.items()}
        item |= {f"evidence_{name}": value for name, value in second.items()}
        return item | {"labels": self.label(index, self.label_column)} | spans


def as_tokenizer(tokenizer: Any) -> Any:
    """Return a tokenizer as it is, load it from a path or hub id, or wrap this project's Tokenizer for transformers."""
    if isinstance(tokenizer, (str, pathlib.Path)):
        tokenizer = tokenization.load(tokenizer)
    if not isinstance(tokenizer, tokenization.Tokenizer):
        return tokenizer
    from transformers import PreTrainedTokenizerFast

    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, pad_token=tokenizer.pad_token, model_input_names=inputs
    )
