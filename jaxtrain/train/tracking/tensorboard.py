"""Write TensorBoard event files, through tensorboardX."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.writer import FileWriter


class TensorBoard:
    """TensorBoard backend: scalars, images, histograms and the config as text, in `folder`."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._writer: _Writer | None = None

    def start(self, step: int, config: Mapping[str, Any], text: str) -> None:
        # Points that a killed process wrote after its last checkpoint are replaced.
        self._writer = _Writer(str(self.folder), purge_step=step + 1 if step else None)
        self._writer.add_text("config", "```yaml\n" + text + "\n```", step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        centres = (edges[1:] + edges[:-1]) / 2
        self._writer.add_histogram_raw(
            name,
            min=float(edges[0]),
            max=float(edges[-1]),
            num=float(counts.sum()),
            sum=float(counts @ centres),
            sum_squares=float(counts @ centres**2),
            bucket_limits=edges[1:].tolist(),
            bucket_counts=counts.tolist(),
            global_step=step,
        )

    def image(self, step: int, name: str, image: np.ndarray) -> None:
        self._writer.add_image(name, image, step, dataformats="HWC")

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()


class _Writer(SummaryWriter):
    """SummaryWriter that writes in the calling thread. tensorboardX's own writes in another thread; if a full disk ends
    that, its queue fills up and the run hangs."""

    def _get_file_writer(self):
        if self.file_writer is None:
            self.file_writer = _Files(self.logdir)
            self.all_writers = {self.logdir: self.file_writer}
            if self.purge_step is not None:
                started = SessionLog(status=SessionLog.START)
                self.file_writer.add_event(Event(step=self.purge_step, file_version="brain.Event:2"))
                self.file_writer.add_event(Event(step=self.purge_step, session_log=started))
        return self.file_writer


class _Files(FileWriter):
    def __init__(self, logdir: str):
        self.event_writer = _Events(logdir)
        self._default_metadata = {}


class _Events:
    """Implement the interface that FileWriter expects of its event_writer."""

    def __init__(self, logdir: str):
        self._logdir = logdir
        pathlib.Path(logdir).mkdir(parents=True, exist_ok=True)
        self._file = EventsWriter(str(pathlib.Path(logdir) / "events"))

    def get_logdir(self) -> str:
        return self._logdir

    def add_event(self, event: Event) -> None:
        self._file.write_event(event)

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()
