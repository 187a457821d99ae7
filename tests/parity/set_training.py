"""Build set_completion's models with recorded weights, and train them by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import OptimConfig
from jaxtrain.optim import optimizer as optimizers
from jaxtrain.systems.set_completion.model import SetCompletionModel
from jaxtrain.systems.set_completion.sae import (
    SparseAutoencoder,
)
from jaxtrain.train.step.state import ModelDef
from torch_bridge.state_dict import load_state_dict

SAE_UNTRAINED = ("decoder.weight", "decoder.bias")


def group(tensors, prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def prefixed(prefix: str, values) -> dict:
    return {f"{prefix}{key}": value for key, value in values.items()}


def build_model(config: dict, params: dict) -> SetCompletionModel:
    model = SetCompletionModel(**config, rngs=nnx.Rngs(0))
    load_state_dict(model, params)
    return model


def build_sae(config: dict, params: dict, input_dim: int | None = None) -> SparseAutoencoder:
    sae = SparseAutoencoder(config.get("input_dim", input_dim), config["expansion_factor"], rngs=nnx.Rngs(0))
    load_state_dict(sae, params)
    return sae


class Training:
    """A model, its optimizer and their state, stepped by the core's own optimizer."""

    def __init__(self, model, *, lr, weight_decay, clip_norm, beta1=0.9, beta2=0.999, eps=1e-8, untrained=()):
        self.model_def = ModelDef.of(model, lambda key: key not in untrained)
        self.params, self.frozen, self.buffers = self.model_def.split(model)
        config = OptimConfig(lr=lr, weight_decay=weight_decay, clip_norm=clip_norm, beta1=beta1, beta2=beta2, eps=eps)
        self.optimizer = optimizers.build(config, self.params, lambda key: "default")
        self.opt_state = self.optimizer.init(self.params)
        self.lr, self.weight_decay = lr, weight_decay
        self._jitted = {}

    def model(self):
        return self.model_def.merge(self.params, self.frozen, self.buffers)

    def take(self, model) -> None:
        self.params, self.frozen, self.buffers = self.model_def.split(model)

    def step(self, loss_fn, *batch, after=None):
        """One update with loss_fn(model, *batch) -> (loss, aux); the loss, aux, gradients and their norm."""
        key = (loss_fn, after)
        if key not in self._jitted:
            self._jitted[key] = jax.jit(lambda *arguments: self._update(loss_fn, after, *arguments))
        new, result = self._jitted[key](self.params, self.frozen, self.buffers, self.opt_state, self.lr, *batch)
        self.params, self.frozen, self.buffers, self.opt_state = new
        return result

    def _update(self, loss_fn, after, params, frozen, buffers, opt_state, lr, *batch):
        def value(params):
            model = self.model_def.merge(params, frozen, buffers)
            loss, aux = loss_fn(model, *batch)
            return loss, (aux, self.model_def.split(model)[2])

        (loss, (aux, buffers)), grads = jax.value_and_grad(value, has_aux=True)(params)
        rates = {"default": lr}, {"default": jnp.float32(self.weight_decay)}
        params, opt_state, norm = self.optimizer.update(grads, opt_state, params, *rates)
        if after is not None:
            model = self.model_def.merge(params, frozen, buffers)
            after(model)
            params, frozen, buffers = self.model_def.split(model)
        return (params, frozen, buffers, opt_state), (loss, aux, grads, norm)


def optimizer_of(given: dict) -> dict:
    beta1, beta2 = given.get("betas", (0.9, 0.999))
    clip = given.get("clip_grad_norm", given.get("gradient_clip_val"))
    return {
        "lr": given["lr"],
        "weight_decay": given["weight_decay"],
        "clip_norm": clip,
        "beta1": beta1,
        "beta2": beta2,
        "eps": given.get("eps", 1e-8),
    }


def numbered(tensors, stem: str) -> list[dict]:
    count = len({key.split(".")[0] for key in tensors if re.match(rf"in/{stem}\d+\.", key)})
    return [group(tensors, f"in/{stem}{i}.") for i in range(count)]
