"""The task's networks in plain torch; they load an exported state dict with strict=True."""

import torch
from torch import nn
from torch.nn import functional

from jaxtrain.systems.set_completion.torch_buffer import ActivationBuffer
from jaxtrain.systems.set_completion.torch_model import SetCompletionModel
from jaxtrain.systems.set_completion.torch_sae import SparseAutoencoder


class FeatureModel(nn.Module):
    """Frozen model and autoencoder on its pooled vectors, as the `sae` task exports them.

    recent: buffer of the last batches' pooled vectors, for training only.
    """

    def __init__(self, primary, sae, recent):
        super().__init__()
        self.primary, self.sae, self.recent = primary, sae, recent

    def train(self, mode=True):
        super().train(mode)
        self.primary.eval()  # it is frozen, and runs without dropout
        return self


def build(config):
    return SetCompletionModel(**config.model.arguments())


def build_features(config):
    settings = config.sae
    trained = settings.train_decoder and config.compat != "original"
    options = {"train_decoder": trained, "top_k": settings.top_k}
    sae = SparseAutoencoder(config.model.hidden_dim, settings.expansion_factor, **options)
    return FeatureModel(build(config), sae, ActivationBuffer(settings.buffer_size, device=None))


def inputs_of(module, batch):
    """Return token ids, weapons, the padding mask (-1 and <PAD>), and a mask of rows with a token, from a batch."""
    ids = (batch["inputs"] if "inputs" in batch else batch["targets"]).long()
    pad = module.ability_embedding.padding_idx
    hidden = (ids < 0) | (ids == pad) if pad is not None else ids < 0
    empty = hidden.all(1)
    hidden[:, 0] &= ~empty  # a row of padding only is computed on a dummy token and excluded later
    return torch.where(ids < 0, pad or 0, ids), batch["weapon"].long(), hidden, ~empty


def call(module, batch):
    tokens, weapon, hidden, _ = inputs_of(module, batch)
    pooled = module.pooled(tokens, weapon, hidden)
    return {"logits": module.output_layer(pooled), "pooled": pooled}


def multi_hot(ids, size, pad):
    """Return float [batch, size] with 1 for each id of the row; -1 and `pad` are ignored."""
    ids = ids.long()
    known = (ids >= 0) & (ids != pad) if pad is not None else ids >= 0
    target = torch.zeros(len(ids), size, device=ids.device)
    return target.scatter_add_(1, ids.clamp(min=0), known.float()).clamp_(max=1)


def as_evaluated(module, batch, config):
    """Mask an unmasked batch (of the training split) in evaluation, as `losses.visible_ids` does."""
    if module.training or "inputs" in batch:
        return batch
    from jaxtrain.systems.set_completion.losses import visible_ids

    ids = visible_ids({name: batch[name].cpu().numpy() for name in ("targets", "index")}, config, None)
    return {**batch, "inputs": torch.tensor(ids.tolist(), device=batch["targets"].device)}


def loss(module, batch, config):
    tokens, weapon, hidden, present = inputs_of(module, as_evaluated(module, batch, config))
    logits = module(tokens, weapon, hidden)
    target = multi_hot(batch["targets"], logits.shape[1], config.model.padding)
    rows = functional.binary_cross_entropy_with_logits(logits, target, reduction="none").mean(1)
    counted = present & batch["valid"].bool()
    return torch.where(counted, rows, 0.0).sum() / counted.sum()  # fixed shapes, which torch.compile takes whole


def call_features(module, batch):
    tokens, weapon, hidden, _ = inputs_of(module.primary, batch)
    pooled = module.primary.pooled(tokens, weapon, hidden)
    reconstruction, h = module.sae(pooled)
    output_layer = module.primary.output_layer
    return {
        "pooled": pooled,
        "reconstruction": reconstruction,
        "features": h,
        "logits": output_layer(pooled),
        "reconstructed_logits": output_layer(reconstruction),
    }


def inputs_features(batch, config):
    """Add the places of the rows that count."""
    ids, pad = batch["inputs"] if "inputs" in batch else batch["targets"], config.model.padding
    shown = (ids >= 0) if pad is None else (ids >= 0) & (ids != pad)
    return {**batch, "rows": _rows(shown.any(1) & batch["valid"].bool())}


def _rows(counted: torch.Tensor) -> torch.Tensor:
    return counted.nonzero()[:, 0]


def loss_features(module, batch, config):
    """Return the autoencoder's loss with the config's base coefficients.

    In evaluation it is on the batch's own pooled vectors. In training they go into the buffer and the loss is on rows
    of it, or 0 until it holds sae.steps_before_train rows; usage_ema is updated.
    """
    settings, sae = config.sae, module.sae
    with torch.no_grad():
        tokens, weapon, hidden, present = inputs_of(module.primary, as_evaluated(module, batch, config))
        rows = batch["rows"] if "rows" in batch else _rows(present & batch["valid"].bool())
        x = module.primary.pooled(tokens, weapon, hidden)[rows]
    if module.training:
        module.recent.add(x)
        if len(module.recent) < settings.steps_before_train:
            return 0.0 * sae.encoder.bias.sum()
        x = module.recent.sample(settings.batch_size)
    reconstruction, h = sae(x)
    if module.training:
        sae.usage_ema.lerp_((h > 0).float().mean(0).detach(), 0.01)
    rho, p = settings.target_usage, sae.usage_ema.clamp(1e-7, 1 - 1e-7)
    usage = (rho * torch.log(rho / p) + (1 - rho) * torch.log((1 - rho) / (1 - p))).mean()
    mse = (reconstruction - x).square().mean()
    return mse + settings.l1_coefficient * h.abs().sum(1).mean() + settings.usage_coefficient * usage


def after_update_features(module, updates, config):
    """Renormalise the decoder's columns. Dead features are not resampled here."""
    module.sae.normalize_decoder()
