"""Apply a torch.optim optimizer, or an optax transformation, to a flat dict of parameters."""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtrain.errors import NoCounterpart, UserError
from jaxtrain.optim import torch_rules

Arrays = dict[str, jax.Array]
Apply = Callable[[Arrays, Any, Arrays, Any], tuple[Arrays, Any]]


class Updates(Protocol):
    """Interface of an optimizer whose update runs inside a compiled step.

    keys: the parameters that the optimizer holds.
    """

    keys: list[str]

    @property
    def ahead(self) -> bool:
        """Return True if the state on the device is newer than that of the user's object."""
        ...

    def trained(self) -> tuple[str, ...]:
        """Return the optimizer's parameters that require a gradient now."""
        ...

    def state(self, params: Arrays) -> Any:
        """Return the optimizer's current state, as arrays."""

    def switches(self) -> Any:
        """Return the options that decide what is compiled, as a hashable value."""

    def numbers(self) -> Any:
        """Return the options that enter the step as arrays; they are read at every step."""

    def compiled(self, keys: Sequence[str]) -> Apply:
        """Return a function (gradients, state, parameters, numbers) -> (parameters, state) that updates these keys.
        Traced."""
        ...

    def after(self, keys: Iterable[str]) -> None:
        """Note that an update of these keys has been dispatched."""

    def regrouped(self) -> bool:
        """Return True if the user's object holds other parameters than before, or has another step()."""
        ...

    def edited(self) -> bool:
        """Return True if the state of the user's object has changed since it was last read or written; after
        `write_back`, `state` reads it."""
        ...

    def create(self, state: Any) -> None:
        """Create the entries of the user's object that its first update makes, without their values, which
        `write_back` writes."""

    def write_back(self, state: Any) -> None:
        """Write the state into the user's object, if there is one and its state is older."""


class TorchUpdate:
    """The update of a torch.optim optimizer, with its groups, options and current state.

    names: id of a torch parameter -> its name. Raises NoCounterpart for an optimizer without a rule, and UserError for
    parameters that are not the module's.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str]):
        from torch_bridge import optimizers, torch_edits

        self.bridge, self.optimizer = optimizers, optimizer
        self.ahead = False
        self._updated: set[str] = set()
        self._moments: list[set[str]] = []  # of each group, when the state was last read
        self.kind = optimizers.rule_name(optimizer)
        self.held = [list(group["params"]) for group in optimizer.param_groups]
        self._edits = torch_edits.OptimizerEdits(optimizer)
        if self.kind not in torch_rules.RULES:
            raise NoCounterpart(
                f"optimizer: {self.kind} has no counterpart; there are {', '.join(torch_rules.RULES)} and every optax "
                "GradientTransformation; in your own loop around jaxtrain.compile torch steps it"
            )
        self.rule = torch_rules.RULES[self.kind]
        self.groups = optimizers.parameter_names(optimizer, names)
        self.keys = [key for group in self.groups for key in group]
        if not optimizers.is_torchs(optimizer):
            self._compare()

    def trained(self) -> tuple[str, ...]:
        return self.bridge.requiring_grad(self.optimizer, self.groups)

    def state(self, params: Arrays) -> dict[str, torch_rules.State]:
        fresh, saved = self.fresh(params), self.saved()
        for key, entries in fresh.items():
            for name, value in saved.get(key, {}).items():
                if name in entries:  # not one of a momentum that is off now: torch keeps it, unread
                    entries[name] = jnp.array(value, entries[name].dtype).reshape(entries[name].shape)
        self._moments = self._moments_now()
        self._edits.note()
        self._updated, self.ahead = set(), False
        return fresh

    def fresh(self, params: Arrays) -> dict[str, torch_rules.State]:
        """Return the state of these parameters before their first update."""
        groups = zip(self.bridge.options_of(self.optimizer), self.groups, strict=True)
        return {
            key: torch_rules.init(self.rule, params[key], options)
            for options, keys in groups
            for key in keys
            if key in params
        }

    def saved(self) -> dict[str, dict[str, np.ndarray]]:
        """Return the optimizer's current state for parameters that have one. Raises UserError for unknown entries."""
        saved = self.bridge.state_of(self.optimizer, self.groups)
        for options, keys in zip(self.bridge.options_of(self.optimizer), self.groups, strict=True):
            known = {"step", *self.rule.moments({**options, **torch_rules.ALL_MOMENTS}), *self.rule.scalars(options)}
            for key in keys:
                unknown = sorted(set(saved.get(key, {})) - known)
                if unknown:
                    raise UserError(
                        f"optimizer: {self.kind} keeps {', '.join(unknown)} of {key}, which is unknown here"
                    )
                if saved.get(key) and not self.rule.counts:  # no count in torch, but a buffer means an update
                    saved[key]["step"] = np.float32(1)
        return saved

    def _moments_now(self) -> list[set[str]]:
        return [set(self.rule.moments(group)) for group in self.optimizer.param_groups]

    def switches(self) -> tuple:
        return self._switches(self.optimizer.param_groups)

    def _switches(self, groups: Sequence[Mapping[str, Any]]) -> tuple:
        return tuple(torch_rules.switches_of(self.rule, group) for group in groups)

    def numbers(self) -> list[dict[str, np.ndarray]]:
        found = []
        for group in self.optimizer.param_groups:
            numbers = torch_rules.numbers_of(self.rule, group)
            found.append({name: np.float32(value) for name, value in numbers.items()})
        return found

    def table(self, scheduler: Any, rows: int) -> list[dict[str, np.ndarray]]:
        """Return the numbers of each group for `rows` updates: float32 [rows], or [1] if a number is constant.

        Row i holds the numbers after i calls of `scheduler.step()`, made on copies. Raises UserError for a scheduler
        that ends earlier, or that switches an option on or off.
        """
        columns: list[dict[str, list[float]]] = [{} for _ in self.groups]
        for row, groups in enumerate(self.bridge.options_ahead(self.optimizer, scheduler, rows)):
            if self._switches(groups) != self.switches():
                raise UserError(
                    f"scheduler: {type(scheduler).__name__} switches an option of {self.kind} on or off at its step "
                    f"{row} (a weight_decay or momentum that begins or ends at 0); give it a small number instead of 0"
                )
            for column, group in zip(columns, groups, strict=True):
                for name, value in torch_rules.numbers_of(self.rule, group).items():
                    column.setdefault(name, []).append(value)
        compact = lambda values: np.asarray(values[:1] if len(set(values)) == 1 else values, np.float32)
        return [{name: compact(values) for name, values in column.items()} for column in columns]

    def compiled(self, keys: Sequence[str]) -> Apply:
        wanted, switches = set(keys), self.switches()

        def update(grads: Arrays, state: Any, params: Arrays, numbers: Any) -> tuple[Arrays, Any]:
            new, after = {}, dict(state)
            for group, on, n in zip(self.groups, switches, numbers, strict=True):
                for key in group:
                    if key in wanted:
                        new[key], after[key] = torch_rules.apply(self.rule, grads[key], params[key], state[key], n, on)
            return new, after

        return update

    def after(self, keys: Iterable[str]) -> None:
        self.optimizer._opt_called = True  # else torch's schedulers warn that step() was not called
        self._updated = {*keys, *self._updated}
        self.ahead = True

    def regrouped(self) -> bool:
        groups = self.optimizer.param_groups
        if self.bridge.own_step(self.optimizer) or len(groups) != len(self.held):
            return True
        return any(
            len(group["params"]) != len(held) or any(map(operator.is_not, group["params"], held))
            for group, held in zip(groups, self.held, strict=True)
        )

    def edited(self) -> bool:
        return self._moments != self._moments_now() or self._edits.changed(values=not self.ahead)

    def create(self, state: Mapping[str, torch_rules.State]) -> None:
        self.bridge.create_state(self.optimizer, self.held, self.groups, self._entries(state, self._updated))
        self._edits.note()

    def write_back(self, state: Mapping[str, torch_rules.State]) -> None:
        if not self.ahead:
            return
        newest = {key: state[key] for key in self._updated}
        self.ahead = False
        if self._edits.changed(values=False):  # keep the user's edits, which `edited` reports
            self.write(newest, place=self._edits.place)
        else:
            self.write(newest)
            self._edits.note()

    def write(self, state: Mapping[str, Mapping[str, Any]], **options: Any) -> None:
        """Write the state of updated parameters into torch's object. options: passed to `write_state`."""
        self.bridge.write_state(self.optimizer, self.held, self.groups, self._entries(state, state), **options)

    def _entries(self, state: Mapping[str, Mapping[str, Any]], keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Return the state of these keys with the names that torch's object has."""
        return {key: {n: v for n, v in state[key].items() if n != "step" or self.rule.counts} for key in keys}

    def _compare(self) -> None:
        """Compare an optimizer class from outside torch with the rule of its name, on a small example.

        Raises NoCounterpart if they differ, and for a Muon of another package: it has no single rule.
        """
        if self.kind == "Muon":
            raise NoCounterpart("optimizer: this Muon is not torch.optim.Muon, the one with a counterpart here")
        group, grads, values = self.bridge.probe(self.optimizer)
        param = jnp.asarray(values[0])
        state = torch_rules.init(self.rule, param, group)
        numbers = {name: jnp.float32(value) for name, value in torch_rules.numbers_of(self.rule, group).items()}
        switches = torch_rules.switches_of(self.rule, group)
        for grad, value in zip(grads, values[1:], strict=True):
            param, state = torch_rules.apply(self.rule, jnp.asarray(grad), param, state, numbers, switches)
            error = float(np.abs(np.asarray(param) - value).max())
            if not error < 1e-5:
                raise NoCounterpart(
                    f"optimizer: {type(self.optimizer).__name__} does not follow the rule of that name (it differs by "
                    f"{error:.2g} on a small example); give an optax GradientTransformation that does what it does"
                )


class _WithoutObject:
    """Base of Updates whose state exists in one place only, so that nothing must be followed or written back."""

    ahead = False

    def switches(self) -> tuple:
        return ()

    def numbers(self) -> None:
        return None

    def after(self, keys: Iterable[str]) -> None:
        pass

    def regrouped(self) -> bool:
        return False

    def edited(self) -> bool:
        return False

    def create(self, state: Any) -> None:
        pass

    def write_back(self, state: Any) -> None:
        pass


class UpdateInTorch(_WithoutObject):
    """The update of a torch optimizer without a rule here, by its own `step()` in torch.

    names: id of a torch parameter -> its name. reason: why it is not compiled. Raises UserError for parameters that are
    not the module's.
    """

    def __init__(self, optimizer: Any, names: Mapping[int, str], reason: str):
        from torch_bridge import optimizers

        self.bridge, self.optimizer, self.reason = optimizers, optimizer, reason
        self.groups = optimizers.parameter_names(optimizer, names)
        self.keys = [key for group in self.groups for key in group]

    def trained(self) -> tuple[str, ...]:
        return self.bridge.requiring_grad(self.optimizer, self.groups)

    def state(self, params: Arrays) -> dict[str, Any]:
        return {}

    def compiled(self, keys: Sequence[str]) -> Apply:
        raise UserError(self.reason)


class OptaxUpdate(_WithoutObject):
    """The update of any optax GradientTransformation, over all parameters that require a gradient."""

    def __init__(self, transform: Any, trainable: Callable[[], tuple[str, ...]]):
        self.transform = optax.with_extra_args_support(transform)
        self._trainable = trainable
        self.keys = list(trainable())

    def trained(self) -> tuple[str, ...]:
        now = self._trainable()
        if set(now) != set(self.keys):
            raise UserError(
                "an optax optimizer's parameters are fixed when the step is compiled; requires_grad changed for "
                f"{sorted(set(now) ^ set(self.keys))[0]}: compile the step anew"
            )
        return now

    def state(self, params: Arrays) -> Any:
        # optax.lbfgs holds the parameters themselves and the same zeros twice: a step donates each buffer once
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), self.transform.init(params))

    def compiled(self, keys: Sequence[str]) -> Apply:
        def update(grads: Arrays, state: Any, params: Arrays, numbers: Any) -> tuple[Arrays, Any]:
            updates, state = self.transform.update(grads, state, params)
            changed: Any = optax.apply_updates(params, updates)
            return changed, state

        return update
