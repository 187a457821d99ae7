"""Pictures of a task's outputs on the first validation batch, after every evaluation, for the trackers."""

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.data.loader import gather

if TYPE_CHECKING:
    from jaxtrain.train.tracking import Tracker
    from jaxtrain.train.trainer import Trainer


class Pictures:
    """What `Task.pictures` draws. Without it nothing is compiled or read."""

    def __init__(self, trainer: "Trainer"):
        self.trainer = trainer
        self._program: Any = None
        self._batch: Any = None
        self._columns: Any = None

    def log(self, step: int, tracker: "Tracker") -> None:
        trainer = self.trainer
        if trainer.task.pictures is None:
            return
        if self._program is None:
            _, _, loader = trainer.evaluation_loader("validation")
            self._columns = trainer.columns(loader)
            self._batch = next(loader.batches([(0, 1)]))[2]
            self._program = trainer.jit(self._draw, out_shardings=trainer.layout.replicated)
        state = trainer.state
        drawn = self._program(trainer.evaluated_params(), state.frozen, state.buffers, self._batch, self._columns)
        for name, image in jax.device_get(drawn).items():
            tracker.image(step, f"validation/{name}", np.asarray(image, np.float32).clip(0, 1))

    def _draw(self, params, frozen, buffers, batch, columns):
        trainer = self.trainer
        batch = gather(jax.tree.map(lambda leaf: leaf[0], batch), columns)
        compute = trainer.precision.for_compute
        model = trainer.skeleton.merge(compute(params), compute(frozen), buffers)
        outputs = trainer.task.outputs(model, batch) if trainer.task.outputs is not None else None
        return trainer.task.pictures(outputs, batch, trainer.config)
