"""Write a run's logs: console, train.log, metrics.jsonl and trackers. Only process 0 writes."""

import contextlib
import importlib.util
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import numpy as np
from tqdm import tqdm

from jaxtrain import redaction, strict_json
from jaxtrain.errors import UserError, reason
from jaxtrain.runtime.kept_file import KeptFile
from jaxtrain.runtime.terminal import is_notebook, is_terminal
from jaxtrain.train.tracking.backends import Backend, make_backends
from torch_bridge.atomic_file import replacing

LOG = logging.getLogger("jaxtrain")


class Tracker:
    """Sink for a run's metrics and log lines. `point` writes one line of metrics.jsonl, and one value per metric to
    every tracker.

    Raises UserError for a tracker whose package is missing. A tracker that raises later is reported once, and the run
    continues without it. lines: False leaves out console and train.log, which only one run of a process can have.
    """

    def __init__(self, folder: pathlib.Path, config: Any, active: bool, lines: bool = True):
        self.folder = folder
        self.config = config
        self.quiet = config.run.quiet
        self.active, self.lines = active, lines
        self._bar: tqdm | None = None
        self._metrics: _Lines | None = None
        self._backends: dict[str, Backend] = {}
        self._constructors: dict[str, Callable[[], Backend]] = {}
        if not active:
            LOG.addHandler(logging.NullHandler())
            return
        self._constructors = make_backends(config, folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if lines:
                self._log_to(folder / "train.log")
            self._metrics = _Lines(folder / "metrics.jsonl", self.warn)
        except OSError as error:
            raise UserError(f"run.dir: cannot write to {folder}: {error.strerror}; choose another run.dir") from None

    def _log_to(self, path: pathlib.Path) -> None:
        LOG.setLevel(logging.INFO)
        LOG.propagate = False
        for handler in list(LOG.handlers):
            LOG.removeHandler(handler)
            handler.close()
        to_file = _FileHandler(path)
        to_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        to_console = _ConsoleHandler(sys.stderr if self.quiet else None)
        to_console.setLevel(logging.WARNING if self.quiet else logging.INFO)
        LOG.addHandler(to_file)
        LOG.addHandler(to_console)

    def rewind(self, step: int, evaluation_due: bool = False) -> None:
        """Remove the points logged after `step`, from where the run resumes, and start the trackers.

        evaluation_due: the evaluation after `step` will run again, so its points are removed too.
        """
        if not self.active:
            return

        def stays(line: dict[str, Any]) -> bool:
            again = evaluation_due and line.get("step") == step and line.get("split") == "validation"
            return line.get("step", step + 1) <= step and not again

        try:
            self._metrics.keep(stays)
        except OSError as error:
            raise UserError(
                f"run.dir: cannot write to {self.folder}: {error.strerror}; make room, or choose another run.dir"
            ) from None
        self._start_backends(step)

    def _start_backends(self, step: int) -> None:
        from jaxtrain import config_io

        settings, text = config_io.plain(self.config), config_io.dump(self.config)
        for name, construct in self._constructors.items():
            backend = None
            try:
                backend = construct()
                backend.start(step, settings, text)
            except Exception as error:
                self._report(name, error)
                _give_up(backend)
            else:
                self._backends[name] = backend

    def point(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        if not self.active:
            return
        line = {"step": step, "epoch": round(epoch, 6), "split": split, "values": dict(values)}
        self._metrics.add(strict_json.dumps(line))
        shared = lambda name: name.partition("/")[0] in ("lr", "system", "throughput", "time")
        self._send("scalars", step, {n if shared(n) and "/" in n else f"{split}/{n}": v for n, v in values.items()})

    def histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Log a histogram. counts: [bin]. edges: [bin + 1]."""
        self._send("histogram", step, name, counts, edges)

    def image(self, step: int, name: str, image: np.ndarray) -> None:
        """Log an image: float in 0..1 or uint8, [height, width, 1 or 3]."""
        self._send("image", step, name, image)

    def _send(self, method: str, *arguments: Any) -> None:
        for name, backend in list(self._backends.items()):
            try:
                getattr(backend, method)(*arguments)
            except Exception as error:
                del self._backends[name]
                self._report(name, error)
                if method != "close":
                    _give_up(backend)

    def _report(self, name: str, error: Exception) -> None:
        self.warn(f"{name} failed and is off for the rest of the run: {reason(error)}")

    def progress(self, done: int, total: int) -> None:
        """Start the progress bar, on a terminal or in a notebook, where it is a widget if ipywidgets is installed."""
        if self.active and not self.quiet and (is_terminal(sys.stderr) or is_notebook()):
            bar = tqdm
            if is_notebook() and importlib.util.find_spec("ipywidgets"):
                from tqdm.notebook import tqdm as bar
            self._bar = bar(total=total, initial=done, unit="step", dynamic_ncols=True, smoothing=0.05)

    def advance(self, steps: int, values: Mapping[str, float] | None = None) -> None:
        if self._bar is not None:
            if values:
                self._bar.set_postfix({k: f"{v:.4g}" for k, v in values.items()}, refresh=False)
            self._bar.update(steps)

    def info(self, message: str) -> None:
        if self.lines:
            LOG.info(redaction.mask(message))

    def warn(self, message: str) -> None:
        LOG.warning(redaction.mask(message))

    def close(self, failed: bool = False) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None
        self._send("close", failed)


def _give_up(backend: Backend | None) -> None:
    """Close a tracker that failed, so that its run does not appear as running forever."""
    with contextlib.suppress(Exception):  # it has failed already
        if backend is not None:
            backend.close(failed=True)


class _Lines:
    """A file of complete JSON lines. Lines that cannot be written (a full disk) are kept in memory until they can."""

    def __init__(self, path: pathlib.Path, warn: Callable[[str], None]):
        self.path, self.warn = path, warn
        self._waiting: list[bytes] = []
        self._open()

    def _open(self) -> None:
        self._file = KeptFile(self.path, os.O_RDWR | os.O_APPEND)
        self._size = os.fstat(self._file.descriptor()).st_size

    def keep(self, stays: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the lines for which `stays` returns False, and a line that a killed process did not finish."""
        lines = self.path.read_bytes().splitlines()
        kept = [line for line in lines if (value := _parsed(line)) is not None and stays(value)]
        with replacing(self.path) as aside:
            aside.write_bytes(b"".join(line + b"\n" for line in kept))
        self._file.close()
        self._open()

    def add(self, line: str) -> None:
        self._waiting.append(line.encode() + b"\n")
        self._write()

    def _write(self) -> None:
        content = b"".join(self._waiting)
        try:
            if self._file.lost:
                self._size = os.fstat(self._file.descriptor()).st_size
            written = 0
            while written < len(content):
                written += os.write(self._file.descriptor(), content[written:])
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.descriptor(), self._size)
            if len(self._waiting) == 1:
                self.warn(f"{self.path} CANNOT BE WRITTEN: {error.strerror}. Its lines are kept until it can")
            return
        if len(self._waiting) > 1:
            self.warn(f"{self.path}: all of {len(self._waiting)} lines that waited are written")
        self._size += len(content)
        self._waiting = []

    def close(self) -> None:
        if self._waiting:
            self._write()
        if self._waiting:
            self.warn(f"{self.path}: {len(self._waiting)} LINES ARE LOST, because it cannot be written")
        self._file.close()


class _FileHandler(logging.Handler):
    """Handler of train.log. If the disk is full, lines are lost, but nothing fails."""

    def __init__(self, path: pathlib.Path):
        super().__init__()
        self._file = KeptFile(path, os.O_WRONLY | os.O_APPEND)

    def emit(self, record):
        text = self.format(record).encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            os.write(self._file.descriptor(), text + b"\n")

    def close(self):
        self._file.close()
        super().close()


class _ConsoleHandler(logging.Handler):
    """Handler of the console that keeps the progress bar intact. If the terminal is gone, lines are lost, but nothing
    fails."""

    def __init__(self, stream: TextIO | None = None):
        super().__init__()
        self.stream = stream  # None: sys.stdout at the time of writing

    def emit(self, record):
        stream = self.stream or sys.stdout
        text = self.format(record)
        with contextlib.suppress(OSError, ValueError, AttributeError):  # the stream may be missing or lack methods
            try:
                tqdm.write(text, file=stream)
            except UnicodeEncodeError:
                tqdm.write(text.encode("ascii", "backslashreplace").decode(), file=stream)
            stream.flush()


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = strict_json.loads(line)
    except ValueError:
        return None  # the line that a killed process did not finish
    return value if isinstance(value, dict) else None
