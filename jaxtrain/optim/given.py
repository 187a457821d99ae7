"""Use the user's own optimizer or schedule object instead of the one that the config section `optim` describes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.config import OptimConfig
from jaxtrain.errors import UserError
from jaxtrain.optim import optimizer as optimizers
from jaxtrain.optim import schedules
from jaxtrain.optim.optimizer import Params
from jaxtrain.optim.torch_optimizer import TorchUpdate
from torch_bridge.lazy_array import to_host
from torch_bridge.state_dict import place

FREE = {"clip_norm", "ema_decay"}  # settings of `optim` that still apply with the user's own optimizer
INTERVALS = ("step", "epoch")


class TorchGiven:
    """A torch.optim optimizer over a module's parameters, with its groups, options and current state.

    names: every name of the module's parameters -> id of the parameter. scheduler: its torch lr_scheduler, or None.
    interval: step the scheduler after every update ("step") or after every epoch ("epoch"). clip_norm: limit of the
    global gradient norm. The interface is that of optim.optimizer.Optimizer.
    """

    def __init__(
        self, optimizer: Any, scheduler: Any, interval: str, names: Mapping[str, int], clip_norm: float | None
    ):
        from torch_bridge import optimizers as bridge

        self.bridge, self.names, self.clip_norm = bridge, names, clip_norm
        self.scheduler, self.by_epoch = scheduler, interval == "epoch"
        first = {number: name for name, number in reversed(list(names.items()))}
        self.updates = TorchUpdate(optimizer, first)
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        self._held = {name for name, number in names.items() if number in held}
        self._stepped = 0
        self._table: tuple[tuple, dict] | None = None

    def describe(self) -> str:
        """Describe the optimizer and its scheduler, for messages."""
        count = len(self.updates.groups)
        words = f"torch.optim.{self.updates.kind}" + (f" with {count} groups" if count > 1 else "")
        every = "epoch" if self.by_epoch else "step"
        return words if self.scheduler is None else f"{words}, {type(self.scheduler).__name__} every {every}"

    def holds(self, key: str) -> bool:
        """Return True if the optimizer holds the parameter; other parameters are not changed."""
        return key in self._held

    def build(self, params: Mapping[str, jax.ShapeDtypeStruct], joined: bool = False) -> "TorchGiven":
        """Map the optimizer's groups to the keys under which the parameters are trained; return self."""
        key_of = {self.names[key]: key for key in params if key in self.names}
        renamed = {name: key_of.get(number, name) for name, number in self.names.items()}
        self.updates.groups = [[renamed[name] for name in group] for group in self.updates.groups]
        self.updates.keys = [key for group in self.updates.groups for key in group if key in params]
        labels = self._labels()
        self.groups = {
            key: label
            for label, group in zip(labels, self.updates.groups, strict=True)
            for key in group
            if key in params
        }
        self._apply = self.updates.compiled(self.updates.keys)
        return self

    def _labels(self) -> list[str]:
        groups = self.updates.optimizer.param_groups
        if len(groups) == 1:
            return ["default"]
        return [str(group.get("name", f"group {number}")) for number, group in enumerate(groups)]

    def init(self, params: Params) -> Any:
        return self.updates.fresh(params)

    def taken_over(self, opt_state: Any) -> Any:
        """Return a fresh state, filled with the state that the torch optimizer already has."""
        saved = self.updates.saved()
        take = lambda key, name, old: place(np.asarray(saved[key][name], old.dtype).reshape(old.shape), old)
        return {
            key: {name: take(key, name, old) if name in saved.get(key, {}) else old for name, old in entry.items()}
            for key, entry in opt_state.items()
        }

    def hyper(self, steps: int, steps_per_epoch: int) -> dict[str, Any]:
        """Return the numbers (lr, weight decay, ...) of every update of a run, for `rates`."""
        key = (steps, steps_per_epoch)
        if self._table is None or self._table[0] != key:
            rows = -(-steps // steps_per_epoch) if self.by_epoch else steps
            page = lambda column: np.pad(column, (0, -len(column) % schedules.PAGE), "edge")
            groups = self.updates.table(self.scheduler, rows)
            padded = [{n: page(c) if len(c) > 1 else c for n, c in group.items()} for group in groups]
            self._table = key, {"groups": padded, "steps_per_epoch": np.int32(steps_per_epoch)}
        return self._table[1]

    def rates(self, hyper: Mapping[str, Any], updates: jax.Array, step: jax.Array) -> tuple:
        """Return, for an update, the learning rates by group, all numbers by group, and the clipping norm. Traced."""
        index = step // hyper["steps_per_epoch"] if self.by_epoch else updates
        row = lambda column: column[jnp.minimum(index, column.size - 1)]
        numbers = jax.tree.map(row, hyper["groups"])
        lr = {label: group["lr"] for label, group in zip(self._labels(), numbers, strict=True)}
        return lr, numbers, hyper.get("clip_norm")

    def norm(self, grads: Params) -> jax.Array:
        return optimizers.global_norm(grads)

    def update(
        self, grads: Params, opt_state: Any, params: Params, lr: Any, numbers: Any, clip_norm: Any = None, *,
        norm: Any = None, accept: Any = True, loss: Any = None, idle: Any = frozenset(),
    ):  # fmt: skip
        """Return new parameters, state and gradient norm, as Optimizer.update. Source: torch.optim; see torch_rules."""
        norm = self.norm(grads) if norm is None else norm
        if self.clip_norm is not None:
            grads = optimizers.clip(grads, norm, self.clip_norm if clip_norm is None else clip_norm)
        moved, after = self._apply(grads, opt_state, params, numbers)
        keep = lambda new, old: jnp.where(accept, new, old)
        return {key: keep(moved[key], params[key]) for key in params}, jax.tree.map(keep, after, opt_state), norm

    def write_back(self, opt_state: Any, updates: int, step: int, steps_per_epoch: int) -> None:
        """Write the state into torch's optimizer, and step its scheduler to the run's current position."""
        host = jax.tree.map(to_host, opt_state)
        self.updates.write({key: entry for key, entry in host.items() if entry["step"] > 0})
        due = step // steps_per_epoch if self.by_epoch else updates
        if self.scheduler is not None:
            self.bridge.step_scheduler(self.updates.optimizer, self.scheduler, due - self._stepped)
            self._stepped = due

    def options(self) -> Any:
        """Return what identifies this optimizer: its rule, options, keys and scheduler, without tensors."""
        groups = [dict(zip(("options", "keys"), pair, strict=True)) for pair in
                  zip(self.bridge.options_of(self.updates.optimizer), self.updates.groups, strict=True)]  # fmt: skip
        known = None if self.scheduler is None else self.scheduler.state_dict()
        return {"rule": self.updates.kind, "groups": groups, "scheduler": [type(self.scheduler).__name__, known]}


class OptaxGiven:
    """An optax GradientTransformation that includes its learning rate; the interface is that of
    optim.optimizer.Optimizer.

    It gets the parameters as one dict by torch names, complex ones as pairs of real numbers, and gradients in float32.
    It may take `params`, `value` (the loss) and `grad`.
    """

    def __init__(self, transform: Any, clip_norm: float | None):
        self.transform, self.clip_norm = optax.with_extra_args_support(transform), clip_norm
        self.groups: dict[str, str] = {}

    def describe(self) -> str:
        """Describe the optimizer, for messages."""
        return "an optax transformation"

    def holds(self, key: str) -> bool:
        return True

    def build(self, params: Mapping[str, jax.ShapeDtypeStruct], joined: bool = False) -> "OptaxGiven":
        """Trace an update on shapes only; return self. Raises UserError if the transformation cannot be called."""
        self.groups = dict.fromkeys(params, "default")

        def once(params: Params) -> Any:
            return self.update(params, self.init(params), params, {}, None, loss=jnp.float32(0))[0]

        try:
            jax.eval_shape(once, dict(params))
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                "optimizer: the optax transformation cannot be called as update(gradients, state, params, value=loss, "
                f"grad=gradients): {type(error).__name__}: {error}"
            ) from error
        return self

    def init(self, params: Params) -> Any:
        return self.transform.init(optimizers.as_real(params))

    def taken_over(self, opt_state: Any) -> Any:
        return opt_state

    def hyper(self, steps: int, steps_per_epoch: int) -> dict[str, Any]:
        return {}

    def rates(self, hyper: Mapping[str, Any], updates: jax.Array, step: jax.Array) -> tuple:
        return {}, None, hyper.get("clip_norm")

    def norm(self, grads: Params) -> jax.Array:
        return optimizers.global_norm(grads)

    def update(
        self, grads: Params, opt_state: Any, params: Params, lr: Any, numbers: Any, clip_norm: Any = None, *,
        norm: Any = None, accept: Any = True, loss: Any = None, idle: Any = frozenset(),
    ):  # fmt: skip
        """Return new parameters, state and gradient norm, as Optimizer.update."""
        norm = self.norm(grads) if norm is None else norm
        if self.clip_norm is not None:
            grads = optimizers.clip(grads, norm, self.clip_norm if clip_norm is None else clip_norm)
        kinds = {key: value.dtype for key, value in params.items()}
        wide = {key: value.astype(jnp.float32) for key, value in optimizers.as_real(grads).items()}
        params = optimizers.as_real(params)
        found: Any = self.transform.update(wide, opt_state, params, value=loss, grad=wide)
        updates, moved = found
        keep = lambda new, old: jnp.where(accept, new, old).astype(jnp.asarray(old).dtype)
        add = lambda old, update: keep(old.astype(jnp.float32) + update.astype(jnp.float32), old)
        params = {key: add(old, updates[key]) for key, old in params.items()}
        return optimizers.as_before(params, kinds), jax.tree.map(keep, moved, opt_state), norm

    def write_back(self, opt_state: Any, updates: int, step: int, steps_per_epoch: int) -> None:
        """Do nothing: an optax transformation holds no state of its own."""

    def options(self) -> Any:
        """Return what identifies this optimizer: its functions."""
        return {"init": self.transform.init, "update": self.transform.update}


Given = TorchGiven | OptaxGiven


def take(
    optimizer: Any, scheduler: Any, interval: str, config: OptimConfig, names: Callable[[], Mapping[str, int] | None]
) -> tuple[Given | None, Callable[[int], float] | None]:
    """Return the user's own optimizer, and a schedule of factors on optim.lr; None for each that the config decides.

    names: returns the names of a torch module's parameters, None for another kind of model. Raises UserError for
    objects without a counterpart, and for settings that conflict with the objects.
    """
    if interval not in INTERVALS:
        raise UserError(f"scheduler_interval: {interval!r}, wanted step or epoch")
    if optimizer is None and scheduler is None:
        return None, None
    if optimizer is None:
        return None, _factors(scheduler, config)
    if not hasattr(optimizer, "param_groups") and not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        kind = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        named = f"; by name it is a setting: optim={{'name': {optimizer!r}}}" if isinstance(optimizer, str) else ""
        raise UserError(
            f"optimizer: {kind}, wanted a torch.optim optimizer, as torch.optim.AdamW(model.parameters(), lr=1e-3) "
            f"(several: in your own loop, jaxtrain.compile) or an optax GradientTransformation{named}"
        )
    unused = sorted(config.model_fields_set - FREE)
    if unused:
        raise UserError(
            f"optim.{unused[0]} is set, but the optimizer that was given decides it; leave {', '.join(unused)} out of "
            f"`optim`. {' and '.join(sorted(FREE))} still hold"
        )
    clip_norm = config.clip_norm if "clip_norm" in config.model_fields_set else None  # torch does not clip by default
    if hasattr(optimizer, "param_groups"):
        known = names()
        if known is None:
            raise UserError("optimizer: a torch optimizer holds a torch module's parameters; give an optax one here")
        _check_scheduler(scheduler, optimizer)
        return TorchGiven(optimizer, scheduler, interval, known, clip_norm), None
    if scheduler is not None:
        raise UserError("scheduler: an optax optimizer holds its own schedule, as optax.adam(schedule); leave it out")
    return OptaxGiven(optimizer, clip_norm), None


def _check_scheduler(scheduler: Any, optimizer: Any) -> None:
    from torch_bridge.optimizers import check_scheduler

    if type(scheduler).__name__ == "ReduceLROnPlateau":
        raise UserError(
            "scheduler: ReduceLROnPlateau follows a metric, and has no table of rates; leave optimizer and scheduler "
            "out and take optim.schedule.name=plateau, torch's rule"
        )
    check_scheduler(scheduler, [optimizer])


def _factors(scheduler: Any, config: OptimConfig) -> Callable[[int], float]:
    """Convert an optax schedule (update -> learning rate) to factors on optim.lr."""
    if not callable(scheduler) or hasattr(scheduler, "optimizer"):
        raise UserError(
            f"scheduler: {type(scheduler).__name__}; a torch lr_scheduler comes with optimizer=, its optimizer, and "
            "without one an optax schedule is wanted: a function update -> learning rate"
        )
    if "schedule" in config.model_fields_set:
        raise UserError("optim.schedule is set, but the schedule that was given decides it; leave one out")
    if config.lr == 0:
        raise UserError("optim.lr: 0, and a schedule that was given is kept as factors on it; leave optim.lr out")
    rate: Callable[[int], Any] = scheduler
    return lambda update: float(rate(update)) / config.lr
