"""Rows of a packed sequence, whichever way code reaches them: torch's numbers, because torch runs what reads them."""

import copy
import itertools
import operator

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence, unpack_sequence

from torch_bridge.capture.module_call import compile_calls

WORDS, LENGTHS = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(0)), torch.tensor([5, 4, 2])


def padded(rows):
    return pad_packed_sequence(rows, batch_first=True)[0]


def guarded(rows):
    """Take the rows if the type says that there are some, and catch what is raised."""
    try:
        return rows[0] if isinstance(rows, tuple) else rows
    except Exception:
        return torch.zeros(1)


FORMS = {
    "attribute": lambda rows: rows.data,
    "getattr": lambda rows: getattr(rows, "da" + "ta"),
    "item": lambda rows: rows[0],
    "item from the end": lambda rows: rows[-4],
    "slice": lambda rows: rows[:1][0],
    "itemgetter": operator.itemgetter(0),
    "unpacked": lambda rows: (lambda data, sizes, order, back: data)(*rows),
    "assigned": lambda rows: [data for data, *_ in [rows]][0],
    "iterator": lambda rows: next(iter(rows)),
    "islice": lambda rows: next(itertools.islice(rows, 1)),
    "zip": lambda rows: next(zip(rows, range(4), strict=True))[0],
    "list": lambda rows: list(rows)[0],
    "extended": lambda rows: [*rows][0],
    "added": lambda rows: (rows + (1,))[0],
    "tuple's own": lambda rows: tuple.__getitem__(rows, 0) * 1,
    "_asdict": lambda rows: rows._asdict()["data"],
    "rebuilt": lambda rows: padded(PackedSequence(rows.data * 2, rows.batch_sizes)),
    "rebuilt of items": lambda rows: padded(PackedSequence(rows[0] * 2, rows[1])),
    "_replace": lambda rows: padded(rows._replace(data=rows.data * 2)),
    "batch sizes": lambda rows: rows.batch_sizes.float(),
    "item of batch sizes": lambda rows: rows[1].float(),
    "copied": lambda rows: copy.copy(rows).data,
    "unpack_sequence": lambda rows: torch.cat(unpack_sequence(rows)),
    "caught": guarded,
    "compared": lambda rows: rows[2] + float(rows == rows) if rows[2] is not None else torch.zeros(1),
}


class Tagger(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read, self.embed = read, nn.Embedding(20, 8)
        self.rnn = nn.GRU(8, 8, batch_first=True)

    def forward(self, words, lengths):
        return self.read(self.rnn(pack_padded_sequence(self.embed(words), lengths, batch_first=True))[0])


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_torchs(form):
    torch.manual_seed(0)
    module = Tagger(FORMS[form])
    try:
        want = module(WORDS, LENGTHS)
    except RuntimeError:  # a comparison of tensors, as torch raises it
        want = None
    compile_calls([module])
    for _ in range(2):
        if want is None:
            with pytest.raises(RuntimeError):
                module(WORDS, LENGTHS)
        else:
            torch.testing.assert_close(module(WORDS, LENGTHS), want)


def test_what_stays_padded_is_torchs():
    module = Tagger(lambda rows: pad_packed_sequence(rows.to(torch.float64).float(), True, total_length=6)[0])
    want = module(WORDS, LENGTHS)
    compile_calls([module])
    torch.testing.assert_close(module(WORDS, LENGTHS), want)
