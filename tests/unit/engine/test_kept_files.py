"""Files that a run keeps open, while the user's code closes descriptors, forks, or nobody reads the output."""

import json
import os
import subprocess
import sys

import pytest

from jaxtrain.runtime.folder_lock import FolderLock
from jaxtrain.runtime.kept_file import KeptFile

ORPHAN = """
import os, pathlib, sys, time
from jaxtrain.runtime.folder_lock import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[1]))
lock.acquire()
child = os.fork()
if not child:
    os.close(1)
    time.sleep(60)
print(child, flush=True)
os.kill(os.getpid(), 9)
"""
UNREAD = """
import sys
from jaxtrain.runtime.terminal import outliving_its_reader
with outliving_its_reader():
    for _ in range(1000):
        print("x" * 1000, flush=True)
print("done", file=sys.stderr)
"""


@pytest.fixture
def stolen(tmp_path):
    """A kept file whose descriptor the user's code has closed, and opened for a file of its own."""
    kept, own = KeptFile(tmp_path / "kept", os.O_RDWR | os.O_APPEND), tmp_path / "own"
    number = kept.descriptor()
    os.close(number)
    mine = os.open(own, os.O_RDWR | os.O_CREAT)
    assert mine == number
    yield kept, own
    os.close(mine)


def test_a_file_whose_descriptor_was_taken_is_opened_anew_and_the_other_file_left_alone(stolen, tmp_path):
    kept, own = stolen
    os.write(kept.descriptor(), b"line")
    assert ((tmp_path / "kept").read_bytes(), own.read_bytes()) == (b"line", b"")


def test_closing_it_leaves_the_other_file_open(stolen):
    kept, own = stolen
    kept.close()
    assert os.stat(own).st_size == 0
    with pytest.raises(OSError, match="it was closed"):
        kept.descriptor()


def test_the_lock_of_a_killed_run_ends_though_a_child_that_it_forked_lives(tmp_path):
    ended = subprocess.run([sys.executable, "-c", ORPHAN, str(tmp_path)], stdout=subprocess.PIPE, timeout=60)
    try:
        with FolderLock(tmp_path, lambda line: None):
            assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    finally:
        os.kill(int(ended.stdout), 9)


def test_a_lock_whose_descriptor_was_closed_still_shows_life(tmp_path):
    with FolderLock(tmp_path) as lock:
        os.close(lock._file.descriptor())
        lock._sign(7)
        assert json.loads((tmp_path / "run.lock").read_text())["sign"] == 7


def test_a_command_goes_on_where_nobody_reads_its_output():
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", UNREAD], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, b"done\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the system has no /dev/full")
def test_a_full_disk_behind_the_output_ends_no_run():
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-c", UNREAD], stdout=full, stderr=subprocess.PIPE, timeout=60)
    told = b"standard output: No space left on device; the run goes on without it\ndone\n"
    assert (ended.returncode, ended.stderr) == (0, told)
