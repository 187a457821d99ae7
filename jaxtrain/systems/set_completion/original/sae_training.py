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
    setup_hook,
)
from jaxtrain.systems.set_completion.sae import ROWS_PER_DEAD_FEATURE, miracle_distance, original_total_steps
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
    sae_config: SAEConfig | None,
    train_dl: Any,
    val_dl: Any = None,
    vocab: Mapping[str, int] | None = None,
    pad_token: str = "<PAD>",
    *,
    hook: ActivationHook | None = None,
    num_epochs: int = 10,
    lr: float = 1e-5,
    buffer_size: int = 100_000,
    sae_batch_size: int = 1024,
    steps_before_train: int = 50_000,
    sae_train_steps: int = 4,
    gradient_clip_val: float | None = 1.0,
    resample_steps: Sequence[int] = (7000, 14000, 28000),
    resample_weight: float = 0.2,
    resample_bias: float = 0.0,
    kl_warmup_steps: int = 6000,
    kl_period_steps: int = 60_000,
    kl_floor: float = 0.05,
    l1_warmup_steps: int = 6000,
    l1_start: float = 0.0,
    exact_fill_bug: bool = False,
) -> tuple[list[dict[str, Any]], SparseAutoencoder]:
    """Train sae_model on the pooled vectors of primary_model, which does not change; return (history, sae_model).

    train_dl: batches (inputs, weapons, ...). val_dl: batches that include targets, evaluated after every epoch.
    sae_config: base values of the coefficients and the threshold of a dead feature; by default the autoencoder's. hook:
    a result of `setup_hook`; by default that of the pooled vectors. steps_before_train: rows in the buffer before the
    first update; then every batch makes sae_train_steps updates, with a cosine learning rate down to a tenth.
    resample_steps: updates after which dead features are reinitialised. exact_fill_bug: see ActivationBuffer. history:
    a dict per update, then per epoch the entries is_validation_standard, is_validation_impact and is_epoch_summary.
    """
    run = _Run(sae_model, sae_config, lr, gradient_clip_val, resample_steps, resample_weight, resample_bias)
    base = run.config
    coefficients = Coefficients(
        base.l1_coefficient, l1_start, l1_warmup_steps, base.usage_coeff, kl_floor, kl_warmup_steps, kl_period_steps
    )
    pad = padding_of(primary_model, vocab, pad_token)
    device: Any = sae_model.decoder_bias.device
    buffer = ActivationBuffer(buffer_size, sae_model.input_dim, device, exact_fill_bug)
    own, training = setup_hook(primary_model) if hook is None else hook, primary_model.training
    primary_model.eval()
    sae_model.train()
    global_step = 0
    try:
        for epoch in range(1, num_epochs + 1):
            for x, _, batch in Activations(primary_model, train_dl, pad, own):
                global_step += 1
                if run.scheduler is None:
                    rows = getattr(train_dl, "batch_size", None) or len(batch[0])
                    counts = (num_epochs, len(train_dl), rows, steps_before_train, sae_train_steps)
                    run.plan(original_total_steps(*counts))
                if x is None or x.ndim != 2 or x.shape[1] != sae_model.input_dim:
                    continue
                buffer.add(x)
                if len(buffer) < steps_before_train:
                    continue
                for rows in _drawn(buffer, sae_batch_size, sae_train_steps):
                    run.step(rows, coefficients, buffer, {"epoch": epoch, "global_step": global_step})
            place = {"epoch": epoch, "sae_step": run.steps, "global_step": global_step}
            run.history += _judged(primary_model, sae_model, val_dl, vocab, pad_token, base, place)
    finally:
        primary_model.train(training)
        if hook is None:
            own.remove()
    return run.history, sae_model


def _drawn(buffer: ActivationBuffer, batch_size: int, count: int) -> Iterable[torch.Tensor]:
    """Yield `count` batches of the shuffled buffer; it is shuffled again when exhausted."""
    given = 0
    while given < count:
        loader: Any = buffer.get_loader(batch_size, shuffle=True)
        for rows in loader:
            yield rows
            given += 1
            if given == count:
                return


class _Run:
    """Training state: the autoencoder, its optimizer and schedule, and the history."""

    def __init__(self, sae, config, lr, clip, resample_steps, resample_weight, resample_bias):
        names = [field.name for field in dataclasses.fields(SAEConfig)]
        self.sae, self.lr, self.clip = sae, lr, clip
        self.config = config or SAEConfig(**{name: getattr(sae, name) for name in names})
        self.resample_steps, self.weight, self.bias = frozenset(resample_steps), resample_weight, resample_bias
        self.optimizer = torch.optim.AdamW(sae.parameters(), lr=lr)
        self.scheduler: Any = None  # set by plan()
        self.steps = 0
        self.history: list[dict[str, Any]] = []

    def plan(self, total_steps: int) -> None:
        make = torch.optim.lr_scheduler.CosineAnnealingLR
        self.scheduler = make(self.optimizer, T_max=max(1, total_steps), eta_min=0.1 * self.lr)

    def step(self, rows: torch.Tensor, coefficients: Coefficients, buffer: ActivationBuffer, place: dict) -> None:
        """Make one update on rows [row, width], resample dead features if due, and append to the history."""
        usage, l1 = coefficients.usage(self.steps), coefficients.l1(self.steps)
        self.sae.usage_coeff, self.sae.l1_coefficient = usage, l1
        found = self.sae.training_step(rows, self.optimizer, self.clip)
        self.steps += 1
        self.scheduler.step()
        with torch.no_grad():
            l0 = float((self.sae(rows)[1].abs() > self.config.dead_neuron_threshold).float().mean())
        entry = {**found, "sparsity_l0": l0, "miracle_distance": miracle_distance(found["mse"], l0, (1 - l0) * 100)}
        entry |= {"sae_step": self.steps, "kl_coeff_target": usage, "kl_coeff_actual": self.sae.usage_coeff}
        entry |= {"l1_coeff_target": l1, "l1_coeff_actual": self.sae.l1_coefficient, **place}
        entry |= {"lr": self.scheduler.get_last_lr()[0], "buffer_fill": len(buffer) / buffer.size}
        if self.steps in self.resample_steps:
            stored: Any = buffer.buffer
            count = self.resample(stored[: len(buffer)])
            entry |= {"resampled_neurons": count, "is_resample_step": True}
        self.history.append(entry)

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


def _judged(primary, sae, val_dl, vocab, pad_token, config: SAEConfig, place: dict) -> list[dict[str, Any]]:
    """Return the history's entries after an epoch: validation scores and usage summary."""
    found = []
    distance = {}
    if val_dl is not None:
        standard = evaluate_sae_model(primary, sae, val_dl, vocab, pad_token, "val", config.dead_neuron_threshold)
        impact = evaluate_reconstruction_impact(primary, sae, val_dl, vocab, pad_token)
        found = [{**standard, **place, "is_validation_standard": True}]
        found.append({**impact, **place, "is_validation_impact": True})
        distance = {"miracle_distance": standard["val_miracle_distance"]} if "val_miracle_distance" in standard else {}
    usage = sae.usage_ema.detach().cpu().double().numpy()
    dead = int((usage < config.dead_neuron_threshold).sum())
    summary = {**place, "dead_neurons": dead, "active_neurons": len(usage) - dead}
    summary |= {"dead_percent": 100 * dead / len(usage), "mean_usage": float(usage.mean())}
    summary |= {"std_usage": float(usage.std()), "min_usage": float(usage.min()), "max_usage": float(usage.max())}
    summary |= {"is_epoch_summary": True, **distance}
    summary |= {f"p{q}_usage": float(np.percentile(usage, q)) for q in QUANTILES}
    return [*found, summary]
