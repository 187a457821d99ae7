"""Golden cases of parts: router, LoRA, quantisation, schedules, early stopping, rows of text."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

from jaxtrain import nn
from jaxtrain.nn.lora import LoRALinear
from jaxtrain.systems.memory_lm.banks import dequantize, quantize
from jaxtrain.systems.memory_lm.original import torch_models
from jaxtrain.systems.memory_lm.original.inference_routers import create_inference_router
from jaxtrain.systems.memory_lm.original.schedules import original_schedule
from jaxtrain.systems.memory_lm.router import (
    ChapterRouter,
    compute_router_auxiliary_loss,
    compute_total_router_loss,
    router_losses,
)
from jaxtrain.systems.memory_lm.text_dataset import Encoder
from jaxtrain.systems.memory_lm.tokenizers import from_json
from tests.parity.memory_lm_training import SCHEDULE_KEYS
from torch_bridge.layouts import key_of
from torch_bridge.state_dict import load_state_dict


def replay_router(case: dict, tensors: dict) -> dict:
    hidden = jnp.asarray(tensors["in/hidden_states"])
    shared, window = case.get("exclude_prefix_chapters", 0), case["rolling_window_size"]
    params = {"weight": tensors["param/router.weight"], "bias": tensors["param/router.bias"]}

    def router_with(params):
        router = ChapterRouter(
            case["hidden_dim"], case["num_chapters"], case["top_k"], shared, window, rngs=nnx.Rngs(0)
        )
        router.router.weight.set_value(params["weight"])
        router.router.bias.set_value(params["bias"])
        return router

    def route(params, hidden, strategy):
        router = router_with(params)
        if strategy == "token_level":
            return router.route_tokens(hidden)
        if strategy == "token":  # the original's forward: one choice from the mean of the tokens' logits
            return router.choose(router.router(hidden).mean(1))
        return router(hidden, strategy)

    def objective(params, hidden, strategy):
        routing = route(params, hidden, strategy)
        terms = router_losses(routing)
        total = compute_total_router_loss(terms, 0.3, 0.7, 0.05)
        value = total + (routing.weights * (1 + jnp.arange(routing.weights.shape[-1]))).sum()
        return value, (routing, terms, total)

    out = {}
    gradient = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True), static_argnums=2)
    for strategy in ("sequence", "sequence-rolling", "token", "token_level"):
        (weights, inputs), (routing, terms, total) = gradient(jax.tree.map(jnp.asarray, params), hidden, strategy)
        out[f"out/{strategy}/indices"] = np.asarray(routing.indices, np.int64)
        out[f"out/{strategy}/weights"] = routing.weights
        out |= {f"loss/{strategy}/{name}": value for name, value in terms.items()}
        out[f"loss/{strategy}/total_0.3_0.7_0.05"] = total
        out[f"grad/{strategy}/hidden"] = inputs
        out |= {f"grad/{strategy}/router.{name}": value for name, value in weights.items()}
        if strategy == "token_level":
            twice = {name: 2 * value for name, value in terms.items()}
            out["loss/losses_py_mean_of_two"] = compute_router_auxiliary_loss([terms, twice, {}], 0.3, 0.7, 0.05)
    router = torch_models.ChapterRouter(case["hidden_dim"], case["num_chapters"], case["top_k"])
    router.router.load_state_dict({name: torch.tensor(value) for name, value in params.items()})
    hidden = torch.tensor(tensors["in/hidden_states"])
    for strategy in ("sequence", "sequence-rolling", "rolling", "token", "hybrid"):
        helper = create_inference_router(router, strategy, case["top_k"], window)
        first = helper.route(hidden)
        out[f"out/infer_{strategy}/indices"], out[f"out/infer_{strategy}/weights"] = first
        if strategy == "hybrid":
            helper.start_generation(hidden)
        if strategy in ("rolling", "hybrid"):
            step = helper.route(3 * hidden[:, :1])
            out[f"out/infer_{strategy}/step_indices"], out[f"out/infer_{strategy}/step_weights"] = step
    out = {key: value.detach().numpy() if isinstance(value, torch.Tensor) else value for key, value in out.items()}
    return {key: np.asarray(value, np.int64) if key.endswith("indices") else value for key, value in out.items()}


def replay_lora(case: dict, tensors: dict) -> dict:
    out = {}
    for kind in sorted({key.split("/")[1] for key in tensors if key.startswith("param/")}):
        given = {
            key.rsplit("/", 1)[1]: jnp.asarray(v) for key, v in tensors.items() if key.startswith(f"param/{kind}/")
        }
        linear = nn.Linear(case["in_features"], case["out_features"], bias="bias" in given, rngs=nnx.Rngs(0))
        layer = LoRALinear(linear, case["rank"], case["alpha"], rngs=nnx.Rngs(0))
        out[f"out/{kind}/init_lora_B"] = layer.lora_B[...]
        load_state_dict(layer, given, strict=True)
        x = jnp.asarray(tensors[f"in/{kind}/x"])
        graphdef, state = nnx.split(layer)

        names, treedef = [key_of(path) for path, _ in nnx.to_flat_state(state)], jax.tree.structure(state)

        def objective(lora, x, graphdef=graphdef, names=names, treedef=treedef, given=given):
            arrays = given | lora
            y = nnx.merge(graphdef, jax.tree.unflatten(treedef, [arrays[name] for name in names]))(x)
            return jnp.square(y).mean(), y

        gradient = jax.jit(jax.grad(objective, argnums=(0, 1), has_aux=True))
        grads, y = gradient({k: given[k] for k in ("lora_A", "lora_B")}, x)
        out |= {f"grad/{kind}/{key}": value for key, value in grads[0].items()}
        out |= {f"grad/{kind}/x": grads[1], f"out/{kind}/y": y, f"loss/{kind}": jnp.square(y).mean()}
        layer.merge()
        out |= {f"out/{kind}/merged_weight": layer.weight[...], f"out/{kind}/y_merged": layer(x)}
    return out


def replay_quantization(case: dict, tensors: dict) -> dict:
    out = {}
    for key in case["expects"]:
        kind, name = key.split("/")[1:3]
        bits = int(kind.removesuffix("bit"))
        values, scales = quantize(tensors["in/memory"], bits)
        if name == "dequantized":
            out[key] = dequantize(values, scales, bits)
        elif name == "quantized_memory":
            out[key] = values
        elif name == "scales":
            out[key] = scales
    return out


def replay_schedules(case: dict, tensors: dict) -> dict:
    out = {}
    for name, one in case["cases"].items():
        factor = original_schedule(
            one["scheduler"], one["total_steps"], **{key: one[key] for key in SCHEDULE_KEYS if key in one}
        )
        rows = case["expects"][f"out/{name}"] if isinstance(case["expects"], dict) else None
        count = rows[0] if rows else one["total_steps"] + 6
        out[f"out/{name}"] = np.array([[factor(step), 0.25 * factor(step)] for step in range(count)])
    return out


@dataclasses.dataclass
class EarlyStopping:
    """The original's rule: `best` moves on any decrease, also below the threshold, so that many small gains in a row
    stop a run although their sum exceeds it. NaN is no improvement."""

    patience: int = 5
    threshold: float = 0.0
    best: float = math.inf
    bad: int = 0

    def update(self, loss: float) -> tuple[bool, bool]:
        """Take in one evaluation: whether it is the best so far, and whether to stop."""
        is_best = loss < self.best
        self.bad = 0 if self.best - loss > self.threshold else self.bad + 1
        if is_best:
            self.best = loss
        return is_best, self.bad >= self.patience


def replay_early_stopping(case: dict, tensors: dict) -> dict:
    """The traces stand in the JSON; the tensors are placeholders, written where every trace is followed."""
    for one in case["cases"]:
        rule = EarlyStopping(one["patience"], one["threshold"])
        for point in one["trace"]:
            is_best, stop = rule.update(float(point["eval_loss"]))
            got = (is_best, rule.bad, rule.best, stop)
            wanted = (point["is_best"], point["patience"], float(point["best_loss"]), point["stop"])
            if got != wanted:
                raise ValueError(f"early stopping after {point['eval_loss']}: {got}, wanted {wanted}")
    return {key: np.zeros(shape, np.float32) for key, shape in case["expects"].items()}


def replay_data(case: dict, tensors: dict) -> dict:
    special = case["special"]
    out = {}
    for name, one in case["cases"].items():
        text = case["tokenizer_json"]
        tokenizer = from_json(
            text if isinstance(text, str) else json.dumps(text),
            eos=special.get("eos"),
            bos=special.get("bos"),
            pad=special.get("pad"),
            padding_side=special.get("padding_side", "right"),
            chat_template=one.get("chat_template"),
        )
        encoder = Encoder(tokenizer, one["max_length"], one["training_mode"], one["text_field"], original=True)
        rows = [encoder.padded(row) for row in one["rows"]]
        for key in ("input_ids", "attention_mask", "labels"):
            out[f"out/{name}/{key}"] = np.stack([row[key] for row in rows]).astype(np.int64)
    return out
