"""The original's training of a sparse autoencoder on a frozen model's pooled vectors, in torch.

`task: set_completion.sae` does the same in the engine: compiled, sharded, resumable.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from jaxtrain.systems.set_completion.original.sae_evaluation import (
    ActivationHook,
    Activations,
    evaluate_reconstruction_impact,
    evaluate_sae_model,
    padding_of,
)
from jaxtrain.systems.set_completion.sae import ROWS_PER_DEAD_FEATURE
from jaxtrain.systems.set_completion.torch_buffer import ActivationBuffer
from jaxtrain.systems.set_completion.torch_sae import SAEConfig, SparseAutoencoder

QUANTILES = (10, 25, 50, 75, 90, 95, 99)


@dataclasses.dataclass(frozen=True)
class Coefficients:
    """Coefficients of the loss as functions of the number of updates."""

    l1_base: float
    l1_start: float
    l1_warmup_steps: int
    usage_base: float
    usage_floor: float
    usage_warmup_steps: int
    usage_period_steps: int

    def l1(self, step: int) -> float:
        """Return the L1 coefficient: linear from l1_start to l1_base in l1_warmup_steps, then l1_base."""
        if step < self.l1_warmup_steps:
            return self.l1_start + (self.l1_base - self.l1_start) * step / self.l1_warmup_steps
        return self.l1_base

    def usage(self, step: int) -> float:
        """Return the usage coefficient: linear from usage_floor to usage_base in usage_warmup_steps, then a cosine that
        dips to the floor once per period."""
        height = self.usage_base - self.usage_floor
        if step < self.usage_warmup_steps:
            return self.usage_floor + height * step / self.usage_warmup_steps
        phase = (step - self.usage_warmup_steps) % self.usage_period_steps
        return self.usage_floor + height * 0.5 * (1 + math.cos(2 * math.pi * phase / self.usage_period_steps))


def train_sae_model(
    primary_model: nn.Module,
    sae_model: SparseAutoencoder,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    hook: ActivationHook,
    sae_config: SAEConfig,
    data_loader: Iterable,
    val_loader: Iterable | None,
    vocab: Mapping[str, int],
    device: Any,
    num_epochs: int,
    activation_buffer_size: int,
    sae_batch_size: int,
    steps_before_sae_train: int,
    sae_train_steps_per_primary_step: int,
    resample_steps: Sequence[int],
    resample_weight: float,
    resample_bias: float,
    kl_warmup_steps: int = 6000,
    kl_period_steps: int = 60_000,
    kl_floor: float = 0.05,
    l1_warmup_steps: int = 6000,
    l1_start: float = 0.0,
    log_interval: int = 500,
    gradient_clip_val: float | None = 1.0,
    verbose: bool = True,
    wandb_run: Any = None,
    *,
    exact_fill_bug: bool = False,
) -> tuple[list[dict[str, Any]], SparseAutoencoder]:
    """Train sae_model on what `hook` records in primary_model, which does not change; return (history, sae_model).

    optimizer, scheduler: torch's, over sae_model; the scheduler steps after each update, None keeps the rate. hook: a
    result of `setup_hook`. sae_config: base values of the coefficients and the threshold of a dead feature.
    data_loader: batches (inputs, weapons, ...). val_loader: batches that include targets, evaluated after every epoch,
    or None. steps_before_sae_train: rows in the buffer before the first update; then every batch makes
    sae_train_steps_per_primary_step updates. resample_steps: updates after which dead features are reinitialised.
    log_interval: updates between entries for wandb_run, and between printed lines if verbose. exact_fill_bug: see
    ActivationBuffer. history: a dict per update, then per epoch the entries is_validation_standard,
    is_validation_impact and is_epoch_summary.
    """
    run = _Run(sae_model, sae_config, optimizer, scheduler, gradient_clip_val)
    run.resample_steps, run.weight, run.bias = frozenset(resample_steps), resample_weight, resample_bias
    run.log_interval, run.verbose, run.wandb_run = log_interval, verbose, wandb_run
    base = sae_config
    coefficients = Coefficients(
        base.l1_coefficient, l1_start, l1_warmup_steps, base.usage_coeff, kl_floor, kl_warmup_steps, kl_period_steps
    )
    pad = padding_of(vocab)
    buffer = ActivationBuffer(activation_buffer_size, sae_model.input_dim, device, exact_fill_bug=exact_fill_bug)
    training = primary_model.training
    primary_model.eval()
    sae_model.train()
    global_step = 0
    try:
        for epoch in range(1, num_epochs + 1):
            for x, _, _ in Activations(primary_model, data_loader, pad, hook, device):
                global_step += 1
                if x is None or x.ndim != 2 or x.shape[1] != sae_model.input_dim:
                    continue
                buffer.add(x)
                if len(buffer) < steps_before_sae_train:
                    continue
                for rows in _drawn(buffer, sae_batch_size, sae_train_steps_per_primary_step):
                    run.step(rows, coefficients, buffer, {"epoch": epoch, "global_step": global_step})
            counters = {"epoch": epoch, "sae_step": run.steps, "global_step": global_step}
            for entry in _judged(primary_model, sae_model, hook, val_loader, device, base, vocab, counters):
                run.record(entry)
    finally:
        primary_model.train(training)
    return run.history, sae_model


def _drawn(buffer: ActivationBuffer, batch_size: int, count: int) -> Iterable[torch.Tensor]:
    """Yield `count` batches of the shuffled buffer; it is shuffled again when exhausted."""
    count_so_far = 0
    while count_so_far < count:
        loader: Any = buffer.get_loader(batch_size, shuffle=True)
        for rows in loader:
            yield rows
            count_so_far += 1
            if count_so_far == count:
                return


class _Run:
    """Training state: the autoencoder, its optimizer and schedule, and the history."""

    resample_steps: frozenset[int]
    weight: float
    bias: float
    log_interval: int
    verbose: bool
    wandb_run: Any

    def __init__(self, sae: SparseAutoencoder, config: SAEConfig, optimizer: Any, scheduler: Any, clip: float | None):
        self.sae, self.config, self.optimizer, self.scheduler, self.clip = sae, config, optimizer, scheduler, clip
        self.steps = 0
        self.history: list[dict[str, Any]] = []

    def record(self, entry: dict[str, Any]) -> None:
        """Append an entry to the history, and pass those of epochs and of every log_interval updates on."""
        self.history.append(entry)
        if "total" in entry and self.steps % self.log_interval:
            return
        if self.wandb_run is not None:
            self.wandb_run.log(entry)
        if self.verbose:
            shown = {name: f"{value:.4g}" for name, value in entry.items() if isinstance(value, float)}
            print(f"sae step {self.steps}: " + "  ".join(f"{name} {value}" for name, value in shown.items()))

    def step(self, rows: torch.Tensor, coefficients: Coefficients, buffer: ActivationBuffer, counters: dict) -> None:
        """Make one update on rows [row, width], resample dead features if due, and append to the history."""
        usage, l1 = coefficients.usage(self.steps), coefficients.l1(self.steps)
        self.sae.set_kl_coeff(usage)
        self.sae.set_l1_coeff(l1)
        losses = self.sae.training_step(rows, self.optimizer, self.clip)
        self.steps += 1
        if self.scheduler is not None:
            self.scheduler.step()
        with torch.no_grad():
            l0 = float((self.sae(rows)[1].abs() > self.config.dead_neuron_threshold).float().mean())
        entry = {**losses, "sparsity_l0": l0, "miracle_distance": self.config.miracle(losses["mse"], l0)}
        entry |= {"sae_step": self.steps, "kl_coeff_target": usage, "kl_coeff_actual": self.sae.usage_coeff}
        entry |= {"l1_coeff_target": l1, "l1_coeff_actual": self.sae.l1_coefficient, **counters}
        entry |= {"lr": self.optimizer.param_groups[0]["lr"], "buffer_fill": len(buffer) / buffer.size}
        if self.steps in self.resample_steps:
            stored: Any = buffer.buffer
            count = self.resample(stored[: len(buffer)])
            entry |= {"resampled_neurons": count, "is_resample_step": True}
        self.record(entry)

    @torch.no_grad()
    def resample(self, rows: torch.Tensor) -> int:
        """Set the direction of every dead feature to a badly reconstructed row; return the number of dead features."""
        sae, threshold = self.sae, self.config.dead_neuron_threshold
        dead = torch.where(sae.usage_ema < threshold)[0]
        if not len(dead):
            return 0
        sample = rows[: ROWS_PER_DEAD_FEATURE * len(dead)]
        errors = (sae(sample)[0] - sample).square().mean(1)
        if not errors.sum() >= 1e-12:  # also True for NaN
            index = torch.randint(len(sample), (len(dead),), device=sample.device)
        else:
            index = torch.multinomial(errors / errors.sum(), len(dead), replacement=True)
        directions = nn.functional.normalize(sample[index], dim=1) * self.weight
        sae.encoder.weight[dead], sae.encoder.bias[dead] = directions, self.bias
        sae.decoder.weight[:, dead] = directions.T
        for parameter in (sae.encoder.weight, sae.encoder.bias):
            for name in ("exp_avg", "exp_avg_sq"):
                self.optimizer.state[parameter][name][dead] = 0.0
        alive = sae.usage_ema[sae.usage_ema > threshold]
        sae.usage_ema[dead] = alive.mean() if len(alive) else self.config.target_usage
        return len(dead)


def _judged(primary, sae, hook, val_loader, device, config: SAEConfig, vocab, counters: dict) -> list[dict[str, Any]]:
    """Return the history's entries after an epoch: validation scores and usage summary."""
    entries = []
    distance = {}
    if val_loader is not None:
        arguments = (primary, sae, hook, val_loader, device, config, vocab)
        standard, impact = evaluate_sae_model(*arguments, description="val"), evaluate_reconstruction_impact(*arguments)
        entries = [{**standard, **counters, "is_validation_standard": True}]
        entries.append({**impact, **counters, "is_validation_impact": True})
        distance = {"miracle_distance": standard["val_miracle_distance"]} if "val_miracle_distance" in standard else {}
    usage = sae.usage_ema.detach().cpu().double().numpy()
    dead = int((usage < config.dead_neuron_threshold).sum())
    summary = {**counters, "dead_neurons": dead, "active_neurons": len(usage) - dead}
    summary |= {"dead_percent": 100 * dead / len(usage), "mean_usage": float(usage.mean())}
    summary |= {"std_usage": float(usage.std()), "min_usage": float(usage.min()), "max_usage": float(usage.max())}
    summary |= {"is_epoch_summary": True, **distance}
    summary |= {f"p{q}_usage": float(np.percentile(usage, q)) for q in QUANTILES}
    return [*entries, summary]
