"""Arrays in memory-mapped files reach worker processes as a path, others as copies, with the same values."""

import mmap
import os
import pickle

import numpy as np
import pytest
import torch

from jaxtrain.data import mapped_files
from jaxtrain.data.shared_memory import Frozen
from torch_bridge.datasets import source_of

ROWS = 4096  # of 256 float32: 4 MiB


class Named(np.memmap):
    """A subclass of a user's own."""


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "table with a blank.bin"
    np.random.default_rng(0).standard_normal((ROWS, 256)).astype(np.float32).tofile(file)
    return file


def on_linux(function):
    return pytest.mark.skipif(not mapped_files.MAPPINGS.is_file(), reason="no list of mappings")(function)


def open_mapping(path):
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


FORMS = {
    "read": lambda path: np.memmap(path, np.float32, "r"),
    "written": lambda path: np.memmap(path, np.float32, "r+", shape=(ROWS, 256)),
    "private": lambda path: np.memmap(path, np.float32, "c"),
    "offset": lambda path: np.memmap(path, np.int16, "r", 4098, (1000, 900)),
    "view": lambda path: np.memmap(path, np.float32, "r").reshape(-1, 256)[7::3, ::-1],
    "transposed": lambda path: np.memmap(path, np.float32, "r").reshape(-1, 256).T,
    "plain": lambda path: np.asarray(np.memmap(path, np.float32, "r"))[5:],
    "subclass": lambda path: Named(path, np.float32, "r"),
    "buffer": lambda path: np.frombuffer(open_mapping(path), np.float32),
    "fields": lambda path: np.memmap(path, [("key", "<i4"), ("value", "<f4", (3,))], "r"),
    "half": lambda path: np.memmap(path, np.float16, "r").reshape(2, -1, 64),
    "torch": lambda path: torch.from_file(str(path), shared=True, size=ROWS * 256).numpy(),
}


def sent(value, frozen=None):
    """Return the value as a worker process gets it, and the bytes that were copied."""
    frozen = frozen or Frozen(value)
    return frozen.ticket().thaw(), os.fstat(frozen.ticket().handle).st_size + len(frozen.head)


@on_linux
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_file_backed_array_is_sent_in_less_than_2_kb(path, form):
    array = form(path)
    copy, size = sent({"rows": array})
    np.testing.assert_array_equal(copy["rows"], array)
    assert size < 2048
    assert type(copy["rows"]) is type(array)
    assert copy["rows"].flags.writeable == array.flags.writeable


@on_linux
def test_a_dataset_of_mapped_tensors_is_sent_in_less_than_4_kb(path, tmp_path):
    torch.save({"table": torch.zeros(ROWS, 256)}, tmp_path / "table.pt")
    tables = [
        torch.from_numpy(np.memmap(path, np.float32, "r+")),
        torch.load(tmp_path / "table.pt", mmap=True)["table"],
    ]
    for table in tables:
        source = source_of(torch.utils.data.TensorDataset(table))
        copy, size = sent(source, Frozen(source, source.reducers()))
        assert size < 4096
        np.testing.assert_array_equal(copy[3]["0"] if isinstance(copy[3], dict) else copy[3][0], table[3])


def test_changes_of_a_private_mapping_reach_the_worker(path):
    array = np.memmap(path, np.float32, "c")
    array[12345] = 7.0
    copy, _ = sent(array)
    assert copy[12345] == 7.0
    np.testing.assert_array_equal(copy, array)


def test_a_file_that_was_removed_or_replaced_is_copied(path):
    array = np.memmap(path, np.float32, "r")
    wanted = np.array(array)
    other = path.with_name("other")
    np.zeros(ROWS * 256, np.float32).tofile(other)
    os.replace(other, path)
    np.testing.assert_array_equal(sent(array)[0], wanted)
    path.unlink()
    np.testing.assert_array_equal(sent(array)[0], wanted)


def test_a_subclass_without_a_file_arrives_as_itself():
    array = np.arange(1 << 19, dtype=np.float32).view(Named)
    copy, _ = sent(array)
    assert type(copy) is Named
    np.testing.assert_array_equal(copy, array)


def test_a_subclass_with_its_own_pickling_keeps_it():
    array = np.ma.masked_array(np.arange(1 << 19), np.arange(1 << 19) % 2)
    copy, _ = sent(array)
    assert pickle.dumps(copy.mask.sum()) == pickle.dumps(array.mask.sum())
