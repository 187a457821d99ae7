"""The original's losses against feature collapse: VICReg, SIGReg. `regularizers` has the same formulas in JAX."""

import math

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.systems.hjepa.original.loss_module import (
    arrays_too,
    not_negative,
    of_levels,
    over_levels,
    to_rows,
    two_views,
)


class VICRegLoss(nn.Module):
    """Variance-invariance-covariance regularisation of two views. Source: Bardes et al. 2022.

    Returns loss, invariance_loss, variance_loss, covariance_loss, and the last two of each view (_a, _b). As in the
    original, the covariance term is the mean of the squared off-diagonal covariances, not their sum over the width.
    """

    hierarchy_weights: float | list[float] = 1.0  # level weights, if a trainer passes predictions and targets

    def __init__(
        self,
        invariance_weight: float = 25.0,
        variance_weight: float = 25.0,
        covariance_weight: float = 1.0,
        variance_threshold: float = 1.0,
        eps: float = 1e-4,
        flatten_patches: bool = True,
    ):
        super().__init__()
        not_negative(
            invariance_weight=invariance_weight,
            variance_weight=variance_weight,
            covariance_weight=covariance_weight,
            variance_threshold=variance_threshold,
        )
        self.invariance_weight, self.variance_weight = invariance_weight, variance_weight
        self.covariance_weight, self.variance_threshold = covariance_weight, variance_threshold
        self.eps, self.flatten_patches = eps, flatten_patches

    @arrays_too
    def forward(self, z_a=None, z_b=None, *, predictions=None, targets=None, context_features=None):
        """Return the loss of two views, or of a trainer's predictions and targets.

        z_a, z_b: [batch, (token,) width]; without z_b the halves of z_a's batch are the views. For lists of predictions
        and targets it is the weighted sum over levels. Raises ValueError for an odd single view.
        """
        if predictions is not None:
            weights = of_levels(self.hierarchy_weights, len(predictions), "hierarchy_weights")
            return over_levels(self, weights, predictions, targets)
        a, b = (to_rows(x, self.flatten_patches) for x in two_views(z_a, z_b, type(self).__name__))
        invariance = self._invariance_loss(a, b)
        variances = [self._variance_loss(x) for x in (a, b)]
        covariances = [self._covariance_loss(x) for x in (a, b)]
        variance, covariance = (sum(pair) / 2 for pair in (variances, covariances))
        return {
            "loss": self.invariance_weight * invariance
            + self.variance_weight * variance
            + self.covariance_weight * covariance,
            "invariance_loss": invariance,
            "variance_loss": variance,
            "covariance_loss": covariance,
            "variance_loss_a": variances[0],
            "variance_loss_b": variances[1],
            "covariance_loss_a": covariances[0],
            "covariance_loss_b": covariances[1],
        }

    def _invariance_loss(self, a, b):
        return functional.mse_loss(a, b)

    def _variance_loss(self, x):
        return functional.relu(self.variance_threshold - torch.sqrt(x.var(dim=0) + self.eps)).mean()

    def _covariance_loss(self, x):
        width = x.shape[1]
        centred = x - x.mean(dim=0)
        covariance = centred.T @ centred / max(1, len(x) - 1)
        off_diagonal = covariance * (1 - torch.eye(width, dtype=x.dtype, device=x.device))
        return off_diagonal.square().sum() / max(1, width * (width - 1))

    def extra_repr(self) -> str:
        names = ("invariance_weight", "variance_weight", "covariance_weight", "variance_threshold")
        return ", ".join(f"{name}={_number(getattr(self, name)):g}" for name in names)


def _number(weight: float | torch.Tensor) -> float:
    return weight.item() if isinstance(weight, torch.Tensor) else float(weight)


class AdaptiveVICRegLoss(VICRegLoss):
    """VICReg that may adapt its three weights; `update_weights` gives larger weights to smaller terms.

    adaptive_weights: the weights are parameters. If it is False they are numbers, and `update_weights` does nothing.
    """

    def __init__(
        self,
        invariance_weight: float = 25.0,
        variance_weight: float = 25.0,
        covariance_weight: float = 1.0,
        variance_threshold: float = 1.0,
        eps: float = 1e-4,
        flatten_patches: bool = True,
        adaptive_weights: bool = False,
        weight_momentum: float = 0.99,
    ):
        weights = (invariance_weight, variance_weight, covariance_weight)
        super().__init__(*weights, variance_threshold, eps, flatten_patches)
        self.adaptive_weights, self.weight_momentum = adaptive_weights, weight_momentum
        if adaptive_weights:
            for name in ("invariance_weight", "variance_weight", "covariance_weight"):
                value = torch.tensor(float(self.__dict__.pop(name)))
                setattr(self, name, nn.Parameter(value))

    @torch.no_grad()
    def update_weights(self, loss_dict) -> None:
        """Set weight <- momentum * weight + (1 - momentum) * (1 - term / sum of terms) * (30, 30 or 2)."""
        if not self.adaptive_weights:
            return
        terms = {name: torch.as_tensor(loss_dict[f"{name}_loss"]) for name in ("invariance", "variance", "covariance")}
        total = sum(terms.values()) + 1e-8
        for (name, term), scale in zip(terms.items(), (30.0, 30.0, 2.0), strict=True):
            weight = getattr(self, f"{name}_weight")
            weight.lerp_((scale * (1 - term / total)).to(weight), 1 - self.weight_momentum)


class EppsPulleyTest(nn.Module):
    """Distance from normality of each row [slice, sample] after standardising it: [slice].

    reference_points: kernel distance to quantiles of the normal. char_function: integral of the squared distance of
    characteristic functions. Source: Epps & Pulley 1983.
    """

    METHODS = ("reference_points", "char_function")

    def __init__(
        self,
        num_points: int = 17,
        eps: float = 1e-6,
        test_method: str = "reference_points",
        char_function_t_min: float = 0.2,
        char_function_t_max: float = 4.0,
        char_function_num_quadrature: int = 32,
        char_function_lambda: float = 1.0,
    ):
        super().__init__()
        t_min, t_max, num_quadrature = char_function_t_min, char_function_t_max, char_function_num_quadrature
        if test_method not in self.METHODS:
            raise ValueError(f"test_method={test_method!r} is unknown; known: {', '.join(self.METHODS)}")
        if not t_max > t_min:
            raise ValueError(f"char_function_t_max={t_max} must be larger than char_function_t_min={t_min}")
        self.num_points, self.eps, self.test_method = num_points, eps, test_method
        self.t_min, self.t_max, self.num_quadrature = t_min, t_max, num_quadrature
        self.char_function_lambda = char_function_lambda
        share = torch.linspace(0.01, 0.99, num_points)
        self.register_buffer("reference_points", math.sqrt(2) * torch.erfinv(2 * share - 1))
        self.register_buffer("quadrature_points", torch.linspace(t_min, t_max, num_quadrature))

    def forward(self, x):
        """Return the distance of each row: x [slice, sample] -> [slice]; [sample] -> a scalar."""
        if x.ndim == 1:
            return self(x[None])[0]
        x = (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + self.eps)
        if self.test_method == "reference_points":
            points = self.reference_points.to(x)
            kernel = lambda a, b: torch.exp(-(a[..., :, None] - b[..., None, :]).square() / 2)
            return kernel(x, x).mean((1, 2)) - 2 * kernel(x, points).mean((1, 2)) + kernel(points, points).mean()
        t = self.quadrature_points.to(x)
        angle = x[:, :, None] * t
        real = angle.cos().mean(1) - torch.exp(-t.square() / 2)
        density = (real.square() + angle.sin().mean(1).square()) * torch.exp(
            -t.square() / (2 * self.char_function_lambda**2)
        )
        return torch.trapezoid(density, dx=(self.t_max - self.t_min) / (self.num_quadrature - 1), dim=1)


EppsPulley = EppsPulleyTest


class SIGRegLoss(nn.Module):
    """Invariance of two views and their distance from an isotropic normal, along random directions.

    Returns loss, invariance_loss, sigreg_loss, sigreg_loss_a, sigreg_loss_b. Directions are drawn anew for each view,
    from torch's generator, unless fixed_slices. vectorized=False goes slice by slice: less memory, the same values.
    Source: Balestriero & LeCun 2025 (LeJEPA).
    """

    hierarchy_weights: float | list[float] = 1.0  # level weights, if a trainer passes predictions and targets

    def __init__(
        self,
        num_slices: int = 1024,
        num_test_points: int = 17,
        invariance_weight: float = 25.0,
        sigreg_weight: float = 25.0,
        eps: float = 1e-6,
        flatten_patches: bool = True,
        fixed_slices: bool = False,
        vectorized: bool = True,
        test_method: str = "reference_points",
        char_function_t_min: float = 0.2,
        char_function_t_max: float = 4.0,
        char_function_num_quadrature: int = 32,
        char_function_lambda: float = 1.0,
    ):
        super().__init__()
        not_negative(invariance_weight=invariance_weight, sigreg_weight=sigreg_weight)
        if num_slices < 1 or num_test_points < 1:
            raise ValueError(f"num_slices={num_slices}, num_test_points={num_test_points}: wanted at least 1 of each")
        self.num_slices, self.num_test_points = num_slices, num_test_points
        self.invariance_weight, self.sigreg_weight = invariance_weight, sigreg_weight
        self.eps, self.flatten_patches = eps, flatten_patches
        self.fixed_slices, self.vectorized, self.test_method = fixed_slices, vectorized, test_method
        self.univariate_test = EppsPulleyTest(
            num_test_points,
            eps,
            test_method,
            char_function_t_min,
            char_function_t_max,
            char_function_num_quadrature,
            char_function_lambda,
        )
        self._fixed: torch.Tensor | None = None

    @arrays_too
    def forward(self, z_a=None, z_b=None, *, predictions=None, targets=None, context_features=None):
        """Take the arguments of VICRegLoss."""
        if predictions is not None:
            weights = of_levels(self.hierarchy_weights, len(predictions), "hierarchy_weights")
            return over_levels(self, weights, predictions, targets)
        a, b = (to_rows(x, self.flatten_patches) for x in two_views(z_a, z_b, type(self).__name__))
        first, second = self.statistic(a), self.statistic(b)
        invariance, statistic = functional.mse_loss(a, b), (first + second) / 2
        return {
            "loss": self.invariance_weight * invariance + self.sigreg_weight * statistic,
            "invariance_loss": invariance,
            "sigreg_loss": statistic,
            "sigreg_loss_a": first,
            "sigreg_loss_b": second,
        }

    def statistic(self, x):
        """Return the mean distance from normality of x [row, width] along the directions: a scalar."""
        directions = self.slices(x.shape[1]).to(x)
        columns = directions @ x.T
        if self.vectorized:
            return self.univariate_test(columns).mean()
        return torch.stack([self.univariate_test(row) for row in columns]).mean()

    def slices(self, width: int) -> torch.Tensor:
        """Return random unit directions, float32 [slice, width]; with fixed_slices those of the first call."""
        if self.fixed_slices and self._fixed is not None and self._fixed.shape[1] == width:
            return self._fixed
        drawn = functional.normalize(torch.randn(self.num_slices, width), dim=1)
        if self.fixed_slices:
            self._fixed = drawn
        return drawn

    def extra_repr(self) -> str:
        return (
            f"num_slices={self.num_slices}, num_test_points={self.num_test_points}, "
            f"invariance_weight={self.invariance_weight:g}, sigreg_weight={self.sigreg_weight:g}"
        )


class HybridVICRegSIGRegLoss(nn.Module):
    """vicreg_weight * VICReg + sigreg_weight * SIGReg; sigreg_weight also multiplies the statistic inside SIGReg."""

    def __init__(
        self,
        vicreg_weight: float = 1.0,
        sigreg_weight: float = 1.0,
        invariance_weight: float = 25.0,
        variance_weight: float = 25.0,
        covariance_weight: float = 1.0,
        num_slices: int = 1024,
        num_test_points: int = 17,
        variance_threshold: float = 1.0,
        eps: float = 1e-6,
        flatten_patches: bool = True,
        *,
        fixed_slices: bool = False,
    ):
        super().__init__()
        not_negative(vicreg_weight=vicreg_weight, sigreg_weight=sigreg_weight)
        self.vicreg_weight, self.sigreg_weight = vicreg_weight, sigreg_weight
        self.vicreg_loss = VICRegLoss(
            invariance_weight, variance_weight, covariance_weight, variance_threshold, eps, flatten_patches
        )
        self.sigreg_loss = SIGRegLoss(
            num_slices, num_test_points, invariance_weight, sigreg_weight, eps, flatten_patches, fixed_slices
        )

    def forward(self, z_a, z_b=None):
        """Take the arguments of VICRegLoss; JAX arrays too."""
        first, second = self.vicreg_loss(z_a, z_b), self.sigreg_loss(z_a, z_b)
        return {
            "loss": self.vicreg_weight * first["loss"] + self.sigreg_weight * second["loss"],
            "vicreg_loss": first["loss"],
            "sigreg_loss": second["loss"],
            "invariance_loss": first["invariance_loss"],
            "variance_loss": first["variance_loss"],
            "covariance_loss": first["covariance_loss"],
            "sigreg_regularization": second["sigreg_loss"],
        }
