"""What a task shows of the first validation batch after every evaluation: pictures and histograms, for the trackers."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.data.loader import gather
from jaxtrain.train.tracking.histograms import edges, histogram

if TYPE_CHECKING:
    from jaxtrain.train.tracking.tracker import Tracker
    from jaxtrain.train.trainer import Trainer


class Pictures:
    """What `Task.pictures` and `Task.histograms` give. Without them, or without a tracker, nothing is compiled."""

    def __init__(self, trainer: "Trainer"):
        self.trainer = trainer
        task, tracking = trainer.task, trainer.config.tracking
        self.wanted = tracking.tensorboard or tracking.wandb or tracking.mlflow
        self.drawn_by = {"pictures": task.pictures, "histograms": task.histograms}
        self._program: Any = None
        self._batch: Any = None
        self._columns: Any = None

    def log(self, step: int, tracker: "Tracker") -> None:
        trainer = self.trainer
        if not self.wanted or not any(self.drawn_by.values()):
            return
        if self._program is None:
            _, _, loader = trainer.data.evaluation("validation")
            self._columns = trainer.columns(loader)
            self._batch = next(loader.batches([(0, 1)]))[2]
            self._program = trainer.jit(self._draw, out_shardings=trainer.layout.replicated)
        state = trainer.state
        drawn = self._program(trainer.evaluated_params(), state.frozen, state.buffers, self._batch, self._columns)
        drawn = jax.device_get(drawn)
        for name, image in drawn["pictures"].items():
            tracker.image(step, f"validation/{name}", np.asarray(image, np.float32).clip(0, 1))
        for name, (counts, low, high) in drawn["histograms"].items():
            tracker.histogram(step, f"validation/{name}", np.asarray(counts), edges(low, high))

    def _draw(self, params, frozen, buffers, batch, columns):
        trainer = self.trainer
        batch = gather(jax.tree.map(lambda leaf: leaf[0], batch), columns)
        compute = trainer.precision.for_compute
        model = trainer.model_def.merge(compute(params), compute(frozen), buffers)
        drawn = {
            kind: draw(model, batch, trainer.config) if draw is not None else {} for kind, draw in self.drawn_by.items()
        }
        return drawn | {"histograms": {name: histogram(values) for name, values in drawn["histograms"].items()}}
