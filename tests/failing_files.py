"""Let every call on a file that a command makes fail in turn: `python -m tests.failing_files FAMILY ... [--only TEXT]`.

Each place in the product's code that opens, locks, maps, writes, renames or makes a file or folder fails once, all its
calls for one run of the command. Every such run must end as documented: exit code 0, 1 or 2, and if not 0 one sentence
on stderr that names the path; never a traceback. An output that was there before stays as it was or is written whole.
Files that trackers, studies and pictures write through a library count for the line that calls the library, and so do
SQLite databases: they fail when they are opened, and when something is written. Prints one line for each place, and at
the end the faults. The checkpoint code has tests of its own.
"""

import argparse
import builtins
import contextlib
import errno
import fcntl
import io
import json
import mmap
import os
import pathlib
import sqlite3
import sqlite3.dbapi2
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import jaxtrain
from jaxtrain import checkpoints, commands, evaluate, export, lr_find, report, run, tune
from torch_bridge import verify

ROOT = pathlib.Path(__file__).parents[1]
OURS = (str(ROOT / "jaxtrain"), str(ROOT / "torch_bridge"))
ELSEWHERE = str(ROOT / "jaxtrain/train/checkpoint")
THROUGH = (
    "pathlib", "tempfile", "shutil", "contextlib", "json", "gzip", "zipfile", "wave", "os", "numpy", "joblib", "csv",
    "tensorboardX", "mlflow", "optuna", "plotly", "_plotly_utils", "sqlalchemy", "alembic", "matplotlib", "PIL",
)  # fmt: skip
DELETES = ("rmtree", "_rmtree", "_rmtree_safe_fd")  # tempfile's repeats itself forever where its own folder is closed
SAID = {
    "open": errno.EACCES, "write": errno.ENOSPC, "lock": errno.ENOLCK, "map": errno.ENOMEM, "rename": errno.EROFS,
    "folder": errno.EROFS, "read": errno.EIO,
}  # fmt: skip
WRITES = ("INSERT", "UPDATE", "CREATE", "DELETE")
Place = tuple[str, str]  # what is done there, and file:line


class _Full(io.FileIO):
    """A file on a full disk."""

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Unreadable(io.FileIO):
    """A file on a disk that fails."""

    def readinto(self, buffer: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def readall(self) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read(self, size: int = -1) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


class Faults:
    """Calls on files, by place. failing: the place whose calls fail now."""

    def __init__(self) -> None:
        self.places: dict[Place, str] = {}  # with a path that was touched there
        self.failing: Place | None = None
        self.failed: set[str] = set()  # paths whose calls have failed

    def fails(self, kind: str, path: Any) -> bool:
        """Note a call by the product's code; return whether it is to fail."""
        frame = sys._getframe(1)
        while frame is not None and (frame.f_globals is globals() or _module(frame) in THROUGH):
            if frame.f_code.co_name in DELETES:
                return False
            frame = frame.f_back
        if frame is None or not frame.f_code.co_filename.startswith(OURS):
            return False
        if frame.f_code.co_filename.startswith(ELSEWHERE):
            return False
        name = os.path.relpath(frame.f_code.co_filename, ROOT)
        place = kind, f"{name}:{frame.f_lineno}"
        self.places.setdefault(place, str(path))
        if self.failing == place:
            self.failed.add("" if isinstance(path, int) else str(path))
        return self.failing == place

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While active, the calls go through `fails`."""
        swapped = [
            (builtins, "open", self._opening(io.open)), (io, "open", self._opening(io.open)),
            (fcntl, "flock", self._failing("lock", fcntl.flock)), (mmap, "mmap", self._failing("map", mmap.mmap)),
            (os, "rename", self._failing("rename", os.rename)), (os, "replace", self._failing("rename", os.replace)),
            (os, "mkdir", self._failing("folder", os.mkdir)), (os, "open", self._failing("open", os.open)),
            (sqlite3.dbapi2, "connect", self._connecting(sqlite3.connect)),
        ]  # fmt: skip
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in swapped]
        for owner, name, value in swapped:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)

    def _failing(self, kind: str, plain: Callable) -> Callable:
        def call(first: Any, *arguments: Any, **options: Any) -> Any:
            if self.fails(kind, first.name if isinstance(first, io.IOBase) else first):
                named = [first] if isinstance(first, str | os.PathLike) else []  # of an open file the system names none
                raise OSError(SAID[kind], os.strerror(SAID[kind]), *named)
            return plain(first, *arguments, **options)

        return call

    def _connecting(self, plain: Callable) -> Callable:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            if self.fails("database", path):
                raise sqlite3.OperationalError("unable to open database file")
            fails = lambda text: text.lstrip().startswith(WRITES) and self.fails("insert", path)

            class Cursor(sqlite3.Cursor):
                def execute(self, text: str, *values: Any) -> Any:
                    if fails(text):
                        raise sqlite3.OperationalError("database or disk is full")
                    return super().execute(text, *values)

                def executemany(self, text: str, *values: Any) -> Any:
                    if fails(text):
                        raise sqlite3.OperationalError("database or disk is full")
                    return super().executemany(text, *values)

            class Connection(sqlite3.Connection):
                def cursor(self, factory: Any = Cursor) -> Any:
                    return super().cursor(factory)

            return plain(path, *arguments, factory=Connection, **options)

        return call

    def _opening(self, plain: Callable) -> Callable:
        def call(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            writes = not {*"wax+"}.isdisjoint(mode)
            if isinstance(file, int) or not isinstance(file, str | os.PathLike):
                return plain(file, mode, *arguments, **options)
            if self.fails("open", file):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(file))
            if self.fails("write" if writes else "read", file) and not os.path.isdir(file):
                bare = mode.replace("b", "").replace("t", "")
                raw = (_Full if writes else _Unreadable)(file, bare)
                if options.get("buffering", arguments[0] if arguments else -1) == 0:
                    return raw
                kind = io.BufferedRandom if "+" in bare else io.BufferedWriter if writes else io.BufferedReader
                return kind(raw) if "b" in mode else io.TextIOWrapper(kind(raw), encoding=options.get("encoding"))
            return plain(file, mode, *arguments, **options)

        return call


def _module(frame: Any) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]


SMALL = [
    "--config", str(ROOT / "configs/digits_tiny.yaml"), "tracking.tensorboard=false", "data.source=numpy",
    "evaluation.every_steps=2", "checkpoint.every_steps=2", "checkpoint.retry_s=0.1", "train.log_every_steps=1",
]  # fmt: skip
OWN = ["--config", str(ROOT / "configs/torch_module_tiny.yaml"), "tracking.tensorboard=false", *SMALL[4:]]
SPACE = """study: {trials: 1}
optim.lr: {type: loguniform, low: 1.0e-3, high: 1.0e-2}
"""


def layer() -> torch.nn.Module:
    return torch.nn.Linear(2, 1)


def rows() -> Any:
    return torch.utils.data.TensorDataset(torch.ones(4, 2), torch.ones(4, 1))


def sweep_into(arguments: list[str]) -> int:
    """Sweep from Python, as a command would."""

    def work(_: argparse.Namespace) -> None:
        rates = {"lr": [0.1, 0.01]}
        config = {"train": {"steps": 1}, "data": {"batch_size": 4}, "run": {"quiet": True}}
        jaxtrain.sweep(layer, rows(), torch.nn.MSELoss(), rates, config=config).save(arguments[0])

    return commands.main(work, argparse.Namespace())


def commands_of(family: str, folder: pathlib.Path, trained: pathlib.Path) -> tuple[Callable, list[str], list[str]]:
    """Return a command's function and arguments in a fresh folder, and the outputs that are there before it.

    trained: a run folder.
    """
    space = folder / "space.yaml"
    space.write_text(SPACE)
    tracked = ["tracking.tensorboard=true", "profile.start=0", "profile.steps=1", f"checkpoint.mirror={folder}/mirror"]
    given = {
        "run": (run.main, [*SMALL, "train.steps=2", f"run.dir={folder}/run"], []),
        "tune": (tune.main, [*SMALL, "train.steps=2", "--space", str(space), "--output", f"{folder}/study"], []),
        "tune_tracked": (
            tune.main,
            [*SMALL, "train.steps=2", "tracking.mlflow=true", f"tracking.mlflow_uri=sqlite:///{folder}/mlflow.db",
             "--space", str(space), "--output", f"{folder}/study"],
            [],
        ),
        "mlflow": (
            run.main,
            [*SMALL, "train.steps=2", f"run.dir={folder}/run", "tracking.mlflow=true", "tracking.mlflow_model=digits",
             f"tracking.mlflow_uri=sqlite:///{folder}/mlflow.db"],
            [],
        ),
        "lr_find": (lr_find.main, [*SMALL, f"run.dir={folder}/run"], []),
        "evaluate": (evaluate.main, ["--run", str(trained), "--output", f"{folder}/found.json"], ["found.json"]),
        "export_pt": (export.main, ["--run", str(trained), "--output", f"{folder}/weights.pt"], ["weights.pt"]),
        "export_safetensors": (
            export.main, ["--run", str(trained), "--output", f"{folder}/weights.safetensors"], ["weights.safetensors"]
        ),
        "export_optimizer": (
            export.main, ["--run", str(trained), "--output", f"{folder}/state.pt", "--optimizer"], ["state.pt"]
        ),
        "own_module": (run.main, [*OWN, "train.steps=2", "train.epochs=null", f"run.dir={folder}/run"], []),
        "tracked": (run.main, [*SMALL, "train.steps=2", f"run.dir={folder}/run", *tracked], []),
        "verify": (verify.main, ["--run", str(trained)], []),
        "certificate": (
            verify.main,
            ["--module", f"{__name__}:layer", "--data", f"{__name__}:rows", "--loss", "torch.nn:MSELoss", "--steps",
             "1", "--batch-size", "2", "--output", str(folder)],
            ["certificate.html", "certificate.json"],
        ),
        "sweep": (sweep_into, [f"{folder}/swept"], []),
        "report": (report.main, ["--run", str(trained), "--output", f"{folder}/page.html"], ["page.html"]),
        "checkpoints": (checkpoints.main, ["verify", "--run", str(trained)], []),
    }  # fmt: skip
    for name in given[family][2]:
        (folder / name).write_text("precious")
    return given[family]


FAMILIES = (
    "run", "own_module", "tracked", "mlflow", "tune", "tune_tracked", "sweep", "lr_find", "evaluate", "export_pt",
    "export_safetensors", "export_optimizer", "report", "verify", "certificate", "checkpoints",
)  # fmt: skip


def once(faults: Faults, family: str, trained: pathlib.Path) -> str:
    """Run the command with the failing place; return what is wrong with its end, or ""."""
    said, shown = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        main, arguments, outputs = commands_of(family, folder, trained)
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown), faults.watching():
                code = main(arguments)
        except SystemExit as ended:
            code = ended.code
        except Exception:
            return f"a traceback: {traceback.format_exc().splitlines()[-1]}"
        spoiled = [
            name
            for name in outputs
            if (folder / name).stat().st_size < 8 or (code and (folder / name).read_bytes() != b"precious")
        ]
        left = [path.name for path in folder.rglob("*.part") if path.parent.name != "checkpoints"]
    lines = [line for line in said.getvalue().splitlines() if "error: " in line]
    if spoiled:
        return f"{spoiled[0]} was lost"
    if left:
        return f"{left[0]} was left behind"
    if "Traceback (most" in said.getvalue() + shown.getvalue():
        return f"a traceback is printed: {(said.getvalue() + shown.getvalue())[-600:]}"
    words = said.getvalue() + shown.getvalue()
    named = any(name in words for path in faults.failed for name in pathlib.PurePath(path).parts[-1:])
    if faults.failing and "tracking/mlflow" in faults.failing[1] and not named:
        return f"the tracker's failure is not told: {words[-400:]}"
    if not code:
        return ""
    if faults.failing is None:
        return f"exit code {code}: {said.getvalue()[-300:]}"
    if not lines:
        return f"exit code {code} without a sentence: {said.getvalue()[-400:]}"
    parts = [part for path in faults.failed for part in pathlib.PurePath(path).parts[-2:]]
    if not any(part.removeprefix(".").removesuffix(".part") in lines[0] for part in parts) and parts:
        return f"no path: {lines[0]}"
    return ""


def sweep(families: Sequence[str], only: str = "") -> list[str]:
    """Let each place of the commands fail; return what is wrong, one line for each. only: text of the places tried."""
    found = []
    if {"mlflow", "tune_tracked"} & set(families):
        from mlflow.store.db import utils

        utils.MAX_RETRY_COUNT = 1  # 10 take it 100 s
    with tempfile.TemporaryDirectory() as temporary:
        trained = pathlib.Path(temporary) / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            assert run.main([*SMALL, "train.steps=2", f"run.dir={trained}"]) == 0
        for family in families:
            faults = Faults()
            assert not (problem := once(faults, family, trained)), f"{family} without a fault: {problem}"
            for place in sorted(place for place in faults.places if only in " ".join(place)):
                faults.failing, faults.failed = place, set()
                problem = once(faults, family, trained)
                print(f"{family} {' '.join(place)}: {problem or 'ok'}", file=sys.stderr, flush=True)
                found += [f"{family} {' '.join(place)}: {problem}"] if problem else []
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("families", choices=FAMILIES, nargs="+")
    p.add_argument("--only", default="", metavar="TEXT", help="try places with this text, as `insert` or `study.py`")
    arguments = p.parse_args()
    found = sweep(arguments.families, arguments.only)
    print(json.dumps(found))
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
