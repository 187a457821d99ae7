"""The original's MetricsLogger on tensorboardX, with W&B where it is asked for."""

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter


class MetricsLogger:
    """Writes scalars, images and histograms under log_dir/tensorboard, and to W&B with use_wandb.

    Values may be numbers, numpy or JAX arrays or torch tensors. A context manager: it closes its files at the end.
    """

    def __init__(
        self,
        experiment_name: str,
        log_dir,
        config: Mapping | None = None,
        use_wandb: bool = True,
        use_tensorboard: bool = True,
        wandb_project: str = "h-jepa",
        wandb_entity: str | None = None,
        wandb_tags: list[str] | None = None,
    ):
        self.log_dir = pathlib.Path(log_dir)
        (self.log_dir / "tensorboard").mkdir(parents=True, exist_ok=True)
        self.writer = SummaryWriter(str(self.log_dir / "tensorboard")) if use_tensorboard else None
        self.wandb = None
        if use_wandb:
            import wandb

            self.wandb = wandb.init(
                project=wandb_project,
                entity=wandb_entity,
                name=experiment_name,
                config=dict(config or {}),
                tags=wandb_tags,
                dir=str(self.log_dir),
            )
        self.step = 0
        self.sums: dict[str, list[float]] = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.finish()

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None, prefix: str = "", commit: bool = True):
        """Scalars under prefix + name. Without a step, the logger counts."""
        step = self._next(step)
        values = {prefix + name: float(array(value)) for name, value in metrics.items()}
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(values, step=step, commit=commit)

    def _next(self, step: int | None) -> int:
        self.step = self.step + 1 if step is None else step
        return self.step - 1 if step is None else step

    def log_image(self, name: str, image, step: int | None = None) -> None:
        """image: [channel, height, width] or [height, width, channel], in [0, 1] or uint8."""
        pixels = array(image)
        pixels = pixels if pixels.shape[0] in (1, 3, 4) else np.moveaxis(pixels, -1, 0)
        if self.writer is not None:
            self.writer.add_image(name, pixels, self.step if step is None else step)

    def log_images(self, name: str, images, step: int | None = None, nrow: int = 4) -> None:
        """A grid of images [n, channel, height, width], nrow per row."""
        images = array(images)
        filled = np.concatenate([images, np.zeros((-len(images) % nrow, *images.shape[1:]), images.dtype)])
        rows = filled.reshape(-1, nrow, *filled.shape[1:]).transpose(2, 0, 3, 1, 4)
        self.log_image(name, rows.reshape(rows.shape[0], rows.shape[1] * rows.shape[2], -1), step)

    def log_histogram(self, name: str, values, step: int | None = None) -> None:
        values = array(values).astype(np.float64).reshape(-1)
        if self.writer is not None and np.isfinite(values).all():
            self.writer.add_histogram(name, values, self.step if step is None else step)

    def log_model_gradients(self, model, step: int | None = None) -> None:
        """Histograms of a torch module's gradients, where it has any."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.log_histogram(f"gradients/{name}", parameter.grad, step)

    def log_model_weights(self, model, step: int | None = None) -> None:
        """Histograms of the weights of a torch module or a state dict."""
        state = model if isinstance(model, Mapping) else model.state_dict()
        for name, value in state.items():
            self.log_histogram(f"weights/{name}", value, step)

    def log_embeddings(self, embeddings, step: int | None = None, metadata=None, name: str = "embeddings") -> None:
        """Rows for TensorBoard's projector."""
        if self.writer is not None:
            self.writer.add_embedding(
                array(embeddings), metadata, global_step=self.step if step is None else step, tag=name
            )

    def accumulate_metrics(self, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            self.sums.setdefault(name, []).append(float(array(value)))

    def log_accumulated_metrics(
        self, step: int | None = None, prefix: str = "", reset: bool = True
    ) -> dict[str, float]:
        """Log and return the means of what was accumulated."""
        means = {name: float(np.mean(values)) for name, values in self.sums.items()}
        self.log_metrics(means, step, prefix)
        if reset:
            self.sums = {}
        return means

    def log_system_metrics(self, step: int | None = None) -> None:
        """Memory in use on each device of this process, in GB, where the backend tells."""
        import jax

        found = {f"gpu{i}_memory_allocated_gb": device.memory_stats() for i, device in enumerate(jax.local_devices())}
        known = {name: stats["bytes_in_use"] / 1e9 for name, stats in found.items() if stats}
        if known:
            self.log_metrics(known, step, "system/")

    def finish(self) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.wandb is not None:
            self.wandb.finish()


def array(value) -> np.ndarray:
    """A number, an array or a tensor as numpy."""
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
