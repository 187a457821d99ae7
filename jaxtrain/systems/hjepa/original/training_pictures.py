"""The original's pictures of training: curves, momentum, collapse, gradients, features and predictions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.pictures import array, done, draw, heat, on_grid, sheet, shown, spread

Size = tuple[float, float]


def plot_training_curves(
    metrics: Mapping[str, Sequence[float]], save_path: Any = None, figsize: Size = (16, 10), smooth_window: int = 10
) -> Any:
    """Draw each list of values by name, and its mean over smooth_window values; return the figure."""
    figure, axes = sheet(len(metrics), figsize, 3)
    for axis, (name, values) in zip(axes, metrics.items(), strict=True):
        values = array(values)
        axis.plot(values, alpha=0.4)
        if 1 < smooth_window <= len(values):
            smooth = np.convolve(values, np.full(smooth_window, 1 / smooth_window), "valid")
            axis.plot(np.arange(smooth_window - 1, len(values)), smooth)
        axis.set_title(name)
    return done(figure, save_path)


def plot_hierarchical_losses(
    hierarchical_losses: Mapping[Any, Sequence[float]], save_path: Any = None, figsize: Size = (12, 6)
) -> Any:
    """Draw the loss of each level in one plot; return the figure."""
    figure, (axis,) = sheet(1, figsize)
    for name, values in hierarchical_losses.items():
        axis.plot(array(values), label=str(name))
    axis.legend()
    axis.set_ylabel("loss")
    return done(figure, save_path)


def plot_ema_momentum(momentum_history: Sequence[float], save_path: Any = None, figsize: Size = (10, 5)) -> Any:
    """Draw the target encoder's momentum by step; return the figure."""
    figure, (axis,) = sheet(1, figsize)
    axis.plot(array(momentum_history))
    axis.set_xlabel("step")
    axis.set_ylabel("momentum")
    return done(figure, save_path)


def plot_collapse_metrics(features: Any, save_path: Any = None, figsize: Size = (14, 5)) -> Any:
    """Draw standard deviations, singular values and cosines of features [row, (token,) width]; return the figure."""
    rows = _rows(features)
    figure, (deviations, spectrum, cosines) = sheet(3, figsize)
    deviations.hist(rows.std(0), bins=30)
    deviations.set_title("standard deviation of each feature")
    values = np.linalg.svd(rows - rows.mean(0), compute_uv=False)
    spectrum.semilogy(np.maximum(values, 1e-12))
    share = values / max(values.sum(), 1e-12)
    rank = float(np.exp(-(share * np.log(share + 1e-12)).sum()))
    spectrum.set_title(f"singular values, effective rank {rank:.1f}")
    unit = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    cosines.hist((unit @ unit.T)[~np.eye(len(unit), dtype=bool)], bins=30)
    cosines.set_title("cosine of pairs of rows")
    return done(figure, save_path)


def visualize_gradient_flow(model: nn.Module, save_path: Any = None, figsize: Size = (14, 8)) -> Any:
    """Draw the mean and largest size of each parameter's gradient; return the figure.

    Raises ValueError before a backward pass.
    """
    sizes = {name: p.grad.abs() for name, p in model.named_parameters() if p.grad is not None}
    if not sizes:
        raise UserError("no parameter has a gradient: call loss.backward() before")
    figure, (axis,) = sheet(1, figsize)
    positions = np.arange(len(sizes))
    axis.bar(positions, [float(grad.max()) for grad in sizes.values()], alpha=0.4, label="largest")
    axis.bar(positions, [float(grad.mean()) for grad in sizes.values()], label="mean")
    axis.set_yscale("log")
    axis.set_xticks(positions, list(sizes), rotation=90, fontsize=6)
    axis.legend()
    return done(figure, save_path)


def visualize_embedding_distribution(features: Any, save_path: Any = None, figsize: Size = (14, 5)) -> Any:
    """Draw how values, lengths and means of features [row, (token,) width] are distributed; return the figure."""
    rows = _rows(features)
    figure, axes = sheet(3, figsize)
    titles = ("values", "lengths of rows", "means of features")
    for axis, title, values in zip(
        axes, titles, (rows.ravel(), np.linalg.norm(rows, axis=1), rows.mean(0)), strict=True
    ):
        axis.hist(values, bins=50)
        axis.set_title(title)
    return done(figure, save_path)


def visualize_feature_space(
    features: Any,
    labels: Any = None,
    method: str = "tsne",
    save_path: Any = None,
    figsize: Size = (12, 10),
    **kwargs: Any,
) -> Any:
    """Draw features [row, (token,) width] in two dimensions, coloured by labels; return the figure.

    method: tsne, pca or umap. kwargs: of scikit-learn's or umap's class. Raises ValueError for another method.
    """
    rows = _rows(features)
    if method == "tsne":
        from sklearn.manifold import TSNE as Reduction

        kwargs = {"perplexity": min(30, max(1, len(rows) - 1) / 3), "random_state": 0} | kwargs
    elif method == "pca":
        from sklearn.decomposition import PCA as Reduction
    elif method == "umap":
        from umap import UMAP as Reduction  # pyright: ignore[reportMissingImports]
    else:
        raise UserError(f"method={method!r} is unknown; known: tsne, pca, umap")
    flat = Reduction(n_components=2, **kwargs).fit_transform(rows)
    figure, (axis,) = sheet(1, figsize)
    points = axis.scatter(*flat.T, c=None if labels is None else array(labels), cmap="tab10", s=12)
    if labels is not None:
        figure.colorbar(points, ax=axis)
    return done(figure, save_path)


def visualize_predictions(
    model: Any,
    image: torch.Tensor,
    mask: Any,
    original_image: Any = None,
    save_path: Any = None,
    figsize: Size = (16, 5),
) -> Any:
    """Draw an image, its masked patches, and the cosine of prediction and target at each; return the figure."""
    outputs, masked = _outputs(model, image, mask)
    cosine = nn.functional.cosine_similarity(outputs["predictions"][0][0], outputs["targets"][0][0], dim=-1)
    grid = np.full(masked.shape, np.nan)
    grid[masked] = array(cosine)[: masked.sum()]
    picture = shown(image if original_image is None else original_image)
    figure, axes = sheet(3, figsize)
    draw(axes[0], picture, "image")
    draw(axes[1], np.where(spread(masked, picture.shape[:2])[..., None], 0.5, picture), "masked")
    figure.colorbar(draw(axes[2], grid, "cosine of prediction and target", vmin=-1, vmax=1), ax=axes[2])
    return done(figure, save_path)


def visualize_hierarchical_predictions(
    model: Any, image: torch.Tensor, mask: Any, save_path: Any = None, figsize: Size = (16, 10)
) -> Any:
    """Draw the cosine of prediction and target for each token of each level; return the figure."""
    outputs, _ = _outputs(model, image, mask)
    figure, axes = sheet(len(outputs["predictions"]), figsize, 1)
    pairs = zip(outputs["predictions"], outputs["targets"], strict=True)
    for level, (axis, (prediction, target)) in enumerate(zip(axes, pairs, strict=True)):
        cosine = array(nn.functional.cosine_similarity(prediction[0], target[0], dim=-1))
        axis.bar(np.arange(len(cosine)), cosine)
        axis.set_ylim(-1, 1)
        axis.set_title(f"level {level}, mean cosine {cosine.mean():.3f}")
    return done(figure, save_path)


def visualize_reconstruction(
    predictions: Any,
    targets: Any,
    mask: Any,
    original_image: Any = None,
    save_path: Any = None,
    figsize: Size = (14, 4),
) -> Any:
    """Draw the distance of prediction and target [(batch,) patch, width] at each masked patch; return the figure.

    Rows are the masked patches in order; of a batch the first image is drawn.
    """
    first = lambda x: array(x)[0] if array(x).ndim == 3 else array(x)
    distance = np.linalg.norm(first(predictions) - first(targets), axis=-1)
    masked = on_grid(mask) > 0
    if len(distance) < masked.sum():
        raise UserError(f"predictions: {len(distance)} rows for {masked.sum()} masked patches")
    grid = np.full(masked.shape, np.nan)
    grid[masked] = distance[: masked.sum()]
    figure, axes = sheet(2, figsize)
    heat(axes[0], original_image, masked.astype(float), "masked")
    figure.colorbar(draw(axes[1], grid, "distance of prediction and target"), ax=axes[1])
    return done(figure, save_path)


@torch.no_grad()
def _outputs(model: Any, image: torch.Tensor, mask: Any) -> tuple[dict[str, Any], np.ndarray]:
    masked = on_grid(mask) > 0
    images = image if image.ndim == 4 else image[None]
    training = model.training
    outputs = model.eval()(images[:1], torch.from_numpy(masked.reshape(1, -1)).to(images.device))
    model.train(training)
    return outputs, masked


def _rows(features: Any) -> np.ndarray:
    values = array(features)
    return values.mean(1) if values.ndim == 3 else values
