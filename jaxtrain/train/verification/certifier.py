"""Compare a Trainer's torch module in JAX with torch itself: layer outputs, loss, gradients and N updates."""

import functools
import importlib.metadata
import pathlib
import platform
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxtrain.config import TrainingConfig
from jaxtrain.data import row_keys
from jaxtrain.data.batch_shapes import flatten, ladder, replaced
from jaxtrain.errors import UserError
from jaxtrain.optim import groups
from jaxtrain.torch_task import is_torch_module
from jaxtrain.train.loop.callbacks import Callbacks
from jaxtrain.train.verification.certificate import Certificate, Check

if TYPE_CHECKING:
    from torch_bridge.certificate.torch_run import TorchParts, TorchRun
    from torch_bridge.training.torch_task import TorchTask

UPDATES = 1e-3  # limit of gradients and what they change; or torch's own float32 error times TOLERANCE, if larger
LOSSES = 1e-4
BF16 = 2e-2  # limit of the loss's relative drift; or torch.autocast's drift times BF16_TOLERANCE, if larger
TOLERANCE, BF16_TOLERANCE = 10.0, 3.0


def of(trainer: Any, steps: int) -> Certificate:
    """Compare a Trainer's torch module with torch on one batch and over `steps` updates; all state is restored.

    Raises UserError for a model that is no torch module, for one whose evaluation draws random numbers, and with
    several processes.
    """
    if not is_torch_module(trainer.user_model):
        raise UserError(
            "verify: compares a torch.nn.Module that was given to Trainer; a run of a task is compared by "
            "`jaxtrain verify --run DIR`"
        )
    if jax.process_count() > 1:
        raise UserError("verify: runs in one process; start it without torchrun")
    with tempfile.TemporaryDirectory(prefix="jaxtrain-verify-") as folder:
        return Certifier(trainer, steps, folder).run()


class Certifier:
    """The checks of one comparison. trainer: the user's, which stays unchanged; temporary trainers work in `folder`."""

    def __init__(self, trainer: Any, steps: int, folder: str):
        from torch_bridge.certificate import sides, torch_run

        self.sides, self.torch_run = sides, torch_run
        self.given, self.steps, self.folder = trainer, steps, folder
        self.definition: TorchTask = trainer.model().definition

    def run(self) -> Certificate:
        """Run every check in order and return the certificate."""
        torch_run = self.torch_run
        curves: dict[str, Sequence[float]] = {}
        with torch_run.borrowed(self.definition, self._parts), torch_run.without_dropout(self.definition) as changed:
            self.trainer = self._trainer("fp32", None if changed else self.given.task)
            self.definition = self.trainer.model().definition
            self.in_jax = self.sides.JaxSide(self.definition)
            self._read_batches()
            batch = self.batches[0]
            drawn = torch_run.draws_numbers(self.definition, batch, training=False)
            if drawn is not None:
                raise UserError(
                    f"verify: {type(self.definition.module).__name__} draws random numbers in evaluation mode (the "
                    f"loss is {drawn[0]:.6g} under one seed and {drawn[1]:.6g} under another), and torch and JAX draw "
                    "other ones; pass them to forward as inputs"
                )
            drawn = torch_run.draws_numbers(self.definition, batch, training=True)
            checks = [*self._modes(batch, drawn), self._uneven(batch, drawn), self._padding(batch)]
            if drawn is None:
                checks += self._updates(curves)
            else:
                checks.append(Check("updates", f"{self.steps} updates", left_out=_drawn(drawn)))
            return Certificate(self._subject(), checks, curves)

    def _trainer(self, policy: str, recorded: Any) -> Any:
        """Return a Trainer of the same parts, for `steps` updates without evaluations, checkpoints and trackers.

        recorded: the task of a Trainer of the same module in the same state, or None to record it now.
        """
        given, trainer = self.given.program.given, self.given
        options: dict[str, Any] = {}
        if self._parts is not None:
            interval = "epoch" if given.by_epoch else "step"
            options = {
                "optimizer": given.updates.optimizer,
                "scheduler": given.scheduler,
                "scheduler_interval": interval,
            }
        elif given is not None:
            options = {"optimizer": given.transform}
        data, config = trainer.source("train"), self._config(policy, f"{self.folder}/{policy}")
        make, module = type(trainer), self.definition.module
        return make(module, data, None, config, task=recorded, loss=trainer.user_loss, **options)

    def _read_batches(self) -> None:
        """Read the batches of the run, in numpy, without padding rows."""
        self.batches = []
        for step in range(self.steps):
            batch = self.trainer.train_loader.host_batch(step)
            keep = np.asarray(row_keys.valid(batch))
            own = row_keys.without(batch)
            self.batches.append(own if keep.all() else jax.tree.map(lambda leaf, keep=keep: leaf[keep], own))
        self.rows = _rows(self.batches[0])

    # --- one batch ----------------------------------------------------------------------------------------------

    def _pair(self, batch: Mapping[str, Any], training: bool, ours: Mapping[str, Any] | None = None) -> tuple:
        """Return (JAX's results, torch's results) for a batch. ours: JAX's batch, if it is a different one."""
        found = self.in_jax(batch if ours is None else ours, training)
        with self.torch_run.borrowed(self.definition):
            return found, self.sides.in_torch(self.definition, batch, training)

    def _modes(self, batch: Mapping[str, Any], drawn: Any) -> Iterator[Check]:
        sides, losses = self.sides, {}
        for training, mode in ((False, "evaluation"), (True, "training")):
            rows = f"a batch of {self.rows}"
            claim = f"{mode} mode: every layer's output, the loss and changed buffers, on {rows}"
            if training and drawn is not None:
                yield Check(mode, claim, left_out=_drawn(drawn))
                return
            ours, theirs = losses[training] = self._pair(batch, training)
            layers, unmatched = sides.layer_differences(ours, theirs)
            loss = _difference("loss", f"the batch in {mode} mode", ours.loss, theirs.loss, LOSSES)
            notes = [f"{len(layers)} layers compared"] if layers else []
            if unmatched:
                shown = ", ".join(unmatched[:4]) + (", ..." if len(unmatched) > 4 else "")
                notes.append(f"{len(unmatched)} give no tensor of their own in the compiled program: {shown}")
            yield Check(mode, claim, [*layers, loss, *sides.buffer_differences(ours, theirs)], notes)
        ours, theirs = losses[True]
        yield Check("gradients", "the gradient of every parameter", sides.gradient_differences(ours, theirs))
        (jax_eval, torch_eval), scale = losses[False], max(float(np.abs(theirs.loss).max()), 1e-12)
        apart = [np.asarray(a.loss - b.loss) / scale for a, b in ((ours, jax_eval), (theirs, torch_eval))]
        size = float(np.abs(apart[0] - apart[1]).max())
        named = self.sides.Difference("loss", "training less evaluation mode", size, LOSSES)
        note = f"training mode changes {len(theirs.changed)} buffers, evaluation mode {len(torch_eval.changed)}"
        yield Check("modes", "the two modes differ by as much as in torch", [named], [note])

    def _uneven(self, batch: Mapping[str, Any], drawn: Any) -> Check:
        claim = "the uneven last batch of an epoch: loss and gradients"
        rest = next((size for size in map(_rows, self.batches) if size != self.rows), self.rows - 1)
        if rest < 2:
            return Check("uneven", claim, left_out=f"a batch of {self.rows} leaves no smaller one to compare")
        few = jax.tree.map(lambda leaf: leaf[:rest], batch)
        ours, theirs = self._pair(few, training=drawn is None)
        loss = _difference("loss", f"a batch of {rest}", ours.loss, theirs.loss, LOSSES)
        return Check("uneven", f"{claim}, {rest} rows", [loss, *self.sides.gradient_differences(ours, theirs)])

    def _padding(self, batch: Mapping[str, Any]) -> Check:
        claim = "a batch that jaxtrain pads further gives torch's loss and gradients of the unpadded one"
        shapes = self.trainer.train_loader.batch_shapes
        if shapes is None:
            return Check("padding", claim, left_out="the batches come in one shape, so nothing is padded")
        if shapes.exact:
            return Check("padding", claim, left_out="every length keeps its own shape here, so nothing is padded")
        arrays = flatten(batch)
        lengths = shapes.lengths(arrays)
        further = shapes.within(arrays, lengths, tuple(ladder(length + 1) for length in lengths))
        if further == lengths:
            return Check("padding", claim, left_out=f"the module takes nothing longer than {max(lengths)}")
        ours, theirs = self._pair(batch, False, replaced(batch, shapes.padded(arrays, further)))
        told = f"{' and '.join(map(str, lengths))} padded to {' and '.join(map(str, further))}"
        loss = _difference("loss", f"length {told}", ours.loss, theirs.loss, LOSSES)
        found = [loss, *self.sides.gradient_differences(ours, theirs)]
        return Check("padding", claim, found, [f"length {told}, evaluation mode"])

    # --- updates ------------------------------------------------------------------------------------------------

    @property
    def _parts(self) -> "TorchParts | None":
        """Return the user's own torch optimizer and its scheduler, whose state has to be restored; None without one."""
        given = self.given.program.given
        updates = getattr(given, "updates", None)
        if not hasattr(getattr(updates, "optimizer", None), "param_groups"):
            return None
        return self.torch_run.TorchParts(updates.optimizer, given.scheduler, given.by_epoch, given.clip_norm)

    def _torch_parts(self, program: Any) -> "TorchParts | None":
        """Return the optimizer that torch uses: the user's own, or torch's for the section `optim`; None if there is
        none."""
        if program.given is not None:
            return self._parts
        optim, optimizer = program.config.optim, program.optimizer
        keys = {key: (optimizer.groups[key], optimizer.decays[key]) for key in program.state.params}
        rates = groups.rates(optim, set(optimizer.groups.values()) or {"default"})
        return self.torch_run.of_config(self.definition, keys, rates, optim, program.schedule)

    def _updates(self, curves: dict[str, Sequence[float]]) -> Iterator[Check]:
        claim = f"{self.steps} updates"
        parts = self._torch_parts(self.trainer.program)
        if parts is None:
            optim = self.trainer.config.optim.name
            name = f"optim.name={optim}" if self.given.program.given is None else "an optax transformation"
            why = f"torch.optim has no counterpart of {name}; give Trainer a torch.optim optimizer"
            yield Check("updates", claim, left_out=why)
            return
        run = functools.partial(
            self.torch_run.train, self.definition, parts, self.batches, self.trainer.steps_per_epoch
        )
        theirs = run()
        with self.torch_run.borrowed(self.definition, self._parts):
            ours = self._train(self.trainer)
            state, returned = self.trainer.state_dict(), self._returned()
        with self.torch_run.borrowed(self.definition, self._parts):
            drifted = self._train(self._trainer("bf16", self.trainer.task))
        curves |= {"torch, fp32": theirs.losses, "jaxtrain, fp32": ours, "jaxtrain, bf16": drifted}
        exact, why = _attempt(lambda: run(double=True), "float64")
        claim = f"{self.steps} updates with {type(parts.optimizer).__name__}: losses and weights"
        found, torchs = self._moved(theirs, exact, ours, state)
        note = why or f"torch's float32 is itself {torchs:.1e} of the movement away from torch's float64"
        yield Check("updates", claim, found, [note], own=None if exact is None else torchs)
        yield returned
        autocast, why = _attempt(lambda: run(autocast=True), "torch.autocast")
        if autocast is not None:
            curves["torch, autocast bf16"] = autocast.losses
        yield self._drift(theirs.losses, ours, drifted, autocast, why)

    @staticmethod
    def _train(trainer: Any) -> list[float]:
        """Train to the end; return the losses of all updates."""
        losses = Losses()
        trainer.callbacks = Callbacks([losses], trainer, trainer.callbacks.reads)
        trainer.train()
        return losses.values

    def _config(self, policy: str, folder: str) -> TrainingConfig:
        """Return the user's config without evaluations, checkpoints and trackers, for `steps` steps in `folder`."""
        changes = {
            "run": {"dir": folder, "quiet": True},
            "train": {"steps": self.steps, "steps_per_call": 1, "accumulate_steps": 1, "fast_dev_run": False},
            "evaluation": {"every_epochs": None, "every_steps": None, "test": False},
            "checkpoint": {
                "every_epochs": None,
                "every_steps": None,
                "mirror": None,
                "write_back": False,
                "torch": None,
            },
            "tracking": {"tensorboard": False, "wandb": False, "mlflow": False, "histograms_every_steps": None},
            "precision": {"policy": policy, "matmul": "highest"},
            "data": {"num_workers": 0, "placement": "host"},
        }
        config = self.given.config
        made = {name: getattr(config, name).model_copy(update=values) for name, values in changes.items()}
        return config.model_copy(update={**made, "init_from": None})

    def _moved(
        self, theirs: "TorchRun", exact: "TorchRun | None", ours: Sequence[float], state: Mapping
    ) -> tuple[list, float]:
        """Return the differences of each loss and of the weights, relative to how far these moved; and torch's own
        float32 error on that scale."""
        own = [0.0] * self.steps
        if exact is not None:
            apart = np.abs(np.subtract(theirs.losses, exact.losses)) / np.maximum(np.abs(exact.losses), 1e-30)
            own = list(np.maximum.accumulate(apart))
        # After an update 1e-3: where a ReLU's input is 0 up to rounding, one sample's gradient is there or not.
        limits = [max(UPDATES if step else LOSSES, TOLERANCE * one) for step, one in enumerate(own)]
        found = [
            _difference("loss", f"update {step + 1}", np.asarray(a), np.asarray(b), limits[step])
            for step, (a, b) in enumerate(zip(ours, theirs.losses, strict=True))
        ]
        tensors, _ = self.sides.tensors_of(self.definition)
        start = {name: self.sides.to_array(tensor) for name, tensor in tensors.items()}
        floating = [n for n in start if np.issubdtype(start[n].dtype, np.floating) and n in state]
        moving = [n for n in floating if not np.array_equal(start[n], theirs.state[n])]
        length = lambda arrays: float(np.linalg.norm(_vector({n: arrays[n] - theirs.state[n] for n in moving})))
        far = max(length(start), 1e-30)
        torchs = 0.0 if exact is None else length(exact.state) / far
        limit = max(UPDATES, TOLERANCE * torchs)
        named = self.sides.Difference
        found.append(named("movement", f"{len(moving)} tensors together", length(state) / far, limit))
        still = [n for n in floating if n not in moving and not np.array_equal(start[n], state[n])]
        found += [named("movement", n, float("inf"), limit) for n in still]
        return found, torchs

    def _returned(self) -> Check:
        """Check that the trained weights, saved to a file, load into a copy of the torch module with the same loss."""
        trainer, batch = self.trainer, self.batches[0]
        path = pathlib.Path(self.folder) / "model.pt"
        bits, theirs = self.torch_run.returned(self.definition, trainer.state_dict(), path, batch)
        found = [self.sides.Difference("state dict", name, 0.0 if same else float("inf"), 0.5) for name, same in bits]
        ours = self.in_jax(batch, False).loss  # train() has written the weights into the module
        found.append(_difference("loss", "the batch in evaluation mode", ours, theirs, LOSSES))
        claim = "the trained state_dict, read by torch.load and load_state_dict(strict=True), and the loss with it"
        return Check("return", claim, found, [f"{len(bits)} tensors, bit for bit"])

    def _drift(self, theirs, ours, drifted, autocast, why) -> Check:
        mean = lambda a, b: float(np.mean(np.abs(np.subtract(a, b)) / np.maximum(np.abs(b), 1e-30)))
        own = None if autocast is None else mean(autocast.losses, theirs)
        limit = BF16 if own is None else max(BF16, BF16_TOLERANCE * own)
        found = self.sides.Difference("drift", "the losses in bf16", mean(drifted, ours), limit)
        note = why if own is None else f"torch.autocast drifts by {own:.1e}"
        return Check(
            "bf16", f"bf16 over {self.steps} updates stays near fp32, as torch.autocast does", [found], [note], own=own
        )

    def _subject(self) -> dict[str, Any]:
        definition, program = self.definition, self.given.program
        loss = definition.criterion
        parts = self._parts
        return {
            "module": type(definition.module).__name__,
            "package": type(definition.module).__module__,
            "parameters": sum(p.numel() for p in definition.module.parameters()),
            "loss": "the module's own" if loss is None else getattr(loss, "__name__", type(loss).__name__),
            "optimizer": program.config.optim.name if parts is None else type(parts.optimizer).__name__,
            "batch size": self.rows,
            "updates": self.steps,
            "seed": program.config.seed,
            "versions": {name: importlib.metadata.version(name) for name in ("torch", "jax", "jaxlib", "numpy")},
            "device": jax.devices()[0].device_kind,
            "python": platform.python_version(),
        }


class Losses:
    """Callback that stores the loss of every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_step_end(self, trainer: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.values.append(float(metrics["loss"]))


def _difference(kind: str, name: str, ours: Any, theirs: Any, limit: float) -> Any:
    from torch_bridge.comparison import Difference, distance

    return Difference(kind, name, distance(ours, theirs), limit)


def _vector(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(np.asarray(a, np.float64).ravel() for a in arrays.values())])


def _drawn(drawn: tuple[float, float]) -> str:
    return (
        "the module draws random numbers other than dropout in training mode, which the two sides draw apart (torch's "
        f"loss is {drawn[0]:.6g} under one seed and {drawn[1]:.6g} under another)"
    )


def _rows(batch: Mapping[str, Any]) -> int:
    return jax.tree.leaves(batch)[0].shape[0]


def _attempt(run: Callable[[], Any], name: str) -> tuple[Any, str]:
    """Return torch's result and "", or None and a line that says why torch refuses the module in that precision."""
    try:
        return run(), ""
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        line = next(iter(str(error).splitlines()), "")[:120]
        return None, f"torch itself refuses this module in {name} ({type(error).__name__}: {line})"
