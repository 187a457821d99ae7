"""The original's names, for scripts that change only their imports. Training itself runs in JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import torch
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.nn import Rngs
from jaxtrain.systems.fmri_autoencoder.blocks import parameter_counts
from jaxtrain.systems.fmri_autoencoder.config import Gen1Options, HeadOptions
from jaxtrain.systems.fmri_autoencoder.gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.head import MultimodalAutoencoder
from jaxtrain.systems.fmri_autoencoder.original.legacy_config import HEAD_ONLY, TrainingConfig, is_checkpoint_file
from jaxtrain.systems.fmri_autoencoder.video import frames_per_volume
from torch_bridge import files
from torch_bridge.layouts import abstract
from torch_bridge.state_dict import load_state_dict, state_dict

ARCHITECTURE = ("video_height", "video_width", "audio_mels", "text_dim", "n_voxels", "bottleneck_dim")
WEIGHTS = ("reconstruction_weight", "fmri_weight")
HEAD_ARCHITECTURE = ("use_encodec", "audio_frames_per_tr", "video_frames_per_tr")


def create_autoencoder(generation: str | None = None, **options: Any) -> "Autoencoder":
    """The original's model by its options; without any, the README's 1,974,067,762 parameters.

    generation: `gen1` or `head`; left out, an option that only the second generation has (use_encodec, frame_skip, ...)
    chooses it. frame_skip, fps and tr give video_frames_per_tr. Nothing is allocated until the weights are needed.
    """
    generation = generation or ("head" if HEAD_ONLY & set(options) else "gen1")
    if generation == "head":
        skip, fps, tr = options.pop("frame_skip", 2), options.pop("fps", 25.0), options.pop("tr", 1.5)
        options.setdefault("video_frames_per_tr", frames_per_volume(fps, tr, skip))
        return Autoencoder(_checked(HeadOptions, options))
    if generation != "gen1":
        raise UserError(f"create_autoencoder: generation is {generation!r}, wanted gen1 or head")
    return Autoencoder(_checked(Gen1Options, options))


def _checked(kind, options: Mapping[str, Any]):
    from jaxtrain import config_io

    return config_io.validate(kind, options, "create_autoencoder")


class Autoencoder:
    """A model to be trained, with the original's methods. Its weights come into being at the first call, or not at all
    where Trainer builds them itself, on the devices where they belong.

    options: Gen1Options or HeadOptions. train() and eval() set the mode of calls, as in torch.
    """

    def __init__(self, options, seed: int = 0):
        self.options, self.seed, self.training = options, seed, True
        self._module: nnx.Module | None = None
        self._calls = 0

    def _build(self) -> nnx.Module:
        kind = MultimodalAutoencoder if isinstance(self.options, HeadOptions) else SherlockAutoencoder
        return kind(self.options, rngs=nnx.Rngs(self.seed))

    @property
    def built(self) -> bool:
        return self._module is not None

    @property
    def module(self) -> nnx.Module:
        """The flax module, with weights."""
        if self._module is None:
            self._module = nnx.jit(self._build)()
        return self._module

    @module.setter
    def module(self, module: nnx.Module) -> None:
        self._module = module

    def train(self, mode: bool = True) -> "Autoencoder":
        self.training = mode
        return self

    def eval(self) -> "Autoencoder":
        return self.train(False)

    def __call__(self, video, audio, text, fmri_target=None) -> dict[str, Any]:
        """A dict of arrays; in training mode with dropout, batch statistics and the model's own losses."""
        self._calls += 1
        rngs = Rngs(jax.random.fold_in(jax.random.key(self.seed), self._calls)) if self.training else None
        arrays = [None if x is None else _array(x) for x in (video, audio, text, fmri_target)]
        return self.module(*arrays, rngs=rngs)

    def encode_only(self, video, audio, text, return_voxels: bool = False):
        return self.module.encode_only(_array(video), _array(audio), _array(text), return_voxels)

    def decode_only(self, bottleneck):
        return self.module.decode_only(_array(bottleneck))

    def get_parameter_count(self) -> dict[str, Any]:
        """Parameters by part, exact, without allocating them."""
        return (self._module or abstract(self._build)).get_parameter_count()

    def count_parameters(self) -> dict[str, int]:
        return parameter_counts(self._module or abstract(self._build))

    def state_dict(self) -> dict[str, np.ndarray]:
        return state_dict(self.module)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True):
        """Torch tensors or arrays under the original's keys. Gives missing and unexpected keys."""
        return load_state_dict(self.module, {key: _array(value) for key, value in state.items()}, strict)

    def save_checkpoint(self, path, epoch=0, optimizer_state=None, loss=None, metadata=None) -> None:
        """The original's checkpoint: `model_state_dict`, `architecture`, and what else is given."""
        head = isinstance(self.options, HeadOptions)
        names = ARCHITECTURE + WEIGHTS + (HEAD_ARCHITECTURE if head else ())
        weights = {key: torch.from_numpy(np.array(value)) for key, value in self.state_dict().items()}
        found = {"epoch": epoch, "model_state_dict": weights}
        found["architecture"] = {name: getattr(self.options, name) for name in names}
        extra = {"optimizer_state_dict": optimizer_state, "loss": loss, "metadata": metadata}
        torch.save(found | {name: value for name, value in extra.items() if value is not None}, path)

    @classmethod
    def load_checkpoint(cls, path, device=None, **options: Any) -> tuple["Autoencoder", dict[str, Any]]:
        """(model, checkpoint) from a file of `save_checkpoint` or of the original's Trainer.

        options: what `architecture` does not hold (features, dropout, widths, and for a Trainer's file the sizes).
        device: not used, JAX decides.
        """
        found = torch.load(path, map_location="cpu", weights_only=True)
        if "model_state_dict" not in found:
            raise UserError(f"{path}: has no model_state_dict; it holds {', '.join(map(str, list(found)[:6]))}")
        head = "decoder.layer13_text.weight" in found["model_state_dict"]
        sizes = {**found.get("architecture", {}), **options}
        if head:  # the original's defaults for files from before these were saved
            sizes = {"use_encodec": False, "audio_frames_per_tr": 65, "video_frames_per_tr": 19} | sizes
        model = cls(_checked(HeadOptions if head else Gen1Options, sizes))
        model.module = abstract(model._build)  # filled below: the weights exist once
        model.load_state_dict(found["model_state_dict"])
        return model.eval(), found


def _array(value: Any):
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def prepare_for_distributed(model, *arguments, **options):
    """The model as it is: Trainer spreads it over the devices."""
    return model


class Trainer:
    """The original's trainer with this project's engine inside.

    config.resume_from: a checkpoint file, whose weights, moments and step a fresh checkpoint_dir goes on from; or a run
    folder. Without it training goes on with what checkpoint_dir holds.
    train_dataset, val_dataset: torch Datasets of dicts with `video`, `audio`, `text`, `fmri`, or this module's.
    distributed, local_rank, world_size: not used; call setup_distributed() first and every process takes its part.
    """

    def __init__(
        self,
        model: Autoencoder,
        train_dataset,
        val_dataset,
        config: TrainingConfig,
        distributed: bool = False,
        local_rank: int = 0,
        world_size: int = 1,
    ):
        from jaxtrain import config_io
        from jaxtrain.train.trainer import Trainer as Engine

        if not isinstance(model, Autoencoder):
            raise UserError(f"Trainer: the model is {type(model).__name__}, wanted what create_autoencoder gives")
        values = config.settings(
            model.options.model_dump(),
            isinstance(model.options, HeadOptions),
            len(train_dataset),
            accelerator=jax.default_backend() != "cpu",  # autocast does nothing on a CPU either
        )
        self.model, self.config = model, config
        task, settings = config_io.check(values, "TrainingConfig")
        self.engine = Engine(None, train_dataset, val_dataset, settings, task=task)
        if model.built:
            self.engine.load_state_dict(model.state_dict())

    def train(self) -> dict[str, Any]:
        """Trains; gives train_history, val_history (lists of dicts with the original's names) and best_val_loss, and
        leaves final_checkpoint.pt and best_checkpoint.pt in config.checkpoint_dir, in the original's form."""
        resume = self.config.resume_from
        history = self.engine.train("auto" if resume is None or is_checkpoint_file(resume) else resume)
        self.model.module = self.engine.model()
        for name in ("train_history", "val_history"):
            entries = history[name]
            history[name] = [{"total_loss": entry["loss"], **entry} if "loss" in entry else entry for entry in entries]
        if jax.process_index() == 0:
            self._write("final_checkpoint.pt", "last", history)
            if history["val_history"]:
                self._write("best_checkpoint.pt", "best", history)
        return history

    def _write(self, name: str, which: str, history: Mapping[str, Any]) -> None:
        from jaxtrain.train.checkpoint import torch_checkpoint

        found = torch_checkpoint.of_run(self.engine.folder, which)
        renamed = {
            "epoch": found["epoch"],
            "global_step": found["step"],
            "model_state_dict": found["model"],
            "optimizer_state_dict": found["optimizer"],
            "scheduler_state_dict": found["scheduler"],
            "config": dataclasses.asdict(self.config),
        }
        files.save({**renamed, **history}, self.engine.folder / name)

    def validate(self) -> dict[str, float]:
        return self.engine.evaluate()


def setup_distributed(rank: int | None = None, world_size: int | None = None, backend: str | None = None) -> None:
    """Join the other processes; rank and number are read from the launcher's environment. backend: not used."""
    from jaxtrain.runtime import launch

    launch.setup_distributed()


def cleanup_distributed() -> None:
    from jaxtrain.runtime import launch

    launch.cleanup_distributed()
