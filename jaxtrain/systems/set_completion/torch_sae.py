"""Sparse autoencoder in plain torch, and a hook that reads and edits its features inside a frozen model."""

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.systems.set_completion.sae import miracle_distance

USAGE_MEMORY = 0.99  # decay of the running average of feature usage


@dataclasses.dataclass
class SAEConfig:
    """The original's settings of a sparse autoencoder and its training; miracle_*: of `miracle_distance`.

    resample_interval, dead_neuron_steps and learning_rate are not read, as in the original.
    """

    input_dim: int
    expansion_factor: float = 8.0
    l1_coefficient: float = 1e-5
    dead_neuron_threshold: float = 1e-6
    resample_interval: int = 12_500
    learning_rate: float = 1e-4
    dead_neuron_steps: int = 12_500
    target_usage: float = 0.05
    usage_coeff: float = 1e-3
    miracle_mse_target: float = 3e-4
    miracle_sparsity_target: float = 0.09
    miracle_dead_neuron_target: float = 3.5
    miracle_mse_weight: float = 1.0
    miracle_sparsity_weight: float = 1.0
    miracle_dead_neuron_weight: float = 1.0

    def miracle(self, mse: float, l0: float) -> float:
        """Return `miracle_distance` for these targets and weights, with (1 - l0) * 100 as the dead per cent."""
        return miracle_distance(
            mse,
            l0,
            (1 - l0) * 100,
            (self.miracle_mse_target, self.miracle_sparsity_target, self.miracle_dead_neuron_target),
            (self.miracle_mse_weight, self.miracle_sparsity_weight, self.miracle_dead_neuron_weight),
        )


class SparseAutoencoder(nn.Module):
    """Autoencoder with ReLU6 features and a dictionary of unit columns.

    As in the original, the decoder gets no gradient unless train_decoder is set. top_k: keep so many features per row,
    0 keeps all. The other arguments are those of `SAEConfig`; they are attributes too.
    """

    def __init__(
        self,
        input_dim,
        expansion_factor=8,
        l1_coefficient=1e-3,
        dead_neuron_threshold=1e-6,
        dead_neuron_steps=12_500,
        target_usage=0.05,
        usage_coeff=1e-3,
        *,
        train_decoder=False,
        top_k=0,
    ):
        super().__init__()
        hidden_dim = int(input_dim * expansion_factor)
        self.input_dim, self.hidden_dim, self.expansion_factor = input_dim, hidden_dim, expansion_factor
        self.l1_coefficient, self.usage_coeff, self.target_usage = l1_coefficient, usage_coeff, target_usage
        self.dead_neuron_threshold, self.dead_neuron_steps = dead_neuron_threshold, dead_neuron_steps
        self.decoder_bias = nn.Parameter(torch.zeros(input_dim))
        self.register_buffer("usage_ema", torch.zeros(hidden_dim))
        self.encoder = nn.Linear(input_dim, hidden_dim)
        self.decoder = nn.Linear(hidden_dim, input_dim)
        for layer in (self.encoder, self.decoder):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(self.encoder.bias)
        self.train_decoder, self.top_k = train_decoder, top_k
        self.normalize_decoder()

    def set_kl_coeff(self, coeff: float) -> None:
        """Set the coefficient of the usage penalty, `usage_coeff`."""
        self.usage_coeff = coeff

    def set_l1_coeff(self, coeff: float) -> None:
        """Set the coefficient of the L1 norm, `l1_coefficient`."""
        self.l1_coefficient = coeff

    @torch.no_grad()
    def normalize_decoder(self):
        """Scale the dictionary's columns to unit length."""
        self.decoder.weight.copy_(functional.normalize(self.decoder.weight, dim=0))

    def directions(self):
        weight = self.decoder.weight if self.train_decoder else self.decoder.weight.detach()
        return functional.normalize(weight, dim=0)

    def encode(self, x):
        """Return the features before and after the activation, both [..., hidden_dim]."""
        h_pre = self.encoder(x - self.decoder_bias)
        h = functional.relu(h_pre).clamp(0, 6)
        if self.top_k:
            h = torch.where(h >= h.topk(self.top_k, dim=-1).values[..., -1:], h, 0.0)
        return h_pre, h

    def decode(self, h):
        return h @ self.directions().T + self.decoder_bias

    def forward(self, x):
        """Return (reconstruction, features)."""
        h = self.encode(x)[1]
        return self.decode(h), h

    def compute_loss(self, x, reconstruction, hidden) -> tuple[torch.Tensor, dict[str, float]]:
        """Return mse + l1_coefficient * l1 + usage_coeff * KL of usage, and its terms; updates usage_ema."""
        mse = (reconstruction - x).square().mean()
        l1 = hidden.abs().sum(1).mean()
        with torch.no_grad():
            usage = (hidden.flatten(0, -2) > 0).float().mean(0)
            self.usage_ema.mul_(USAGE_MEMORY).add_(usage, alpha=1 - USAGE_MEMORY)
            rho, p = self.target_usage, self.usage_ema.clamp(1e-7, 1 - 1e-7)
            kl = (rho * torch.log(rho / p) + (1 - rho) * torch.log((1 - rho) / (1 - p))).mean()
        total = mse + self.l1_coefficient * l1 + self.usage_coeff * kl
        terms = {"total": total, "mse": mse, "l1": l1, "kl_usage": kl}
        return total, {name: value.item() for name, value in terms.items()}

    def training_step(self, x, optimizer, gradient_clip_val: float | None = None) -> dict[str, float]:
        """Make one update on rows x: loss, backward, clipping, step, unit columns; return the loss terms."""
        total, terms = self.compute_loss(x, *self(x))
        optimizer.zero_grad()
        total.backward()
        self.remove_parallel_gradients()
        if gradient_clip_val is not None:
            nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)
        optimizer.step()
        self.normalize_decoder()
        return terms

    @torch.no_grad()
    def remove_parallel_gradients(self) -> None:
        """Remove the component along each unit column from the decoder's gradient, if it has one."""
        if self.decoder.weight.grad is not None:
            unit, gradient = functional.normalize(self.decoder.weight, dim=0), self.decoder.weight.grad
            gradient.sub_((gradient * unit).sum(0, keepdim=True) * unit)

    def get_dead_neurons(self, threshold: float = 1e-6) -> torch.Tensor:
        """Return the indices of features whose average usage is below `threshold`."""
        return torch.where(self.usage_ema < threshold)[0]


class SetCompletionHook:
    """Forward pre-hook that passes the autoencoder's reconstruction to a model's output layer, with one feature edited.

    Register it: `model.output_layer.register_forward_pre_hook(hook)`. bypass: change and record nothing. no_change:
    record `last_in`, `last_h_pre`, `last_h_post` and change nothing. `last_x_recon`: the reconstruction passed on.
    `idx` and `value` are the edited feature and its value. Raises IndexError for a feature out of range.
    """

    def __init__(
        self,
        sae_model: SparseAutoencoder,
        neuron_number: int | None = None,
        neuron_value: float | None = None,
        bypass: bool = False,
        no_change: bool = False,
    ):
        self.sae, self.idx, self.value = sae_model, neuron_number, neuron_value
        self.bypass, self.no_change = bypass, no_change
        self.last_in = self.last_h_pre = self.last_h_post = self.last_x_recon = None

    def update_neuron(self, neuron_number: int | None, neuron_value: float | None) -> None:
        """Set a feature to a value from now on; switches bypass and no_change off."""
        self.idx, self.value = neuron_number, neuron_value
        self.bypass = self.no_change = False

    def clear_edit(self) -> None:
        self.idx = self.value = None

    def set_mode(self, *, bypass: bool | None = None, no_change: bool | None = None) -> None:
        """Set one or both of the switches; None leaves a switch as it is."""
        self.bypass = self.bypass if bypass is None else bypass
        self.no_change = self.no_change if no_change is None else no_change

    @property
    def mode_str(self) -> str:
        """Return what a call does: bypass, no_change, edit or reconstruct."""
        if self.bypass or self.no_change:
            return "bypass" if self.bypass else "no_change"
        return "reconstruct" if self.idx is None or self.value is None else "edit"

    @torch.no_grad()
    def __call__(self, module: nn.Module, inputs: tuple) -> Any:
        if self.bypass:
            return None
        (x, *rest) = inputs
        self.last_in = x
        self.last_h_pre, self.last_h_post = self.sae.encode(x)
        self.last_x_recon = None
        if self.no_change:
            return None
        h = self.last_h_post
        if self.idx is not None and self.value is not None:
            if self.idx >= h.shape[-1]:
                raise IndexError(f"neuron {self.idx}: the autoencoder has {h.shape[-1]}, numbered from 0")
            h = h.clone()
            h[:, self.idx] = self.value
        self.last_x_recon = self.sae.decode(h)
        return (self.last_x_recon, *rest)


def register_hooks(
    primary_model: nn.Module,
    sae_model: SparseAutoencoder,
    neuron_number: int | None = None,
    neuron_value: float | None = None,
    bypass: bool = False,
    no_change: bool = False,
) -> tuple[SetCompletionHook, Any]:
    """Register a SetCompletionHook on a model's output layer; return it and the handle whose `remove()` undoes it."""
    hook = SetCompletionHook(sae_model, neuron_number, neuron_value, bypass, no_change)
    return hook, primary_model.output_layer.register_forward_pre_hook(hook)
