"""The models, batches and settings of golden cases; a fresh memory adds nothing."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.systems.memory_lm import losses
from jaxtrain.systems.memory_lm.adapter import MemoryAdapter
from jaxtrain.systems.memory_lm.backbone_config import read_config
from jaxtrain.systems.memory_lm.config import LossSection, Memory, Model
from jaxtrain.systems.memory_lm.model import MemoryTransformer
from jaxtrain.systems.memory_lm.param_groups import trainable
from torch_bridge.layouts import key_of, named_variables, parameter_order
from torch_bridge.state_dict import load_state_dict, state_dict


class Settings:
    """What the task's functions read from a config."""

    def __init__(self, case: dict):
        config = case["config"]
        self.training = config.get("training", {})
        hf = case.get("hf_config")
        given = {key: value for key, value in config["model"].items() if key in Model.model_fields}
        self.model = Model(**(given | ({"base_config": hf} if hf else {})))
        self.memory = Memory(**config["memory"])
        self.loss = LossSection()
        self.compat = "original"
        self.adapter = hf is not None


def make_model(settings: Settings, state: dict | None):
    def build():
        if settings.adapter:
            config = read_config(settings.model.base_config)
            return MemoryAdapter(config, settings.memory, settings.model.dropout, rngs=nnx.Rngs(0))
        return MemoryTransformer(settings.model, settings.memory, rngs=nnx.Rngs(0), guard=False)

    model = nnx.merge(*nnx.split(nnx.eval_shape(build))) if state is not None else build()
    if state is not None:
        for _, variable in named_variables(model):
            variable.set_value(jnp.zeros(variable.shape, variable.dtype))
        load_state_dict(model, state, strict=True)
    return model


def given_state(tensors: dict) -> dict:
    return {key.removeprefix("param/"): value for key, value in tensors.items() if key.startswith("param/")}


class Functional:
    """A model as a function of its parameters, by torch key, tied ones once."""

    def __init__(self, model, settings: Settings):
        self.graphdef, state = nnx.split(model)
        self.treedef = jax.tree.structure(state)
        variables = dict(named_variables(model))
        first: dict[int, str] = {}
        for key in parameter_order(model):
            first.setdefault(id(variables[key]), key)
        self.keys = [first.get(id(variables[key_of(path)]), key_of(path)) for path, _ in nnx.to_flat_state(state)]
        self.arrays = {key: value.get_value() for key, value in variables.items()}
        self.params = {key: self.arrays[key] for key in parameter_order(model) if trainable(key, settings)}

    def __call__(self, params):
        arrays = self.arrays | params
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, [arrays[key] for key in self.keys]))


def batch_of(tensors: dict, prefix: str = "in/") -> dict:
    ids = tensors[f"{prefix}input_ids"]
    mask = tensors.get(f"{prefix}attention_mask")
    batch = {"input_ids": ids, "valid": np.ones(len(ids), bool)}
    batch["attention_mask"] = np.ones_like(ids) if mask is None else mask
    batch["labels"] = tensors.get(f"{prefix}labels", np.full_like(ids, losses.IGNORE))
    return {
        key: jnp.asarray(value.astype(np.int32) if value.dtype == np.int64 else value) for key, value in batch.items()
    }


def original_mean(loss):
    """torch's cross_entropy is NaN where no label is left."""
    return jnp.where(loss.weight > 0, loss.value, jnp.nan)


def router_outputs(prefix: str, routing: dict) -> dict:
    out = {f"{prefix}/{layer}/indices": np.asarray(one.indices, np.int64) for layer, one in routing.items()}
    return out | {f"{prefix}/{layer}/weights": one.weights for layer, one in routing.items()}


def replay_zero_memory(case: dict, tensors: dict) -> dict:
    settings = Settings(case)
    state = given_state(tensors)
    batch = batch_of(tensors)
    out = {"out/eval_logits": make_model(settings, state).logits(batch["input_ids"], batch["attention_mask"])}
    settings.memory = settings.memory.model_copy(update={"vanilla_mode": True})
    plain = make_model(settings, None)
    load_state_dict(plain, {key: state[key] for key in state_dict(plain)}, strict=True)
    out["out/vanilla_logits"] = plain.logits(batch["input_ids"], batch["attention_mask"])
    return out
