"""Golden cases of memory_lm: recipes from a case's JSON, parameters and inputs to every output it expects."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain import nn
from jaxtrain.config import OptimConfig
from jaxtrain.optim import optimizer as optimizers
from jaxtrain.optim import original_schedules
from jaxtrain.systems.memory_lm import decoding, losses
from jaxtrain.systems.memory_lm.adapter import MemoryAdapter
from jaxtrain.systems.memory_lm.backbone_config import read_config
from jaxtrain.systems.memory_lm.config import LossSection, Memory, Model
from jaxtrain.systems.memory_lm.grouping import param_group, trainable
from jaxtrain.systems.memory_lm.inference_routers import create_inference_router
from jaxtrain.systems.memory_lm.lora import LoRALinear
from jaxtrain.systems.memory_lm.model import MemoryTransformer
from jaxtrain.systems.memory_lm.quantization import dequantize, quantize
from jaxtrain.systems.memory_lm.router import (
    ChapterRouter,
    compute_router_auxiliary_loss,
    compute_total_router_loss,
    router_losses,
)
from torch_bridge.layouts import key_of, named_variables, parameter_order
from torch_bridge.state_dict import load_state_dict, state_dict

SCHEDULE_KEYS = (
    "warmup_steps",
    "warmup_ratio",
    "min_lr_ratio",
    "decay_start_step",
    "decay_start_ratio",
    "wsd_stable_steps",
    "wsd_stable_ratio",
)


def claims(name: str, case: dict) -> bool:
    return recipe_of(case) is not None


def recipe_of(case: dict):
    """The function that replays a case, by what its JSON holds."""
    config = case.get("config")
    whole = isinstance(config, dict) and {"model", "memory"} <= set(config)
    expects = case.get("expects", ())
    if whole and "strategies" in case:
        return _decode
    if whole and "prompts" in case:
        return _generate
    if whole and any(key.startswith("out/vanilla_logits") for key in expects):
        return _zero_memory
    if whole and "min_lr" in case and "max_lr" in case:
        return _lr_finder
    if whole and any("micro_losses" in key for key in expects):
        return _trainer
    if whole and any(key.startswith(("out/eval_logits", "loss/train")) for key in expects):
        return _model
    if {"num_chapters", "top_k", "hidden_dim"} <= set(case):
        return _router
    if {"rank", "alpha", "in_features"} <= set(case):
        return _lora
    if any(key.endswith("dequantized") for key in expects):
        return _quantization
    if "tokenizer_json" in case:
        return _data
    cases = case.get("cases")
    if isinstance(cases, dict) and cases and all("min_lr_ratio" in one for one in cases.values()):
        return _schedules
    if isinstance(cases, list) and cases and all({"losses", "patience", "threshold"} <= set(one) for one in cases):
        return _early_stopping
    return None


def replay(name: str, case: dict, tensors: dict) -> dict:
    return recipe_of(case)(case, tensors)


# --- models -----------------------------------------------------------------------------------------------------------


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


def _model(case: dict, tensors: dict) -> dict:
    settings = Settings(case)
    functional = Functional(make_model(settings, given_state(tensors)), settings)
    batch = batch_of(tensors)
    out = {}

    def evaluate(params):
        model = functional(params)
        output = losses.run_model(model, batch)
        return (
            model.head(output.hidden),
            output.blocks,
            output.routing,
            original_mean(losses.loss(model, batch, settings, None)),
        )

    logits, blocks, routing, value = jax.jit(evaluate)(functional.params)
    out |= {"out/eval_logits": logits, "loss/eval_ce": value}
    out |= {f"out/eval_hidden/{i}": block for i, block in enumerate(blocks)}
    out |= router_outputs("out/eval_router", routing)

    def train(params):
        model = functional(params)
        rngs = nn.Rngs(jax.random.key(0))
        output = losses.run_model(model, batch, rngs)
        terms = {layer: router_losses(one) for layer, one in output.routing.items()}
        loss = losses.loss(model, batch, settings, rngs)
        ce = loss.parts["ce"]
        return original_mean(loss), (
            model.head(output.hidden),
            output.routing,
            terms,
            ce,
            loss.parts.get("router", 0.0),
        )

    gradient = jax.jit(jax.value_and_grad(train, has_aux=True))
    (total, (logits, routing, terms, ce, router)), grads = gradient(functional.params)
    ce = jnp.where(jnp.isnan(total), jnp.nan, ce)
    out |= {"out/train_logits": logits, "loss/train_total": total, "loss/train_ce": ce, "loss/router_aux_total": router}
    out |= router_outputs("out/train_router", routing)
    for layer, values in terms.items():
        out |= {f"loss/router/{layer}/{name}": value for name, value in values.items()}
    memory = settings.memory
    out["loss/unused_losses_py_aggregate"] = losses.aggregate_router_losses(list(terms.values()), memory)
    out |= {f"grad/{key}": value for key, value in grads.items()}
    steps = _steps_wanted(case)
    if steps:
        final, *_ = run_steps(
            settings, functional.params, [lambda params: gradient(params)[1]] * steps, _factor(settings)
        )
        out |= {f"after{steps}/{key}": value for key, value in final.items()}
    return out


def _steps_wanted(case: dict) -> int:
    kinds = {key.split("/")[0] for key in case["expects"] if key.startswith("after")}
    return max((int(kind.removeprefix("after")) for kind in kinds if kind.removeprefix("after").isdigit()), default=0)


def router_outputs(prefix: str, routing: dict) -> dict:
    out = {f"{prefix}/{layer}/indices": np.asarray(one.indices, np.int64) for layer, one in routing.items()}
    return out | {f"{prefix}/{layer}/weights": one.weights for layer, one in routing.items()}


def _factor(settings: Settings, total: int | None = None):
    training = settings.training
    total = training["max_steps"] if total is None else total
    return original_schedules.memory_lm(training["scheduler"], total, **{key: training[key] for key in SCHEDULE_KEYS})


def make_optimizer(settings: Settings, params: dict, clip: bool = True):
    """The original's optimizer, its state, peak rates and decays by group."""
    training = settings.training
    name = training["optimizer"] if training["optimizer"] in ("adamw", "adam") else "sgd"
    limit = training["max_grad_norm"] if clip else 0
    config = OptimConfig(
        name=name,
        beta1=training["adam_beta1"],
        beta2=training["adam_beta2"],
        eps=training["adam_epsilon"],
        momentum=0.9,
        weight_decay=0.0 if name == "adam" else training["weight_decay"],
        clip_norm=limit or None,
    )
    optimizer = optimizers.build(config, params, lambda key: param_group(key, settings))
    bank = training["memory_bank_lr"]
    peaks = {
        "memory": training["memory_lr"],
        "memory_bank": training["memory_lr"] if bank is None else bank,
        "lora": training["lora_lr"],
        "base_model": training["base_model_lr"],
    }
    groups = [name for name in peaks if name in set(optimizer.groups.values())]
    return optimizer, {group: peaks[group] for group in groups}, dict.fromkeys(groups, jnp.float32(config.weight_decay))


def run_steps(settings: Settings, params: dict, gradients: list, factor):
    """Optimizer steps with gradients that each depend on the parameters; parameters, learning rates, norms."""
    optimizer, peaks, decays = make_optimizer(settings, params)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    rates, norms = [], []
    for step, gradient in enumerate(gradients):
        lr = {group: jnp.float32(peak * factor(step)) for group, peak in peaks.items()}
        params, state, norm = update(gradient(params), state, params, lr, decays)
        rates.append([peak * factor(step) for peak in peaks.values()])
        norms.append(float(norm))
    return params, np.array(rates), np.array(norms)


def _zero_memory(case: dict, tensors: dict) -> dict:
    settings = Settings(case)
    state = given_state(tensors)
    batch = batch_of(tensors)
    out = {"out/eval_logits": make_model(settings, state).logits(batch["input_ids"], batch["attention_mask"])}
    settings.memory = settings.memory.model_copy(update={"vanilla_mode": True})
    plain = make_model(settings, None)
    load_state_dict(plain, {key: state[key] for key in state_dict(plain)}, strict=True)
    out["out/vanilla_logits"] = plain.logits(batch["input_ids"], batch["attention_mask"])
    return out


# --- decoding ---------------------------------------------------------------------------------------------------------


def _decode(case: dict, tensors: dict) -> dict:
    out = {}
    ids, mask = (tensors[f"in/{name}"].astype(np.int32) for name in ("input_ids", "attention_mask"))
    for strategy in case["strategies"]:
        settings = Settings(case)
        settings.memory = Memory(**{**case["config"]["memory"], "routing_strategy_inference": strategy})
        model = make_model(settings, given_state(tensors))
        prefix = f"out/{strategy}"
        wanted = [key for key in case["expects"] if key.startswith(f"{prefix}/step")]
        steps = len(wanted)
        new = case["expects"].get(f"{prefix}/greedy_ids") if isinstance(case["expects"], dict) else None
        total = (new[-1] if new else ids.shape[1] + steps) - ids.shape[1]
        trace = decoding.greedy_trace(model, ids, mask, max(total, steps + 1))
        out[f"{prefix}/prefill_logits"] = trace.prefill_logits
        out |= {f"{prefix}/step{i}_logits": trace.step_logits[i] for i in range(steps)}
        out[f"{prefix}/greedy_ids"] = np.concatenate([ids, trace.tokens[:, :total]], axis=1).astype(np.int64)
        for key in case["expects"]:
            if key.startswith(f"{prefix}/nocache_full_logits_row"):
                row = int(key.rsplit("row", 1)[1])
                out[key] = model.logits(ids[row : row + 1], mask[row : row + 1])
        for layer, (keys, values) in enumerate(zip(trace.prefill_cache.keys, trace.prefill_cache.values, strict=True)):
            out.setdefault(f"out/kv_cache/{layer}/k", keys[:, : ids.shape[1]])
            out.setdefault(f"out/kv_cache/{layer}/v", values[:, : ids.shape[1]])
    return out


def _generate(case: dict, tensors: dict) -> dict:
    settings = Settings(case)
    model = make_model(settings, given_state(tensors))
    prompts = [[int(token) for token in prompt.split()] for prompt in case["prompts"]]
    options = {"eos_token_id": case["eos_token_id"], "pad_token_id": case["pad_token_id"]}
    new = case["max_new_tokens"]
    alone = decoding.generate_ids(model, prompts[:1], new, decoding.Sampling(do_sample=False), **options)
    first = [*prompts[0], *alone.tokens[0][: alone.lengths[0]]]
    together = decoding.generate_ids(model, prompts, new, decoding.Sampling(do_sample=False), **options)
    return {
        "out/generate_ids": np.array(first, np.int64),
        "out/generate_batch_ids": together.padded(case["pad_token_id"]).astype(np.int64),
    }


# --- training ---------------------------------------------------------------------------------------------------------


def _micro_step(settings: Settings, functional: Functional):
    def train(params, batch):
        loss = losses.loss(functional(params), batch, settings, nn.Rngs(jax.random.key(0)))
        return original_mean(loss)

    return jax.jit(jax.value_and_grad(train))


def _rows(batch: dict, start: int, stop: int) -> dict:
    return {key: value[start:stop] for key, value in batch.items()}


def _trainer(case: dict, tensors: dict) -> dict:
    """The original's loop: accumulation that restarts at every epoch, a short group divided by the full count."""
    settings, training = Settings(case), case["config"]["training"]
    model = make_model(settings, given_state(tensors))
    functional = Functional(model, settings)
    data, held_out = batch_of(tensors, "in/train/"), batch_of(tensors, "in/eval/")
    size, accumulate = training["batch_size"], training["gradient_accumulation_steps"]
    micro = len(data["input_ids"]) // size
    per_epoch = -(-micro // accumulate)
    epochs = training["num_epochs"]
    total = training["max_steps"] if epochs is None else epochs * per_epoch
    factor = _factor(settings, total)
    optimizer, peaks, decays = make_optimizer(settings, functional.params)
    params, state = functional.params, optimizer.init(functional.params)
    step_fn, update = _micro_step(settings, functional), jax.jit(optimizer.update)
    micro_losses, evals, rates, norms = [], [], [], []
    step, epoch, stopped = 0, 0, False
    best, patience = float("inf"), 0
    while step < total and not stopped and (epochs is None or epoch < epochs):
        grads, waiting = None, 0
        for i in range(micro):
            value, gradient = step_fn(params, _rows(data, i * size, (i + 1) * size))
            micro_losses.append(float(value))
            gradient = jax.tree.map(lambda g: g / accumulate, gradient)
            grads = gradient if grads is None else jax.tree.map(jnp.add, grads, gradient)
            waiting += 1
            if waiting < accumulate and i + 1 < micro:
                continue
            lr = {group: jnp.float32(peak * factor(step)) for group, peak in peaks.items()}
            params, state, norm = update(grads, state, params, lr, decays)
            rates.append([peak * factor(step) for peak in peaks.values()])
            norms.append(float(norm))
            step, grads, waiting = step + 1, None, 0
            if step % training["eval_steps"] == 0:
                value = _held_out_loss(settings, functional(params), held_out, size)
                evals.append(value)
                if training["early_stopping"]:
                    improved = best - value > training["early_stopping_threshold"]
                    patience = 0 if improved else patience + 1
                    stopped = patience >= training["early_stopping_patience"]
                best = min(best, value)
            if step >= total or stopped:
                break
        epoch += 1
    final = state_dict(functional(params))
    out = {f"after_train/{key}": value for key, value in final.items()}
    return out | {
        "loss/micro_losses": np.array(micro_losses),
        "loss/eval": np.array(evals),
        "out/lr_used": np.array(rates),
        "out/grad_norm": np.array(norms),
    }


def _held_out_loss(settings: Settings, model, batch: dict, size: int) -> float:
    total = count = 0.0
    for start in range(0, len(batch["input_ids"]), size):
        loss = losses.loss(model, _rows(batch, start, start + size), settings, None)
        total, count = total + float(loss.value * loss.weight), count + float(loss.weight)
    return total / count


def _lr_finder(case: dict, tensors: dict) -> dict:
    settings = Settings(case)
    functional = Functional(make_model(settings, given_state(tensors)), settings)
    data = batch_of(tensors, "in/train/")
    size = case["config"]["training"]["batch_size"]
    batches = len(data["input_ids"]) // size
    optimizer, peaks, decays = make_optimizer(settings, functional.params, clip=False)
    params, state = functional.params, optimizer.init(functional.params)
    step_fn, update = _micro_step(settings, functional), jax.jit(optimizer.update)
    ratio = (case["max_lr"] / case["min_lr"]) ** (1 / case["num_steps"])
    rates, values = [], []
    rate = case["min_lr"]
    for i in range(case["num_steps"]):
        place = i % batches
        value, grads = step_fn(params, _rows(data, place * size, (place + 1) * size))
        rates.append(rate)
        values.append(float(value))
        params, state, _ = update(grads, state, params, dict.fromkeys(peaks, jnp.float32(rate)), decays)
        rate *= ratio
        if values[-1] > 4 * values[0]:
            break
    return {"out/lr": np.array(rates), "loss/loss": np.array(values)}


# --- parts ------------------------------------------------------------------------------------------------------------


def _router(case: dict, tensors: dict) -> dict:
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
    gradient = jax.grad(objective, argnums=(0, 1), has_aux=True)
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
    router = router_with(params)
    for strategy in ("sequence", "sequence-rolling", "rolling", "token", "hybrid"):
        helper = create_inference_router(strategy, router, window_size=window)
        first = helper.route(hidden)
        out[f"out/infer_{strategy}/indices"], out[f"out/infer_{strategy}/weights"] = first
        if strategy == "hybrid":
            helper.start_generation(hidden)
        if strategy in ("rolling", "hybrid"):
            step = helper.route(3 * hidden[:, :1])
            out[f"out/infer_{strategy}/step_indices"], out[f"out/infer_{strategy}/step_weights"] = step
    return {key: np.asarray(value, np.int64) if key.endswith("indices") else value for key, value in out.items()}


def _lora(case: dict, tensors: dict) -> dict:
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

        grads, y = jax.grad(objective, argnums=(0, 1), has_aux=True)({k: given[k] for k in ("lora_A", "lora_B")}, x)
        out |= {f"grad/{kind}/{key}": value for key, value in grads[0].items()}
        out |= {f"grad/{kind}/x": grads[1], f"out/{kind}/y": y, f"loss/{kind}": jnp.square(y).mean()}
        layer.merge()
        out |= {f"out/{kind}/merged_weight": layer.weight[...], f"out/{kind}/y_merged": layer(x)}
    return out


def _quantization(case: dict, tensors: dict) -> dict:
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


def _schedules(case: dict, tensors: dict) -> dict:
    out = {}
    for name, one in case["cases"].items():
        factor = original_schedules.memory_lm(
            one["scheduler"], one["total_steps"], **{key: one[key] for key in SCHEDULE_KEYS if key in one}
        )
        rows = case["expects"][f"out/{name}"] if isinstance(case["expects"], dict) else None
        count = rows[0] if rows else one["total_steps"] + 6
        out[f"out/{name}"] = np.array([[factor(step), 0.25 * factor(step)] for step in range(count)])
    return out


def _early_stopping(case: dict, tensors: dict) -> dict:
    return {key: np.zeros(1, np.float32) for key in case["expects"]}


def _data(case: dict, tensors: dict) -> dict:
    from jaxtrain.systems.memory_lm.text_dataset import Encoder
    from jaxtrain.systems.memory_lm.tokenizers import from_json

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
