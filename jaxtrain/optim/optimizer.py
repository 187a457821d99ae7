"""Optimizers with torch's rules: gradients -> new parameters, over a flat dict of parameters.

Clipping, weight decay and learning rate are implemented here because torch's rules differ from optax's: epsilon 1e-6 in
the clip, decay 1e-2 by default, L2 inside adam and sgd. Learning rates and decays are arrays, by parameter group, so
that a search over them shares one compiled step.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtrain.config import OPTIMIZERS, OptimConfig
from jaxtrain.errors import UserError, one_line
from jaxtrain.optim import transforms
from jaxtrain.optim.groups import DEPTH, rates

__all__ = ["Optimizer", "build", "clip", "direction", "global_norm", "rates"]

Params = dict[str, jax.Array]
COUPLED = ("adam", "sgd")  # these add weight decay to the gradient, as torch does; the others decay the parameter
SMALL = 1 << 16  # an array of at most so many elements is summed faster than a kernel is launched


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A pure optimizer.

    groups: parameter key -> name of its group. decays: key -> True if weight decay applies. decoupled: weight decay
    applies to the parameter, not to the gradient. joined: concatenate small arrays before computing the norm, which
    saves a GPU one kernel for each. apart: parameters that start training later have their own update count.
    """

    direction: transforms.Direction
    groups: Mapping[str, str]
    decays: Mapping[str, bool]
    decoupled: bool
    clip_norm: float | None
    joined: bool = False
    apart: bool = False

    def init(self, params: Params):
        return self.direction.init(as_real(params))

    def update(
        self, grads: Params, opt_state, params: Params, lr: Params, weight_decay: Params, clip_norm=None, *,
        norm=None, accept=True, loss=None, idle=frozenset(),
    ):  # fmt: skip
        """Return the new parameters, the new optimizer state and the gradients' global norm before clipping.

        lr, weight_decay: float scalars by group name. clip_norm: replaces the optimizer's own, if it has one. norm: if
        the caller knows it already. loss: unused here. idle: keys without gradients. accept: a bool scalar; if false,
        parameters and state do not change. Source: torch.optim; torch.nn.utils.clip_grad_norm_.
        """
        norm = self.norm(grads) if norm is None else norm
        kinds = {key: param.dtype for key, param in params.items()}
        grads, params = as_real(grads), as_real(params)
        if self.clip_norm is not None:
            grads = clip(grads, norm, self.clip_norm if clip_norm is None else clip_norm)
        if not self.decoupled:
            grads = {key: self._with_l2(key, grad, params[key], weight_decay) for key, grad in grads.items()}
        resting = {"idle": idle} if self.apart else {}
        updates, opt_state = self.direction.update(grads, opt_state, params, accept=accept, **resting)
        params = {key: self._step(key, param, updates[key], lr, weight_decay, accept) for key, param in params.items()}
        return as_before(params, kinds), opt_state, norm

    def rates(self, hyper: Mapping[str, Any], updates: jax.Array, step: jax.Array) -> tuple:
        """Return the learning rates and weight decays by group, and the clipping norm, for an update. Traced."""
        factor = hyper["factor"][jnp.minimum(updates, hyper["factor"].size - 1)] * hyper["lr_scale"]
        lr = {group: peak * factor for group, peak in hyper["lr"].items()}
        return lr, hyper["weight_decay"], hyper.get("clip_norm")

    def norm(self, grads: Params) -> jax.Array:
        """Return the gradients' global norm."""
        return global_norm(_joined(grads) if self.joined else grads)

    def _with_l2(self, key: str, grad, param, weight_decay: Params):
        if not self.decays[key]:
            return grad
        return grad.astype(jnp.float32) + weight_decay[self.groups[key]] * param.astype(jnp.float32)

    def _step(self, key: str, param, update, lr: Params, weight_decay: Params, accept):
        group = self.groups[key]
        decay = weight_decay[group] if self.decoupled and self.decays[key] else None
        return _moved(param, update, lr[group], decay, accept)


@jax.jit  # traced and lowered once for all arrays of a shape
def _moved(param, update, rate, decay, accept):
    """Return the moved parameter. decay: decoupled weight decay, or None."""
    new = param.astype(jnp.float32)
    if decay is not None:
        new = new * (1 - rate * decay)
    return jnp.where(accept, (new - rate * update.astype(jnp.float32)).astype(param.dtype), param)


def as_real(arrays: Params) -> Params:
    """Convert complex arrays to real ones of shape [..., 2], as torch's optimizers do."""
    pair = lambda value: jnp.stack([value.real, value.imag], axis=-1)
    return {key: pair(value) if jnp.iscomplexobj(value) else value for key, value in arrays.items()}


def as_before(arrays: Params, kinds: Mapping[str, jnp.dtype]) -> Params:
    """Undo `as_real`. kinds: the original dtypes by key."""
    whole = lambda value: jax.lax.complex(value[..., 0], value[..., 1])
    return {
        key: whole(value) if jnp.issubdtype(kinds[key], jnp.complexfloating) else value for key, value in arrays.items()
    }


def _joined(grads: Params) -> Params:
    """Concatenate all small arrays to one float32 vector; large ones stay."""
    real = as_real(grads)
    small = [value.astype(jnp.float32).reshape(-1) for value in real.values() if value.size <= SMALL]
    large = {key: value for key, value in real.items() if value.size > SMALL}
    return large | ({"small": jnp.concatenate(small)} if small else {})


def global_norm(grads: Params) -> jax.Array:
    """Return the L2 norm over all gradients together, computed in float32."""
    values = as_real(grads).values()
    return jnp.sqrt(sum((jnp.sum(jnp.square(g.astype(jnp.float32))) for g in values), jnp.float32(0)))


def clip(grads: Params, norm, max_norm) -> Params:
    """Scale gradients by min(1, max_norm / (norm + 1e-6)), torch's rule."""
    factor = jnp.minimum(1.0, max_norm / (norm + 1e-6))
    return {key: grad * factor.astype(grad.dtype) for key, grad in grads.items()}


def build(
    config: OptimConfig,
    params: Mapping[str, jax.ShapeDtypeStruct],
    group: Mapping[str, str] | Callable[[str], str],
    joined: bool = False,
) -> Optimizer:
    """Build the optimizer of a config for these parameters (shapes suffice). group: the group of every parameter.
    joined: see Optimizer.
    """
    groups = {key: group[key] if isinstance(group, Mapping) else group(key) for key in params}
    decays = {key: config.decay_bias_and_norm or value.ndim > 1 for key, value in params.items()}
    late: dict[str, dict[str, None]] = {}
    for key, label in groups.items():
        until = getattr(config.groups.get(label.partition(DEPTH)[0]), "freeze_until_epoch", None)
        late.setdefault(f"from epoch {until}" if until else "always", {})[key] = None
    moves = direction(config)
    parts = {name: tuple(keys) for name, keys in late.items()} if len(late) > 1 or "always" not in late else {}
    moves = transforms.apart(moves, parts) if parts else moves
    decoupled = config.name not in COUPLED
    return Optimizer(moves, groups, decays, decoupled, config.clip_norm, joined, bool(parts))


def direction(config: OptimConfig) -> transforms.Direction:
    """Return the gradient transformation that `optim.name` selects.

    Raises UserError if the user's own function cannot be imported, fails, or returns something else.
    """
    b1, b2, eps = config.beta1, config.beta2, config.eps
    known = {
        "adamw": lambda: transforms.adam(b1, b2, eps),
        "adam": lambda: transforms.adam(b1, b2, eps),
        "sgd": lambda: transforms.momentum(config.momentum, config.nesterov),
        "lion": lambda: transforms.lion(b1, b2),
        "muon": lambda: transforms.muon(config.momentum or 0.95, b1, b2, eps),
        "adafactor": lambda: transforms.adafactor(),
    }
    return known[config.name]() if config.name in known else _imported(config)


def _imported(config: OptimConfig) -> transforms.Direction:
    """Call the function at the import path `optim.name` with the config."""
    module, _, name = config.name.rpartition(".")
    if module.startswith("torch.optim"):
        known = f"write optim.name: {name.lower()}, or " if name.lower() in OPTIMIZERS else ""
        raise UserError(f"optim.name: {config.name} is torch's; {known}give the optimizer to Trainer(optimizer=...)")
    wanted = "wanted a function of the config that returns an optax direction, as optax.scale_by_adam gives it"
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"optim.name: {config.name} cannot be imported: {error}") from error
    try:
        made = function(config)
    except Exception as error:  # whatever the function raises
        why = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"optim.name: {config.name} failed, called with the config: {why}; {wanted}") from error
    if not isinstance(made, optax.GradientTransformation):
        raise UserError(
            f"optim.name: {config.name} returned {type(made).__name__}, wanted an optax.GradientTransformation"
        )
    try:
        with jax.ensure_compile_time_eval():
            one = {"probe": jnp.ones(1, jnp.float32)}
            updates: Any = made.update(one, made.init(one), one)[0]
            moved = float(updates["probe"][0])
    except Exception as error:  # as with optax.adam, which takes the config as its learning rate
        why = f"{type(error).__name__}: {one_line(error)}"
        raise UserError(f"optim.name: {config.name} makes no update: {why}; {wanted}") from error
    if moved < 0:  # optax's learning rate includes a minus sign
        raise UserError(
            f"optim.name: {config.name} returned an optimizer with its learning rate in it; wanted the direction "
            "alone, as optax.scale_by_adam gives it: optim.lr and optim.schedule multiply it"
        )
    return transforms.of_optax(made)
