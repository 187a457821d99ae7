"""The original's MetricsLogger on tensorboardX and W&B."""

import collections
import logging
import math
import numbers
import pathlib
import resource
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from tensorboardX import SummaryWriter

from jaxtrain.errors import install

log = logging.getLogger("hjepa")
LOGIN_TIMEOUT_S = 60  # how long W&B waits for an API key to be typed


class MetricsLogger:
    """Logger of scalars, images, histograms and embeddings to log_dir/tensorboard, and to W&B with use_wandb.

    Values may be numbers, numpy or JAX arrays or torch tensors. As a context manager it closes its files at the end.
    `metrics_buffer`: values gathered by `accumulate_metrics`, by name. `step`: counter for calls without a step.
    """

    def __init__(
        self,
        experiment_name: str,
        log_dir,
        config: Mapping | None = None,
        use_wandb: bool = True,
        use_tensorboard: bool = True,
        wandb_project: str | None = "h-jepa",
        wandb_entity: str | None = None,
        wandb_tags: Sequence[str] | None = None,
    ):
        self.experiment_name, self.config = experiment_name, config
        self.log_dir = pathlib.Path(log_dir)
        (self.log_dir / "tensorboard").mkdir(parents=True, exist_ok=True)
        self._wandb = _installed_wandb() if use_wandb else None
        self.tb_writer = SummaryWriter(str(self.log_dir / "tensorboard")) if use_tensorboard else None
        tags = None if wandb_tags is None else list(wandb_tags)
        self.wandb_run = None if self._wandb is None else self._started(wandb_project, wandb_entity, tags)
        self.use_wandb, self.use_tensorboard = self.wandb_run is not None, use_tensorboard
        self.step = 0
        self.metrics_buffer: dict[str, list[float]] = collections.defaultdict(list)

    def _started(self, project: str | None, entity: str | None, tags: list[str] | None) -> Any:
        """Start a W&B run; return None with a warning if W&B refuses: without an API key, an answer or its server."""
        try:
            return self._wandb.init(
                project=project,
                entity=entity,
                name=self.experiment_name,
                config=dict(self.config or {}),
                tags=tags,
                dir=str(self.log_dir),
                settings=self._wandb.Settings(login_timeout=LOGIN_TIMEOUT_S),
            )
        except Exception as error:  # whatever a tracker raises, the run goes on
            log.warning("W&B gets no metrics, it does not start: %s", str(error).strip() or type(error).__name__)
            return None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.finish()

    # ---- numbers

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None, prefix: str = "", commit: bool = True):
        """Log scalars under prefix + name. Without a step, use the logger's own counter."""
        if step is None:
            step, self.step = self.step, self.step + 1
        else:
            self.step = step
        values = {prefix + name: _number(value) for name, value in metrics.items()}
        for name, value in values.items() if self.tb_writer is not None else ():
            if isinstance(value, float):
                self.tb_writer.add_scalar(name, value, step)
        if self.wandb_run is not None:
            self._wandb.log(values, step=step, commit=commit)

    def log_hierarchical_losses(
        self, loss_dict: Mapping[str, Any], step: int | None = None, prefix: str = "train/hierarchy/"
    ) -> None:
        """Log the levels' losses, keys `loss_h0`, ... or `loss_level_0`, ..., as prefix + level_0, ..."""
        levels = {}
        for name, value in loss_dict.items():
            stem, _, level = name.rpartition("_")
            number = level.removeprefix("h")
            if number.isdigit() and (stem, level) in (("loss", f"h{number}"), ("loss_level", number)):
                levels[f"level_{number}"] = value
        if levels:
            self.log_metrics(levels, step, prefix)

    def accumulate_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Collect numbers for a mean; ignore text and arrays."""
        for name, value in metrics.items():
            number = _number(value)
            if isinstance(number, float):
                self.metrics_buffer[name].append(number)

    def log_accumulated_metrics(
        self, step: int | None = None, prefix: str = "", reset: bool = True
    ) -> dict[str, float]:
        """Log and return the means of what was accumulated."""
        means = {name: float(np.mean(values)) for name, values in self.metrics_buffer.items() if values}
        if means:
            self.log_metrics(means, step, prefix)
        if reset:
            self.metrics_buffer.clear()
        return means

    def log_system_metrics(self, step: int | None = None) -> None:
        """Log the memory that JAX and torch use on each local device, and that of the process, in GB, where known."""
        totals = collections.defaultdict(float)
        totals["host_memory_peak_gb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
        for i, device in enumerate(jax.local_devices()):
            stats = device.memory_stats() or {}
            if stats:
                totals[f"gpu{i}_memory_allocated_gb"] += stats["bytes_in_use"] / 1e9
                totals[f"gpu{i}_memory_peak_gb"] += stats.get("peak_bytes_in_use", stats["bytes_in_use"]) / 1e9
        for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            totals[f"gpu{i}_memory_allocated_gb"] += torch.cuda.memory_allocated(i) / 1e9
            totals[f"gpu{i}_memory_peak_gb"] += torch.cuda.max_memory_allocated(i) / 1e9
        self.log_metrics(totals, step, "system/")

    # ---- pictures and distributions

    def log_image(self, name: str, image, step: int | None = None, caption: str | None = None) -> None:
        """Log an image [channel, height, width], [height, width, channel] or [height, width], in [0, 1] or uint8."""
        pixels = _channels_first(image)
        step = self.step if step is None else step
        if self.tb_writer is not None:
            self.tb_writer.add_image(name, pixels, step)
        if self.wandb_run is not None:
            self._wandb.log({name: self._wandb.Image(np.moveaxis(pixels, 0, -1), caption=caption)}, step=step)

    def log_images(
        self, name: str, images, step: int | None = None, captions: Sequence[str] | None = None, *, nrow: int = 4
    ) -> None:
        """Log a grid of images, nrow per row, each as in log_image; W&B gets them one by one."""
        images = np.stack([_channels_first(image) for image in images])
        step = self.step if step is None else step
        if self.tb_writer is not None:
            filled = np.concatenate([images, np.zeros((-len(images) % nrow, *images.shape[1:]), images.dtype)])
            rows = filled.reshape(-1, nrow, *filled.shape[1:]).transpose(2, 0, 3, 1, 4)
            self.tb_writer.add_image(name, rows.reshape(rows.shape[0], rows.shape[1] * rows.shape[2], -1), step)
        if self.wandb_run is not None:
            pairs = zip(images, captions or [None] * len(images), strict=True)
            shown = [self._wandb.Image(np.moveaxis(image, 0, -1), caption=caption) for image, caption in pairs]
            self._wandb.log({name: shown}, step=step)

    def log_histogram(self, name: str, values, step: int | None = None) -> None:
        """Log the distribution of the finite values."""
        values = array(values).astype(np.float64).reshape(-1)
        values = values[np.isfinite(values)]
        step = self.step if step is None else step
        if not values.size:
            return
        if self.tb_writer is not None:
            self.tb_writer.add_histogram(name, values, step)
        if self.wandb_run is not None:
            self._wandb.log({name: self._wandb.Histogram(values)}, step=step)

    def log_model_gradients(self, model, step: int | None = None) -> None:
        """Log histograms of a torch module's gradients, if it has any."""
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self.log_histogram(f"gradients/{name}", parameter.grad, step)

    def log_model_weights(self, model, step: int | None = None) -> None:
        """Log histograms of a torch module's parameters, or of all entries of a state dict."""
        for name, value in model.items() if isinstance(model, Mapping) else model.named_parameters():
            self.log_histogram(f"weights/{name}", value, step)

    def log_embeddings(
        self, embeddings, labels=None, tag: str = "embeddings", step: int | None = None, *, label_images=None
    ) -> None:
        """Log rows [n, width] for TensorBoard's projector, and as a table on W&B. labels: one per row."""
        rows = array(embeddings).reshape(len(embeddings), -1)
        step = self.step if step is None else step
        labels = None if labels is None else [str(array(label)) for label in labels]
        if self.tb_writer is not None:
            pictures = None if label_images is None else array(label_images)
            self.tb_writer.add_embedding(rows, labels, pictures, global_step=step, tag=tag)
        if self.wandb_run is not None:
            columns = [f"d{i}" for i in range(rows.shape[1])] + ["label"]
            data = [[*row.tolist(), label] for row, label in zip(rows, labels or [""] * len(rows), strict=True)]
            self._wandb.log({tag: self._wandb.Table(columns=columns, data=data)}, step=step)

    def log_prediction_comparison(
        self, images, predictions, targets, masks, step: int | None = None, max_images: int = 4
    ) -> None:
        """Log images and the masked share, and per level how predictions and targets compare, under predictions/.

        images: [batch, channel, height, width], of which the first max_images are shown. predictions, targets: one
        array [batch, ...] or a list of them, one per level; their cosine similarity, mean squared distance and
        histograms are logged. masks: [batch, patch], 1 = predicted. None leaves images or masks out.
        """
        prefix = "predictions/"
        if images is not None:
            shown = array(images)[:max_images].astype(np.float64)
            low, high = shown.min(), shown.max()
            self.log_images(f"{prefix}images", ((shown - low) / max(high - low, 1e-8)).astype(np.float32), step)
        if not isinstance(predictions, (list, tuple)):
            predictions, targets = [predictions], [targets]
        values = {} if masks is None else {"mask_ratio": float(array(masks).astype(np.float64).mean())}
        for level, (prediction, target) in enumerate(zip(predictions, targets, strict=True)):
            a, b = (array(x).astype(np.float64).reshape(len(x), -1) for x in (prediction, target))
            lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
            values[f"cosine_similarity_level_{level}"] = float(((a * b).sum(1) / np.maximum(lengths, 1e-8)).mean())
            values[f"mse_level_{level}"] = float(np.square(a - b).mean())
            self.log_histogram(f"{prefix}predictions_level_{level}", a, step)
            self.log_histogram(f"{prefix}targets_level_{level}", b, step)
        self.log_metrics(values, step, prefix)

    # ---- the rest

    def watch_model(self, model, log_freq: int = 1000, *, log: str = "all") -> None:
        """Let W&B follow a torch module's gradients and weights ("gradients", "parameters" or "all")."""
        if self.wandb_run is not None:
            self._wandb.watch(model, log=log, log_freq=log_freq)

    def finish(self) -> None:
        """Close the files and the W&B run."""
        if self.tb_writer is not None:
            self.tb_writer.close()
        if self.wandb_run is not None:
            self._wandb.finish()


def _installed_wandb() -> Any:
    """Return the wandb module, or None with a warning if it is not installed: the original's scripts run without it."""
    try:
        import wandb
    except ImportError:
        log.warning(f"wandb is not installed, so metrics go to TensorBoard only: {install('tracking')}")
        return None
    return wandb


def array(value) -> np.ndarray:
    """Convert a number, an array or a tensor to numpy."""
    return np.asarray(value.detach().float().cpu() if _is_floating(value) else _plain(value))


def _is_floating(value) -> bool:
    return hasattr(value, "is_floating_point") and value.is_floating_point()


def _plain(value):
    return value.detach().cpu() if hasattr(value, "detach") else value


def _number(value: Any) -> Any:
    """Return a single number in any container as a float; return text and the like unchanged, for W&B."""
    if isinstance(value, str):
        return value
    is_one = isinstance(value, numbers.Real) or (hasattr(value, "item") and math.prod(value.shape) == 1)
    return float(array(value).item()) if is_one else value


def _channels_first(image: Any) -> np.ndarray:
    pixels = array(image)
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    return pixels if pixels.shape[0] in (1, 3, 4) else np.moveaxis(pixels, -1, 0)
