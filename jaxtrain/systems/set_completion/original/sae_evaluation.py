"""Score how well an autoencoder reconstructs a model's pooled vectors, with the original's metrics, in torch."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.errors import UserError
from jaxtrain.systems.set_completion.torch_sae import SAEConfig, SparseAutoencoder
from jaxtrain.systems.set_completion.vocabulary import PAD

TARGETS = ("masked_mean", "token_ff")


class ActivationHook:
    """Forward hook that keeps a module's input or output of the last call as `activation`; `remove()` removes it."""

    def __init__(self, module: Any, before: bool):
        self.activation: torch.Tensor | None = None
        if before:
            self.handle = module.register_forward_pre_hook(lambda _, inputs: self._keep(inputs[0]))
        else:
            self.handle = module.register_forward_hook(lambda _, inputs, output: self._keep(output))

    def _keep(self, tensor: Any) -> None:
        self.activation = tensor.detach()

    def remove(self) -> None:
        self.handle.remove()


def setup_hook(
    model: Any,
    layer_index: int | None = None,
    feedforward_module_index: int | None = None,
    *,
    target: str = "masked_mean",
) -> ActivationHook:
    """Register and return an ActivationHook; the last layer and the last module of its feedforward if not numbered.

    target: masked_mean records the pooled vector [batch, hidden], the input of output_layer; token_ff the output
    [batch, token, width] of a module of a layer's feedforward, on which `train_sae_model` does not train. Raises
    UserError for another target.
    """
    if target not in TARGETS:
        raise UserError(f"target: got {target!r}, wanted one of {', '.join(TARGETS)}")
    if target == "masked_mean":
        return ActivationHook(model.output_layer, before=True)
    layer = model.transformer_layers[-1 if layer_index is None else layer_index]
    inner = -1 if feedforward_module_index is None else feedforward_module_index
    return ActivationHook(layer.feedforward[inner], before=False)


def padding_of(vocab: Mapping[str, int]) -> int:
    """Return the id of <PAD>. Raises UserError if the vocabulary lacks it."""
    if PAD not in vocab:
        raise UserError(f"vocab lacks {PAD!r}, which marks padding")
    return vocab[PAD]


class Activations:
    """Iterate over (hooked activations, logits, batch) of a loader's batches, whose tensors go to `device`."""

    def __init__(self, model: Any, batches: Iterable, pad: int, hook: ActivationHook, device: Any):
        self.model, self.batches, self.pad, self.hook, self.device = model, batches, pad, hook, device

    def __iter__(self) -> Iterator[tuple[Any, torch.Tensor, Sequence]]:
        for batch in self.batches:
            inputs, weapons = batch[0].to(self.device), batch[1].to(self.device)
            self.hook.activation = None
            with torch.no_grad():
                logits = self.model(inputs, weapons, key_padding_mask=inputs == self.pad)
            yield self.hook.activation, logits, batch


@contextlib.contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Set modules to eval mode, without gradients, inside the context; restore each module's mode afterwards."""
    modes = [module.training for module in modules]
    for module in modules:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.train(mode)


class _Sums:
    """Running means of named numbers, weighted by the number of rows of each call."""

    def __init__(self):
        self.sums: dict[str, float] = {}
        self.rows = self.batches = 0

    def add(self, rows: int, **values: Any) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value) * rows
        self.rows += rows

    def means(self) -> dict[str, float]:
        return {name: total / max(1, self.rows) for name, total in self.sums.items()}


def evaluate_sae_model(
    primary_model: Any,
    sae_model: SparseAutoencoder,
    hook: ActivationHook,
    data_loader: Iterable,
    device: Any,
    sae_config: SAEConfig,
    vocab: Mapping[str, int],
    description: str = "Validation",
) -> dict[str, float]:
    """Score the reconstructions of the vectors that `hook` records in a loader's batches (inputs, weapons, ...).

    sae_config: its dead_neuron_threshold and its targets of the miracle distance count.
    Returns <description>_mse_loss, _l1_loss (mean L1 norm of a row's features), _l0_sparsity (share of features above
    the threshold), _feature_magnitude, _miracle_distance, num_eval_batches, num_eval_activations; means are over rows.
    """
    sums = _Sums()
    with evaluating(primary_model, sae_model):
        for x, _, _ in Activations(primary_model, data_loader, padding_of(vocab), hook, device):
            reconstruction, h = sae_model(x)
            size = h.abs()
            sums.add(
                len(x),
                mse_loss=(reconstruction - x).square().mean(),
                l1_loss=size.sum(1).mean(),
                l0_sparsity=(size > sae_config.dead_neuron_threshold).float().mean(),
                feature_magnitude=size.mean(),
            )
            sums.batches += 1
    metrics = sums.means()
    if metrics:
        metrics["miracle_distance"] = sae_config.miracle(metrics["mse_loss"], metrics["l0_sparsity"])
    named = {f"{description.lower()}_{name}": value for name, value in metrics.items()}
    return {**named, "num_eval_batches": sums.batches, "num_eval_activations": sums.rows}


def evaluate_reconstruction_impact(
    primary_model: Any,
    sae_model: SparseAutoencoder,
    hook: ActivationHook,
    data_loader: Iterable,
    device: Any,
    sae_config: SAEConfig,
    vocab: Mapping[str, int],
    description: str = "Reconstruction Impact Eval",
) -> dict[str, float]:
    """Compare the model's logits with those from reconstructed pooled vectors, the inputs of its output layer.

    hook: records those vectors. sae_config, description: not used, as the keys have no prefix. Returns mean squared
    error, cosine similarity, KL in nats, and cross-entropy and top-1 accuracy against the first id of each target set.
    Batches: (inputs, weapons, targets, ...).
    """
    pad = padding_of(vocab)
    all_rows, scored = _Sums(), _Sums()
    with evaluating(primary_model, sae_model):
        for x, logits, batch in Activations(primary_model, data_loader, pad, hook, device):
            other = primary_model.output_layer(sae_model(x)[0])
            log_p, log_q = logits.log_softmax(-1), other.log_softmax(-1)
            all_rows.add(
                len(x),
                logit_mse=(logits - other).square().mean(),
                logit_cosine_similarity=functional.cosine_similarity(logits, other, dim=-1, eps=1e-8).mean(),
                logit_kl_divergence=functional.kl_div(log_q, log_p, reduction="batchmean", log_target=True),
            )
            all_rows.batches += 1
            first = batch[2][:, 0].to(logits.device)
            known = first != pad
            if known.any():
                first, logits, other = first[known], logits[known], other[known]
                scored.add(len(first), **_against(first, logits, other))
    metrics = {**all_rows.means(), **scored.means()}
    counts = {"num_eval_batches": all_rows.batches, "num_eval_samples": all_rows.rows}
    metrics |= {**counts, "num_valid_loss_acc_samples": scored.rows}
    if scored.rows:
        metrics["ce_loss_increase"] = metrics["reconstructed_ce_loss"] - metrics["original_ce_loss"]
        metrics["ce_loss_increase_percent"] = (
            100 * metrics["ce_loss_increase"] / max(metrics["original_ce_loss"], 1e-12)
        )
    return metrics


def _against(first: torch.Tensor, logits: torch.Tensor, other: torch.Tensor) -> dict[str, torch.Tensor]:
    best, other_best = logits.argmax(-1), other.argmax(-1)
    return {
        "original_ce_loss": functional.cross_entropy(logits, first),
        "reconstructed_ce_loss": functional.cross_entropy(other, first),
        "original_top1_accuracy": (best == first).float().mean(),
        "reconstructed_top1_accuracy": (other_best == first).float().mean(),
        "top1_prediction_match_rate": (best == other_best).float().mean(),
    }
