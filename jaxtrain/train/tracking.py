"""What a run tells: console, train.log, metrics.jsonl, TensorBoard. Only process 0 writes."""

import json
import logging
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

from tqdm import tqdm

from jaxtrain.errors import UserError

LOG = logging.getLogger("jaxtrain")


class Tracker:
    """One place to send numbers to. `point` is one line of metrics.jsonl and one TensorBoard point per value."""

    def __init__(self, folder: pathlib.Path, config: Any, active: bool):
        self.folder = folder
        self.quiet = config.run.quiet
        self.active = active
        self._bar: tqdm | None = None
        self._metrics = None
        self._board = None
        if not active:
            LOG.addHandler(logging.NullHandler())
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._log_to(folder / "train.log")
            self._metrics = (folder / "metrics.jsonl").open("a")
        except OSError as error:
            raise UserError(f"run.dir: cannot write to {folder}: {error.strerror}; choose another run.dir") from None
        if config.tracking.tensorboard:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"))

    def _log_to(self, path: pathlib.Path) -> None:
        LOG.setLevel(logging.INFO)
        LOG.propagate = False
        for handler in list(LOG.handlers):
            LOG.removeHandler(handler)
            handler.close()
        to_file = logging.FileHandler(path)
        to_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        to_console = _ConsoleHandler()
        to_console.setLevel(logging.WARNING if self.quiet else logging.INFO)
        LOG.addHandler(to_file)
        LOG.addHandler(to_console)

    def rewind(self, step: int) -> None:
        """Forget what was logged after `step`, as the run goes on from there."""
        if not self.active:
            return
        self._metrics.close()
        path = self.folder / "metrics.jsonl"
        kept = [line for line in path.read_text().splitlines() if _step_of(line) is not None and _step_of(line) <= step]
        aside = path.with_suffix(".part")
        aside.write_text("".join(line + "\n" for line in kept))
        aside.rename(path)
        self._metrics = path.open("a")

    def point(self, step: int, epoch: float, split: str, values: Mapping[str, float]) -> None:
        if not self.active:
            return
        line = {"step": step, "epoch": round(epoch, 6), "split": split, "values": dict(values)}
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(f"{split}/{name}", value, step)

    def progress(self, done: int, total: int) -> None:
        """Start the bar (only on a terminal)."""
        if self.active and not self.quiet and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=done, unit="step", dynamic_ncols=True, smoothing=0.05)

    def advance(self, steps: int, values: Mapping[str, float] | None = None) -> None:
        if self._bar is not None:
            if values:
                self._bar.set_postfix({k: f"{v:.4g}" for k, v in values.items()}, refresh=False)
            self._bar.update(steps)

    def say(self, message: str) -> None:
        LOG.info(message)

    def warn(self, message: str) -> None:
        LOG.warning(message)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._metrics is not None:
            self._metrics.close()
        if self._board is not None:
            self._board.close()


class _ConsoleHandler(logging.Handler):
    """Lines that do not tear the progress bar."""

    def emit(self, record):
        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


def _step_of(line: str) -> int | None:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError):
        return None  # the line that a killed process did not finish
