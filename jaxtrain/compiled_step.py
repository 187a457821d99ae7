"""A training loop of the user's own around one compiled step: `jaxtrain.compile` and `jaxtrain.compile_many`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.config import ShardConfig
from jaxtrain.errors import UserError
from jaxtrain.optim.optimizer import clip, global_norm
from jaxtrain.optim.torch_optimizer import OptaxUpdate, TorchUpdate, Updates
from jaxtrain.runtime import compile_cache
from jaxtrain.runtime.mesh import Layout, make_layout
from jaxtrain.runtime.precision import POLICIES
from jaxtrain.runtime.prng import Rngs

Arrays = dict[str, jax.Array]


def compile(
    module: Any,
    loss_fn: Callable,
    optimizer: Any,
    scheduler: Any = None,
    *,
    accumulate: int = 1,
    precision: str = "fp32",
    clip_norm: float | None = None,
    shard: str = "ddp",
    devices: Sequence[Any] | None = None,
    seed: int | None = None,
) -> "CompiledStep":
    """Compile forward, backward, clipping and update of a torch module into one XLA program, for a loop of your own.

    module: a torch.nn.Module. loss_fn: (module, batch) -> a scalar tensor, or (scalar, dict of scalars to log).
    optimizer: a torch.optim optimizer over the module's parameters, or an optax GradientTransformation. scheduler: a
    torch lr_scheduler, stepped after every update; one that you step yourself is obeyed too, because the rates are read
    from `optimizer.param_groups` at every call. accumulate: calls per update; their gradients are averaged. precision:
    fp32, or bf16 for the forward and backward pass. clip_norm: largest global gradient norm, torch's
    clip_grad_norm_. shard: how the devices share the work, as shard.strategy. seed: of dropout; torch's if left out.

        step = jaxtrain.compile(module, loss_fn, optimizer)
        for batch in loader:
            loss = step(batch)          # on the device; float(loss) fetches it
        step.sync()                     # weights and optimizer state back in the torch objects

    Raises UserError for what cannot be converted, before anything is trained.
    """
    updates = {"loss": (loss_fn, optimizer, scheduler)}
    many = compile_many(
        {"module": module},
        updates,
        accumulate=accumulate,
        precision=precision,
        clip_norm=clip_norm,
        shard=shard,
        devices=devices,
        seed=seed,
    )
    return many["loss"]


def compile_many(
    modules: Mapping[str, Any],
    updates: Mapping[str, tuple],
    *,
    accumulate: int = 1,
    precision: str = "fp32",
    clip_norm: float | None = None,
    shard: str = "ddp",
    devices: Sequence[Any] | None = None,
    seed: int | None = None,
) -> "CompiledSteps":
    """Compile several updates over shared modules: GAN, actor and critic, teacher and student.

    modules: torch modules by name. updates: by name (loss_fn, optimizer) or (loss_fn, optimizer, scheduler); loss_fn
    takes the modules in order, then the batch, and only the parameters of its optimizer move.

        steps = jaxtrain.compile_many({"g": g, "d": d}, {"d": (d_loss, d_opt), "g": (g_loss, g_opt)})
        losses = steps(batch)                  # all updates in order, a program each: {"d": ..., "g": ...}
        d_loss = steps["d"](batch)             # or one at a time, as you write them

    Options as in `compile`. Raises UserError for what cannot be converted, before anything is trained.
    """
    if precision not in POLICIES or POLICIES[precision].scaled:
        raise UserError(f"precision: {precision!r} is not offered for a compiled step; take fp32 or bf16")
    if accumulate < 1:
        raise UserError(f"accumulate: {accumulate}, wanted at least 1")
    compile_cache.enable()
    layout = make_layout(ShardConfig(strategy=shard), None, None if devices is None else list(devices))
    if layout.per_device or layout.gathers:
        raise UserError(f"shard: {shard!r} is not offered for a compiled step; take ddp, or a Trainer")
    weights = SharedWeights(modules, layout, seed)
    steps = {}
    for index, (name, given) in enumerate(updates.items()):
        loss_fn, optimizer, scheduler = (*given, None)[:3]
        steps[name] = CompiledStep(
            index, weights, loss_fn, optimizer, scheduler, accumulate, POLICIES[precision], clip_norm
        )
    return CompiledSteps(steps)


class LazyScalar:
    """A scalar on the device. Reading it (`float(loss)`, `loss.item()`, f"{loss:.3f}") waits for the step; keeping it
    or adding it to others does not."""

    __slots__ = ("array",)

    def __init__(self, array: Any):
        self.array = array

    def item(self) -> float:
        return float(self)

    def __float__(self) -> float:
        return float(np.asarray(self.array))

    def __bool__(self) -> bool:
        return bool(float(self))

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"LazyScalar({float(self):.6g})"

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)

    def detach(self) -> "LazyScalar":
        return self

    cpu = detach

    def _with(self, other: Any, operate: Callable) -> "LazyScalar":
        return LazyScalar(operate(self.array, other.array if isinstance(other, LazyScalar) else other))

    def __add__(self, other):
        return self._with(other, lambda a, b: a + b)

    __radd__ = __add__

    def __sub__(self, other):
        return self._with(other, lambda a, b: a - b)

    def __rsub__(self, other):
        return self._with(other, lambda a, b: b - a)

    def __mul__(self, other):
        return self._with(other, lambda a, b: a * b)

    __rmul__ = __mul__

    def __truediv__(self, other):
        return self._with(other, lambda a, b: a / b)

    def __lt__(self, other):
        return float(self) < float(other)

    def __gt__(self, other):
        return float(self) > float(other)

    def __le__(self, other):
        return float(self) <= float(other)

    def __ge__(self, other):
        return float(self) >= float(other)


class SharedWeights:
    """Parameters and buffers of the modules on the devices, shared by all updates.

    torch's tensors hold the values of the last `sync`; a tensor that torch changes after it is read again.
    """

    def __init__(self, modules: Mapping[str, Any], layout: Layout, seed: int | None):
        from torch_bridge import from_torch, step_record

        self.bridge = step_record
        self.modules = {name: from_torch.unwrapped(module) for name, module in modules.items()}
        self.layout = layout
        self.submodules = [inner for module in self.modules.values() for inner in module.modules()]
        self.tensors, self.aliases = step_record.snapshot(self.modules)
        self.names = {id(tensor): name for name, tensor in self.tensors.items()}
        self.key = jax.random.key(step_record.seed_of(seed))
        self.arrays: Arrays = {}
        self.versions: dict[str, int] = {}
        self.dirty = False  # the devices hold newer values than torch
        self.read(self.tensors)

    def read(self, names: Any) -> None:
        """Take these tensors' values from torch."""
        for name in names:
            self.arrays[name] = jax.device_put(self.bridge.to_array(self.tensors[name]), self.layout.replicated)
        self.versions = {name: tensor._version for name, tensor in self.tensors.items()}

    def refresh(self) -> None:
        """Read what torch changed since; refuse where that would throw trained values away."""
        changed = [name for name, tensor in self.tensors.items() if tensor._version != self.versions[name]]
        if changed and self.dirty:
            raise UserError(
                f"{changed[0]} was changed in torch while the compiled step held newer values; call step.sync() before "
                "you change weights"
            )
        if changed:
            self.read(changed)

    def sync(self) -> None:
        """Write the values into torch's tensors, in place."""
        self.bridge.write(self.tensors, self.arrays)
        self.versions = {name: tensor._version for name, tensor in self.tensors.items()}
        self.dirty = False

    def first_name(self, name: str) -> str:
        """Return the name that stands for a tied tensor."""
        return self.aliases.get(name, name)

    def state(self, arrays: Arrays) -> Arrays:
        """The arrays with tied ones under each of their names."""
        return arrays | {alias: arrays[name] for alias, name in self.aliases.items()}

    def place(self, leaf: Any) -> Any:
        """A batch's array in JAX's widths; over the devices by rows where they divide it, else on each of them."""
        leaf = self.bridge.narrow(leaf)
        pieces = self.layout.batch_devices
        if pieces == 1:
            return leaf  # the call itself takes it to the device
        split = leaf.ndim and leaf.shape[0] % pieces == 0
        return jax.device_put(leaf, self.layout.batch() if split else self.layout.replicated)


class CompiledStep:
    """One compiled update; made by `compile` and `compile_many`. `count`: calls so far."""

    def __init__(
        self, index: int, weights: SharedWeights, loss_fn, optimizer, scheduler, accumulate, precision, clip_norm
    ):
        self.weights, self.optimizer, self.scheduler = weights, optimizer, scheduler
        self.key = jax.random.fold_in(weights.key, index)
        self.accumulate, self.precision, self.clip_norm = accumulate, precision, clip_norm
        self.record = weights.bridge.LossRecord(weights.modules, loss_fn)
        if hasattr(optimizer, "param_groups"):
            self.updates: Updates = TorchUpdate(optimizer, weights.names)
        elif hasattr(optimizer, "init") and hasattr(optimizer, "update"):
            self.updates = OptaxUpdate(optimizer, weights.bridge.trainable(weights.tensors))
        else:
            raise UserError(
                f"optimizer: {type(optimizer).__name__}, wanted a torch.optim optimizer or an optax "
                "GradientTransformation"
            )
        if scheduler is not None and not hasattr(optimizer, "param_groups"):
            raise UserError("scheduler: an optax optimizer holds its own schedule; leave scheduler out")
        weights.bridge.check_scheduler(scheduler, optimizer)
        self.opt_state = self.updates.state({key: weights.arrays[key] for key in self.updates.keys})
        self.grads: Arrays = {}
        self.count = 0
        self.parts: dict[str, LazyScalar] = {}
        self.grad_norm: LazyScalar | None = None
        self._programs: dict[Any, Any] = {}

    def __call__(self, batch: Any, update: bool | None = None) -> Any:
        """One call on a batch of tensors or arrays: the loss, or (loss, values to log) as the loss function gives them.

        Every `accumulate`-th call updates the weights with the mean of their gradients. update: decide it here instead,
        True or False; gradients are then summed, as backward() does. Raises UserError where the batch or the loss
        cannot be recorded. Numbers that the loss reads from Python (attributes, variables around it) may change.
        """
        leaves, spec, batch_type = self.weights.bridge.flatten(batch)
        self.weights.refresh()
        modes = self.weights.bridge.flags_of(self.weights.submodules)
        self.record.check_captured()
        trained = self.updates.trained()
        updating = (self.count + 1) % self.accumulate == 0 if update is None else update
        divisor = self.accumulate if update is None else 1
        shapes = tuple((x.shape, x.dtype) if hasattr(x, "shape") else x for x in leaves)
        key = (spec, batch_type, modes, trained, self.updates.switches(), updating, divisor, shapes)
        python, numbers = self.record.python()
        program = self._programs.get((python, key))
        if program is None:
            graph, numbers = self.record.graph(leaves, spec, modes, batch_type)
            program = self._programs.get((id(graph), key))  # other values of Python's may have led to the same graph
            if program is None:
                program = self._program(graph, [*leaves, *numbers], trained, updating, divisor)
            self._programs[id(graph), key] = self._programs[self.record.python()[0], key] = program
        return program([*leaves, *numbers])

    def _program(self, graph: Any, leaves: list, trained: Sequence[str], updating: bool, divisor: int) -> Callable:
        weights = self.weights
        reached = {weights.first_name(name) for name in graph.differentiable()}
        moved = [key for key in trained if key in reached]  # torch leaves out a parameter without a gradient
        arrays = [i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape")]
        constants = {i: leaf for i, leaf in enumerate(leaves) if not hasattr(leaf, "shape")}
        update = self.updates.compiled(moved)
        updated = set(moved)

        def compute(arrays_now: Arrays, inputs, key):
            given = [constants.get(i) for i in range(len(leaves))]
            for place, value in zip(arrays, inputs, strict=True):
                given[place] = value

            def loss_of(params: Arrays):
                state = weights.state({**arrays_now, **self.precision.for_compute(params)})
                loss, parts, changed = self.record.run(graph, state, given, Rngs(key))
                return loss.astype(jnp.float32), (parts, changed)

            params = {name: arrays_now[name] for name in moved}
            (loss, (parts, changed)), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
            changed = {weights.first_name(name): value for name, value in changed.items()}
            buffers = {name: jnp.asarray(value, arrays_now[name].dtype) for name, value in changed.items()}
            return loss, parts, grads, buffers

        def accumulate(arrays_now, opt_state, grads, inputs, numbers, count):
            key = jax.random.fold_in(self.key, count)  # inside: a call of its own would cost more than the rest
            loss, parts, new, buffers = compute(arrays_now, inputs, key)
            grads = {name: grads[name] + value if name in grads else value for name, value in new.items()}
            return (arrays_now | buffers, opt_state, grads), (loss, parts, None)

        def step(arrays_now, opt_state, grads, inputs, numbers, count):
            (arrays_now, opt_state, grads), (loss, parts, _) = accumulate(
                arrays_now, opt_state, grads, inputs, numbers, count
            )
            if divisor > 1:
                grads = {name: value / divisor for name, value in grads.items()}
            norm = None
            if self.clip_norm is not None:
                norm = global_norm(grads)
                grads = clip(grads, norm, self.clip_norm)
            params, opt_state = update(
                {name: grads[name] for name in moved}, opt_state, {name: arrays_now[name] for name in moved}, numbers
            )
            return (arrays_now | params, opt_state, {}), (loss, parts, norm)

        compiled = jax.jit(step if updating else accumulate, donate_argnums=(0, 1, 2))

        def run(leaves):
            inputs = [weights.place(leaves[i]) for i in arrays]
            state, (loss, parts, norm) = compiled(
                weights.arrays, self.opt_state, self.grads, inputs, self.updates.numbers(), np.uint32(self.count)
            )
            weights.arrays, self.opt_state, self.grads = state
            weights.dirty = True
            self.count += 1
            if updating:
                self.updates.after(updated)
                if self.scheduler is not None:
                    self.scheduler.step()
            self.grad_norm = None if norm is None else LazyScalar(norm)
            self.parts = {name: LazyScalar(value) for name, value in parts.items()}
            return (LazyScalar(loss), self.parts) if parts else LazyScalar(loss)

        return run

    def eval(self, name: str | None = None) -> Callable:
        """A compiled forward pass of the module (of `name`, where there are several) in evaluation mode.

        It takes what the module takes and gives torch tensors, always with the newest weights.
        """
        weights = self.weights
        name = next(iter(weights.modules)) if name is None else name
        if name not in weights.modules:
            raise UserError(f"eval: no module {name!r}; there are {', '.join(weights.modules)}")
        forward = weights.bridge.ForwardRecord(weights.modules[name])
        prefix = "" if len(weights.modules) == 1 else f"{name}."

        programs: dict[tuple, Callable] = {}

        def program(graph: Any, places: tuple, constants: tuple) -> Callable:
            @jax.jit
            def run(arrays: Arrays, inputs: list) -> Any:
                leaves = list(constants)
                for place, value in zip(places, inputs, strict=True):
                    leaves[place] = value
                own = {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}
                return forward.run(graph, own, leaves)

            return run

        def call(*args: Any, **kwargs: Any) -> Any:
            weights.refresh()
            graph, leaves = forward.graph(args, kwargs)
            places = tuple(i for i, leaf in enumerate(leaves) if hasattr(leaf, "shape"))
            constants = tuple(None if i in places else leaf for i, leaf in enumerate(leaves))
            key = (id(graph), places, constants)  # the record keeps its graphs
            if key not in programs:
                programs[key] = program(graph, places, constants)
            inputs = [weights.bridge.narrow(leaves[i]) for i in places]
            return weights.bridge.to_tensors(programs[key](weights.state(weights.arrays), inputs))

        return call

    def sync(self) -> None:
        """Put weights, buffers and the optimizer's state back into the torch objects."""
        self.weights.sync()
        self.updates.write_back(self.opt_state)

    def state_dict(self) -> dict[str, Any]:
        """All that a loop needs to go on, in torch's own forms: module, optimizer, scheduler, count. Syncs first."""
        self.sync()
        modules = {name: module.state_dict() for name, module in self.weights.modules.items()}
        state = {"module": modules if len(modules) > 1 else next(iter(modules.values())), "count": self.count}
        if hasattr(self.optimizer, "state_dict"):
            state["optimizer"] = self.optimizer.state_dict()
        else:
            leaves, _ = jax.tree.flatten(self.opt_state)
            state["optimizer"] = [np.asarray(leaf) for leaf in leaves]
        if self.scheduler is not None:
            state["scheduler"] = self.scheduler.state_dict()
        state["grads"] = {name: np.asarray(value) for name, value in self.grads.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict()`: the next call gives the same bits as if the loop had not stopped."""
        weights = self.weights
        modules = state["module"] if len(weights.modules) > 1 else {next(iter(weights.modules)): state["module"]}
        for name, module in weights.modules.items():
            module.load_state_dict(modules[name])
        weights.read(weights.tensors)
        weights.dirty = False
        if hasattr(self.optimizer, "load_state_dict"):
            self.optimizer.load_state_dict(state["optimizer"])
            self.opt_state = self.updates.state({key: weights.arrays[key] for key in self.updates.keys})
        else:
            structure = jax.tree.structure(self.opt_state)
            self.opt_state = jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in state["optimizer"]])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.grads = {name: jnp.asarray(value) for name, value in state["grads"].items()}
        self.count = state["count"]


class CompiledSteps:
    """Several updates over shared weights; made by `compile_many`."""

    def __init__(self, steps: Mapping[str, CompiledStep]):
        self.steps = dict(steps)

    def __getitem__(self, name: str) -> CompiledStep:
        return self.steps[name]

    def __call__(self, batch: Any) -> dict[str, Any]:
        """All updates in their order on one batch: the losses by name."""
        return {name: step(batch) for name, step in self.steps.items()}

    def sync(self) -> None:
        """Put all weights and optimizer states back into the torch objects."""
        for step in self.steps.values():
            step.sync()

    def eval(self, name: str) -> Callable:
        """A compiled forward pass of one module in evaluation mode."""
        return next(iter(self.steps.values())).eval(name)
