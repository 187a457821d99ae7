"""Send pictures and histograms of the first validation batch to the trackers after every evaluation."""

from typing import Any

import jax
import numpy as np

from jaxtrain.data.row_keys import gather
from jaxtrain.train.program import Program
from jaxtrain.train.tracking.histograms import edges, histogram
from jaxtrain.train.tracking.tracker import Tracker


class Pictures:
    """Output of `Task.pictures` and `Task.histograms`. Without them, or without a tracker, nothing is compiled."""

    def __init__(self, program: Program):
        self.program = program
        task, tracking = program.task, program.config.tracking
        self.wanted = tracking.tensorboard or tracking.wandb or tracking.mlflow
        self.drawn_by = {"pictures": task.pictures, "histograms": task.histograms}
        self._drawing: Any = None
        self._batch: Any = None
        self._columns: Any = None

    def log(self, step: int, tracker: Tracker) -> None:
        program = self.program
        if not self.wanted or not any(self.drawn_by.values()):
            return
        if self._drawing is None:
            _, _, loader = program.data.evaluation("validation")
            self._columns = program.columns(loader)
            self._batch = next(loader.batches([(0, 1)]))[2]
            self._drawing = program.jit(self._draw, out_shardings=program.layout.replicated)
        state = program.state
        drawn = self._drawing(program.evaluated_params(), state.frozen, state.buffers, self._batch, self._columns)
        drawn = jax.device_get(drawn)
        for name, image in drawn["pictures"].items():
            tracker.image(step, f"validation/{name}", np.asarray(image, np.float32).clip(0, 1))
        for name, (counts, low, high) in drawn["histograms"].items():
            tracker.histogram(step, f"validation/{name}", np.asarray(counts), edges(low, high))

    def _draw(self, params, frozen, buffers, batch, columns):
        program = self.program
        batch = gather(jax.tree.map(lambda leaf: leaf[0], batch), columns)
        compute = program.precision.for_compute
        model = program.model_def.merge(compute(params), compute(frozen), buffers)
        drawn = {
            kind: draw(model, batch, program.config) if draw is not None else {} for kind, draw in self.drawn_by.items()
        }
        return drawn | {"histograms": {name: histogram(values) for name, values in drawn["histograms"].items()}}
