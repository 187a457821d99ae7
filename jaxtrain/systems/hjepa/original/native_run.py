"""The fast path of HJEPATrainer: run the whole training loop on this project's engine.

This needs an equivalent on the engine for every object the user passed. Otherwise the loop stays on the host;
`obstacles` yields the reasons, in the user's terms.
"""

import dataclasses
import itertools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, default_collate

from jaxtrain.systems.hjepa.config import DATASETS, LossConfig
from jaxtrain.systems.hjepa.original import legacy_config
from jaxtrain.systems.hjepa.original.combined_losses import CombinedLoss, HJEPASIGRegLoss
from jaxtrain.systems.hjepa.original.datasets import Images
from jaxtrain.systems.hjepa.original.encoders import TargetEncoder
from jaxtrain.systems.hjepa.original.hjepa_model import HJEPA
from jaxtrain.systems.hjepa.original.jepa_loss import HJEPALoss
from jaxtrain.systems.hjepa.original.loss_registry import build_loss
from jaxtrain.systems.hjepa.original.mask_generators import HierarchicalMaskGenerator
from torch_bridge.datasets import to_torch
from torch_bridge.lowering.recording.ready import is_mock, mocked
from torch_bridge.optimizers import own_step
from torch_bridge.torch_step import clipping_is_replaced

UNREAD = 100  # last steps whose metrics stay on the device, so that nothing waits for them
ATTEMPTS = 10  # attempts to place a block, as many as the engine's masks make
OPTIMIZERS = {torch.optim.AdamW: "adamw", torch.optim.Adam: "adam", torch.optim.SGD: "sgd"}
PLAIN = {"amsgrad": False, "maximize": False, "nesterov": False, "dampening": 0}  # the engine supports only these


def obstacles(trainer: Any) -> Iterator[str]:
    """Yield the reasons why this trainer's loop must run on the host; nothing if the engine does the same."""
    own = trainer.overridden()
    if own:
        yield f"{', '.join(own)} of your own"
    if not unchanged(trainer.model):
        yield f"the model is {type(trainer.model).__name__}, not HJEPA as it is built"
    if section_of(trainer.loss_fn) is None:
        yield f"the loss is {type(trainer.loss_fn).__name__}, changed or of your own"
    if not _known_masks(trainer):
        yield "masking_fn is changed or of your own"
    if _optim(trainer) is None:
        yield f"the optimizer is {type(trainer.optimizer).__name__} in a form of your own"
    for name in ("train_loader", "val_loader"):
        if getattr(trainer, name) is not None and not _plain_loader(getattr(trainer, name)):
            yield f"{name} is no DataLoader with torch's own sampler and collate_fn"
    for name, planned in trainer.planned.items():
        if getattr(trainer, name) != planned:
            yield f"{name} is one of your own"
    if trainer.global_step != trainer.resumed_step:
        yield "steps were made before train()"
    called = [part for part in (trainer.model, trainer.loss_fn) if issubclass(type(part), nn.Module)]
    if any(itertools.chain.from_iterable(map(mocked, called))):
        yield "a forward of the model or the loss is a mock"
    if any(map(is_mock, (type(trainer.masking_fn).__call__, getattr(type(trainer.optimizer), "step", None)))):
        yield "the class of masking_fn or of the optimizer was patched with a mock"
    if clipping_is_replaced():
        yield "torch.nn.utils.clip_grad_norm_ is one of your own"


def unchanged(model: Any) -> bool:
    """Return True if the model is an HJEPA as built, without hooks, so that the engine can compute from its weights."""
    if type(model) is not HJEPA:
        return False
    with torch.device("meta"):
        fresh = HJEPA.of_section(model.section, model.img_size)
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = any("forward" in vars(inner) or any(getattr(inner, hook) for hook in hooks) for inner in model.modules())
    trained = [
        [(name, parameter.requires_grad) for name, parameter in one.named_parameters()] for one in (fresh, model)
    ]
    return not hooked and trained[0] == trained[1] and _structure(fresh) == _structure(model)


def _structure(module: nn.Module) -> list[tuple]:
    """List every submodule with its type and the attributes, besides tensors, that its results depend on."""
    found = []
    for name, inner in module.named_modules():
        plain = {
            key: value
            for key, value in vars(inner).items()
            if not key.startswith(("_", "ema_", "use_flash"))
            and key not in ("training", "section")
            and not (type(inner) is TargetEncoder and key.startswith("momentum"))  # of its average, which the run sets
        }
        found.append((name, type(inner), plain))
    return found


def section_of(loss: Any) -> dict[str, Any] | None:
    """Return the engine's `loss` section that equals this loss module, from its attributes; None if there is none."""
    section = getattr(loss, "section", None)
    if isinstance(section, LossConfig):
        fresh = build_loss(section, getattr(loss, "num_hierarchies", None) or 3)
        same = type(fresh) is type(loss) and _structure(fresh) == _structure(loss) and _tensors(fresh) == _tensors(loss)
        return section.model_dump(exclude_unset=True) if same else None
    if type(loss) not in (HJEPALoss, CombinedLoss, HJEPASIGRegLoss) or "forward" in vars(loss):
        return None
    jepa = loss if type(loss) is HJEPALoss else loss.jepa_loss
    if type(jepa) is not HJEPALoss or jepa.reduction != "mean" or jepa.eps != 1e-8:
        return None
    found = {
        "type": "hjepa",
        "jepa_loss_type": jepa.loss_type,
        "hierarchy_weights": jepa.hierarchy_weights.tolist(),
        "normalize_embeddings": jepa.normalize_embeddings,
        "detach_targets": jepa.detach_targets,
        "huber_delta": jepa.huber_delta,
    }
    if type(loss) is CombinedLoss:
        regular = loss.vicreg_loss.options()
        if regular["variance_threshold"] != 1.0 or regular["eps"] != 1e-8 or not regular["flatten_patches"]:
            return None
        found |= {"type": "combined", "vicreg_weight": loss.vicreg_weights.tolist()}
        found |= {
            f"vicreg_{name}": regular[name] for name in ("invariance_weight", "variance_weight", "covariance_weight")
        }
    if type(loss) is HJEPASIGRegLoss:
        sliced, test = loss.sigreg_loss, loss.sigreg_loss.univariate_test
        if test.eps != 1e-6:
            return None
        found |= {
            "type": "hjepa_sigreg",
            "sigreg_loss_weight": loss.sigreg_weight,
            "sigreg_num_slices": sliced.num_slices,
            "sigreg_fixed_slices": sliced.fixed_slices,
            "sigreg_num_test_points": test.num_points,
            "sigreg_test_method": test.test_method,
            "sigreg_char_function_num_quadrature": test.num_quadrature,
            "sigreg_char_function_t_min": test.t_min,
            "sigreg_char_function_t_max": test.t_max,
            "sigreg_char_function_lambda": test.char_function_lambda,
        }
    return found


def _tensors(module: nn.Module) -> list[tuple]:
    return [(name, tensor.tolist()) for name, tensor in module.state_dict().items()]


def _known_masks(trainer: Any) -> bool:
    masks, model = trainer.masking_fn, trainer.model
    if type(masks) is not HierarchicalMaskGenerator or type(model) is not HJEPA:
        return False
    same_grid = (masks.input_size, masks.patch_size) == ((model.img_size,) * 2, model.get_patch_size())
    return same_grid and masks.max_attempts == ATTEMPTS and masks.level_configs[0]["target_scale"] == masks.base_scale


def _optim(trainer: Any) -> dict[str, Any] | None:
    """Return the engine's `optim` keys for the optimizer; None if the engine has no equivalent."""
    optimizer = trainer.optimizer
    if type(optimizer) not in OPTIMIZERS or len(optimizer.param_groups) != 1 or _is_watched(optimizer):
        return None
    group = optimizer.param_groups[0]
    own = [id(parameter) for parameter in trainer.model.parameters()]
    if [id(parameter) for parameter in group["params"]] != own:
        return None
    if any(group.get(name, plain) != plain for name, plain in PLAIN.items()):
        return None
    if any(isinstance(group[name], torch.Tensor) for name in ("lr", "weight_decay")):
        return None
    found = {"name": OPTIMIZERS[type(optimizer)], "weight_decay": group["weight_decay"]}
    if "betas" in group:
        found |= dict(zip(("beta1", "beta2"), group["betas"], strict=True)) | {"eps": group["eps"]}
    return found | ({"momentum": group["momentum"]} if "momentum" in group else {})


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if calls of this optimizer are observed, by a method set on it or by a hook."""
    hooks = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    replaced = bool(own_step(optimizer)) or "zero_grad" in vars(optimizer)
    return replaced or any(getattr(optimizer, name, None) for name in hooks)


def _plain_loader(loader: Any) -> bool:
    if type(loader) is not DataLoader or loader.batch_size is None:
        return False
    if type(loader.sampler) not in (RandomSampler, SequentialSampler) or loader.generator is not None:
        return False
    if isinstance(loader.sampler, RandomSampler) and (loader.sampler.replacement or loader.sampler._num_samples):
        return False
    return loader.collate_fn is default_collate and loader.worker_init_fn is None


def settings(trainer: Any) -> Any:
    """Return the run's checked config: the original's, overridden by what the given objects say."""
    from jaxtrain import config_io

    loader, model = trainer.train_loader, trainer.model
    values = legacy_config.convert(trainer.config, accelerator=jax.default_backend() != "cpu")
    named = values["data"].get("dataset")
    values["data"] = {  # the given loaders decide what is read, not the config
        key: value
        for key, value in values["data"].items()
        if key not in ("datasets", "sampling_strategy") and (key != "dataset" or named in DATASETS)
    }
    values["model"] = model.section.model_dump(exclude={"ema", "encoder_weights"}) | {"ema": values["model"]["ema"]}
    values["data"] |= {
        "image_size": model.img_size,
        "batch_size": loader.batch_size * trainer.accumulation_steps,
        "shuffle": type(loader.sampler) is RandomSampler,
        "drop_last": loader.drop_last,
    }
    values["loss"] = section_of(trainer.loss_fn)
    values["evaluation"].pop("patience", None)  # the trainer's own early stopping asks the engine to stop
    masks = trainer.masking_fn
    values["masking"] |= {
        "num_masks": masks.num_target_masks,
        "mask_scale": list(masks.base_scale),
        "aspect_ratio": list(masks.aspect_ratio_range),
    }
    values["optim"] |= _optim(trainer) | {"lr": trainer.lr_scheduler.base_value, "clip_norm": trainer.clip_grad}
    values["train"] |= {"epochs": trainer.epochs, "accumulate_steps": trainer.accumulation_steps}
    values["compat"] = "original" if trainer.original_procedure else "correct"
    if trainer.resumed_from is not None:
        values["init_from"] = str(trainer.resumed_from)
    values["run"]["dir"] = str(trainer.checkpoint_manager.checkpoint_dir / _engine_folder(trainer))
    return config_io.check(values, "the original's config")[1]


def _engines_data(loader: Any) -> Any:
    """Return the loader's dataset; for this project's own images, the source that the step augments."""
    dataset = None if loader is None else loader.dataset
    return dataset.source if type(dataset) is Images else dataset


def _newest(folder: pathlib.Path) -> int | None:
    """Return the newest step with a checkpoint of the engine in this run folder, or None."""
    steps = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]
    return max(steps, default=None)


def _engine_folder(trainer: Any) -> str:
    """Return the folder of the engine's own state, relative to checkpoint_dir.

    It is the folder of this trainer's last train(), or of the run that wrote the resumed file, if the newest state
    there is the file's. Otherwise it is a folder without a state: checkpoint_dir itself; else from_FILE when resuming
    from a file, and run_2, run_3, ... for a given model.
    """
    place, file = trainer.checkpoint_manager.checkpoint_dir, trainer.resumed_from
    if trainer.begun:
        return trainer.engine_folder
    if file is not None and trainer.engine_folder is not None:
        own = pathlib.Path(file).resolve().parent == place.resolve()
        if own and _newest(place / trainer.engine_folder) == trainer.resumed_step:
            return trainer.engine_folder
    if _newest(place) is None:
        return "."
    if file is not None:
        return f"from_{pathlib.Path(file).stem}"
    return next(name for number in itertools.count(2) if _newest(place / (name := f"run_{number}")) is None)


def run(trainer: Any) -> dict[str, Any]:
    """Train to the end on the engine and return the history.

    Fills model and optimizer, and writes the original's checkpoints on the way.
    """
    from jaxtrain import Trainer
    from jaxtrain.systems.hjepa import TASKS

    trainer.engine_folder = _engine_folder(trainer)
    trainer.begun = True
    checked = settings(trainer)
    task = dataclasses.replace(TASKS["pretrain"], build_data=lambda config, split: None)  # use only the loaders' data
    datasets = [_engines_data(loader) for loader in (trainer.train_loader, trainer.val_loader)]
    engine = Trainer(None, *datasets, checked, task=task, callbacks=[Follow(trainer)])
    engine.program.load_state_dict({key: value.cpu().numpy() for key, value in trainer.model.state_dict().items()})
    history = engine.train(str(engine.folder) if engine.checkpoints().latest() else "auto")
    take_over(trainer, engine)
    trainer.metrics_logger.finish()
    return history


class Follow:
    """Engine callback that keeps a trainer's attributes up to date while the engine trains.

    After each epoch it writes the original's files and logs the losses. It also logs the losses of every 5 *
    log_frequency-th step, and accumulates those of all steps in metrics_logger. The trainer's record of its best epochs
    is saved in the engine's checkpoints and restored from them.
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self.every = 5 * trainer.log_frequency
        self.newest: Mapping[str, float] = {}
        self.unread: list[Mapping[str, float]] = []  # metrics of the last steps: reading waits for a step's end
        self.losses: list[float] = []  # losses of the epoch's steps that were read

    def state_dict(self) -> dict[str, Any]:
        trainer, manager = self.trainer, self.trainer.checkpoint_manager
        best = [(path.name, epoch, metric) for path, epoch, metric in manager.best_checkpoints]
        state = {"best_metric": float(manager.best_metric), "best_checkpoints": best}
        state |= {name: getattr(trainer, name) for name in ("best_val_loss", "epochs_without_improvement")}
        return state | (
            {} if trainer.early_stopping is None else {"early_stopping": trainer.early_stopping.state_dict()}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer, manager = self.trainer, self.trainer.checkpoint_manager
        manager.best_metric = state["best_metric"]
        manager.best_checkpoints = [(manager.checkpoint_dir / name, *rest) for name, *rest in state["best_checkpoints"]]
        for name in ("best_val_loss", "epochs_without_improvement"):
            setattr(trainer, name, state[name])
        if trainer.early_stopping is not None and "early_stopping" in state:
            trainer.early_stopping.load_state_dict(state["early_stopping"])

    def on_train_start(self, engine: Any) -> None:
        self.trainer.progress_tracker.start_epoch()

    def on_step_end(self, engine: Any, step: int, metrics: Mapping[str, float]) -> None:
        self.newest = metrics
        self.trainer.progress_tracker.step()
        self.unread.append(metrics)
        if len(self.unread) > 2 * UNREAD:
            self._read(UNREAD)
        if step % self.every == 0:
            self._log(step, metrics, "train/")

    def on_epoch_end(self, engine: Any, epoch: int) -> None:
        trainer = self.trainer
        trainer.current_epoch = epoch - 1
        self._read(len(self.unread))
        losses, self.losses = self.losses, []
        step = epoch * engine.program.steps_per_epoch
        if jax.process_index() == 0:
            trainer.metrics_logger.log_accumulated_metrics(step, "train_epoch/")
        self._log(step, self.newest, "train/")
        if trainer.val_loader is None:
            self._close(engine, None, float(np.mean(losses)) if losses else 0.0)

    def on_evaluation_end(self, engine: Any, step: int, metrics: dict[str, float]) -> None:
        self._log(step, metrics, "val/")
        self._close(engine, metrics["loss"], metrics["loss"])

    def _read(self, count: int) -> None:
        ready, self.unread = self.unread[:count], self.unread[count:]
        for metrics in map(dict, ready):
            self.losses.append(metrics["loss"])
            if jax.process_index() == 0:
                self.trainer.metrics_logger.accumulate_metrics(metrics)

    def _close(self, engine: Any, val_loss: float | None, judged: float) -> None:
        """End the epoch: write its files, check early stopping, start the next epoch's clock."""
        trainer = self.trainer
        self._save(engine, val_loss)
        self._stop(engine, judged)
        trainer.progress_tracker.end_epoch()
        if trainer.current_epoch + 1 < trainer.epochs:
            trainer.progress_tracker.start_epoch()

    def _stop(self, engine: Any, loss: float) -> None:
        trainer = self.trainer
        if trainer._check_early_stopping(loss):
            trainer._log(f"early stop at epoch {trainer.current_epoch + 1}: best loss {trainer.best_val_loss:.6g}")
            engine.run.stop()

    def _log(self, step: int, metrics: Mapping[str, float], prefix: str) -> None:
        if jax.process_index() == 0:
            self.trainer.metrics_logger.log_metrics(dict(metrics), step, prefix)

    def _save(self, engine: Any, loss: float | None) -> None:
        trainer, epoch = self.trainer, self.trainer.current_epoch
        is_best = loss is not None and trainer._note_validation(loss)
        if trainer.checkpoint_manager.should_save(epoch) or is_best:
            take_over(trainer, engine)
            if jax.process_index() == 0:
                trainer._save_checkpoint(epoch, loss, is_best)


def take_over(trainer: Any, engine: Any) -> None:
    """Copy the engine's weights, moments, learning rate and counters into the torch objects."""
    from jaxtrain.train.checkpoint import torch_checkpoint

    saved = torch_checkpoint.of_program(engine.program)
    as_tensor = lambda leaf: to_torch(np.asarray(leaf))
    trainer.model.load_state_dict({key: as_tensor(value) for key, value in engine.state_dict().items()})
    trainer.global_step = trainer.resumed_step = int(saved["updates"])
    parameters = dict(trainer.model.named_parameters())
    for group in saved["optimizer"]["param_groups"]:
        for number, name in zip(group["params"], group["param_names"], strict=True):
            entry = saved["optimizer"]["state"].get(number)
            if entry is not None:
                trainer.optimizer.state[parameters[name]] = {key: as_tensor(value) for key, value in entry.items()}
        trainer.optimizer.param_groups[0].update(lr=group["lr"], initial_lr=group["initial_lr"])
