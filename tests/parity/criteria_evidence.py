"""Golden cases of PSY agents: three model families, head edge cases, optimizers, the trainer, the data pipeline."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import OptimConfig
from jaxtrain.optim import optimizer as optimizers
from jaxtrain.systems.criteria_evidence import losses, metrics
from jaxtrain.systems.criteria_evidence import model as models
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder, with_defaults
from jaxtrain.systems.criteria_evidence.lora import Lora, is_adapter
from jaxtrain.systems.criteria_evidence.original import schedules
from jaxtrain.train.step.state import ModelDef
from tests.parity.criteria_heads import abstract, replay_data, replay_heads, replay_spans
from torch_bridge.state_dict import load_state_dict

FAMILIES = {"Project": "project", "architectures": "architectures", "base": "base"}
OUTPUTS = {"labels", "start_positions", "end_positions"}


def claims(name: str, case: dict) -> bool:
    return kind_of(case) is not None


def kind_of(case: dict) -> str | None:
    if "head_cfgs" in case:
        return "heads"
    if "_span_metrics" in case:
        return "spans"
    if "evidence_max_length" in case and "ok_rows" in case:
        return "data"
    if case.get("family") in FAMILIES and {"encoder", "criteria_encoder"} & set(case):
        if "variants" in case:
            return "variants"
        return "trainer" if "trainer" in case else "model"
    return None


def replay(name: str, case: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    recipes = {
        "heads": replay_heads,
        "spans": replay_spans,
        "data": replay_data,
        "variants": replay_variants,
        "trainer": replay_trainer,
        "model": replay_model,
    }
    return recipes[kind_of(case)](case, tensors)


# --- building ------------------------------------------------------------------------------------------------------


def encoder_of(values: dict) -> Encoder:
    kind = {"deberta-v2": "deberta", "xlm-roberta": "roberta"}.get(values["kind"], values["kind"])
    known = {key: value for key, value in values.items() if key in Encoder.model_fields}
    return Encoder(**with_defaults({**known, "kind": kind}))


def encoders_of(case: dict) -> dict[str, Encoder]:
    if case["architecture"] != "joint":
        return {"encoder": encoder_of(case["encoder"])}
    shared = case.get("encoder") or case.get("criteria_encoder")
    return {name: encoder_of(case.get(name) or shared) for name in ("criteria_encoder", "evidence_encoder")}


def options_of(case: dict) -> dict:
    """Keyword arguments of the family's constructor."""
    if case["family"] == "base":
        names = ("num_classes", "dropout", "hidden_dim", "pooling_strategy")
        options = {name: case[name] for name in names if case.get(name) is not None}
        lora = case.get("lora_config") or case.get("lora")
        if lora:
            lora = {**lora, "alpha": lora.get("alpha", lora.get("lora_alpha", 16))}
            targets = lora.get("target_modules") or lora.get("targets")
            known = {key: lora[key] for key in ("r", "alpha") if key in lora}
            options["lora"] = Lora(enabled=True, targets=targets, **known)
        return options
    options = dict(case.get("head") or {}) | dict(case.get("ctor") or {})
    for name in ("head_cfg", "task_cfg"):
        if case.get(name) is not None:
            options[name] = case[name]
    return {key: value for key, value in options.items() if "model_name" not in key}


def build(case: dict, tensors: dict[str, np.ndarray]) -> tuple[nnx.Module, tuple[str, ...]]:
    """The case's model with its weights, and the prefixes of parameters without gradient."""
    family, encoders, options = FAMILIES[case["family"]], encoders_of(case), options_of(case)
    model = abstract(lambda: models.build(family, case["architecture"], encoders, rngs=nnx.Rngs(0), **options))
    weights = {key.removeprefix("param/"): value for key, value in tensors.items() if key.startswith("param/")}
    load_state_dict(model, weights, strict=True)
    pooling = model.pooler.pooling if hasattr(model, "pooler") else "cls"
    return model, models.unread(family, case["architecture"], encoders, pooling)


def split(case: dict, model: nnx.Module, unread: tuple[str, ...]):
    frozen_encoder = bool(case.get("freeze_encoder"))
    adapters = bool(case.get("lora_config") or case.get("lora"))

    def trainable(key: str) -> bool:
        if key.startswith(unread):
            return False
        in_encoder = key.startswith("encoder.encoder.")
        if adapters and in_encoder:
            return is_adapter(key)
        return not (frozen_encoder and in_encoder)

    model_def = ModelDef.of(model, trainable)
    return model_def, *model_def.split(model)


def arguments(tensors: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    given = {key.removeprefix("in/"): value for key, value in tensors.items() if key.startswith("in/")}
    return {key: jnp.asarray(value) for key, value in given.items() if key not in OUTPUTS}


def targets(tensors: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    batch = {key: jnp.asarray(tensors[f"in/{key}"]) for key in OUTPUTS if f"in/{key}" in tensors}
    return batch | {"valid": jnp.ones(len(next(iter(batch.values()))), bool)}


def losses_of(outputs: dict, batch: dict, weights: dict) -> dict[str, jax.Array]:
    found, total = {}, 0.0
    if "logits" in outputs:
        found["cls"] = losses.classification_loss(outputs["logits"], batch["labels"], batch["valid"])
    if "start_logits" in outputs:
        found["span"], found["start"], found["end"] = losses.span_loss(outputs, batch)
    if {"cls", "span"} <= set(found):
        total = weights.get("criteria", 1.0) * found["cls"] + weights.get("evidence", 1.0) * found["span"]
    else:
        total = found.get("cls", found.get("span"))
    return {**found, "total": total}


# --- one model: outputs, losses, gradients, three steps ------------------------------------------------------------


def replay_model(case: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    model, unread = build(case, tensors)
    inputs, batch, weights = arguments(tensors), targets(tensors), case.get("loss_weights") or {}
    model_def, params, frozen, buffers = split(case, model, unread)

    def loss_fn(params):
        outputs = model_def.merge(params, frozen, buffers)(**inputs)
        found = losses_of(outputs, batch, weights)
        return found["total"], (outputs, found)

    grad_fn = jax.jit(jax.grad(loss_fn, has_aux=True))
    grads, (outputs, found) = grad_fn(params)
    wanted = [key for key in case["expects"] if key.startswith("out/encod")]
    between = jax.jit(lambda inputs: encodings(model, inputs))(inputs) if wanted else {}
    result = {f"out/{key}": value for key, value in {**outputs, **between}.items()}
    result |= {f"loss/{key}": value for key, value in found.items()}
    result |= {f"grad/{key}": value for key, value in grads.items()}
    if any(key.startswith("after3/") for key in case["expects"]):
        after = train(case["optim"], params, lambda p: grad_fn(p)[0], clip_of(case.get("after3") or case["optim"]))
        result |= {f"after3/{key}": value for key, value in {**frozen, **after}.items()}
    return result


def encodings(model: nnx.Module, inputs: dict) -> dict[str, jax.Array]:
    """What the encoders give on the way, under the names that goldens use."""
    found = {}
    if isinstance(model, models.base_models.Classifier):
        found["encoding"] = model.encoder(**inputs)
    for name in ("encoder", "criteria_encoder", "evidence_encoder"):
        encoder = getattr(model, name, None)
        prefix = name.removesuffix("encoder")
        own = {
            key: inputs[f"{prefix}{key}"]
            for key in ("input_ids", "attention_mask", "token_type_ids")
            if f"{prefix}{key}" in inputs
        }
        if encoder is None or "input_ids" not in own or isinstance(model, models.base_models.Classifier):
            continue
        encoding = encoder(**own)
        found[f"{name}_last_hidden_state"] = encoding.hidden
        if encoding.pooled is not None:
            found[f"{name}_pooler_output"] = encoding.pooled
    return found


def clip_of(values: dict) -> float | None:
    return values.get("clip_grad_norm", values.get("gradient_clip", 1.0)) or None


def optimizer_of(optim: dict, params: dict, clip: float | None):
    """The core's optimizer under the original's options, its rates by group, and the learning rate's factor by step."""
    name = str(optim.get("optimizer", "adamw")).split()[0].lower()
    beta1, beta2 = optim.get("betas", (0.9, 0.999))
    everything = name == "adafactor" or "param_groups" in optim and len(optim["param_groups"]) == 1
    config = OptimConfig(
        name=name,
        lr=optim["lr"],
        weight_decay=optim.get("weight_decay", 0.01),
        decay_bias_and_norm=everything or "all params" in str(optim.get("source", "")),
        beta1=beta1,
        beta2=beta2,
        eps=optim.get("eps", 1e-8),
        momentum=optim.get("momentum", 0.9) if name == "sgd" else 0.0,
        clip_norm=clip,
    )
    optimizer = optimizers.build(config, params, lambda key: "default")
    schedule = schedules.transformers(
        optim.get("scheduler") or "none",
        optim.get("total_steps", 0),
        optim.get("warmup_steps", 0),
        lr=optim["lr"],
        cycles=optim.get("num_cycles"),
        power=optim.get("power", 1.0),
    )
    return optimizer, optimizers.rates(config, {"default"}), schedule


def train(optim: dict, params: dict, grad_fn, clip: float | None, steps: int = 3) -> dict:
    """Parameters after `steps` updates on one batch."""
    optimizer, rates, schedule = optimizer_of(optim, params, clip)
    state = optimizer.init(params)

    @jax.jit
    def update(grads, state, params, factor):
        lr = {group: rate * factor for group, rate in rates["lr"].items()}
        decay = {group: jnp.float32(value) for group, value in rates["weight_decay"].items()}
        return optimizer.update(grads, state, params, lr, decay)[:2]

    for step in range(steps):
        params, state = update(grad_fn(params), state, params, jnp.float32(schedule(step)))
    return params


def replay_variants(case: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Three steps with each optimizer, from the same weights on the same batch."""
    model, unread = build(case, tensors)
    inputs, batch, weights = arguments(tensors), targets(tensors), case.get("loss_weights") or {}
    model_def, params, frozen, buffers = split(case, model, unread)
    loss_fn = lambda p: losses_of(model_def.merge(p, frozen, buffers)(**inputs), batch, weights)["total"]
    grad_fn = jax.jit(jax.grad(loss_fn))
    result = {}
    for name, optim in case["variants"].items():
        after = train(optim, params, grad_fn, clip_of(optim))
        result |= {f"after3_{name}/{key}": value for key, value in {**frozen, **after}.items()}
    return result


# --- the trainer ---------------------------------------------------------------------------------------------------

TRAINER = {
    "num_epochs": 10,
    "patience": 3,
    "gradient_clip": 1.0,
    "gradient_accumulation_steps": 1,
    "early_stopping_metric": "val_f1_macro",
    "early_stopping_mode": "max",
    "min_delta": 1e-4,
}


def replay_trainer(case: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Parameters at the end and at the best epoch of the original's training loop."""
    history, final, best = run_trainer(case, tensors)
    result = {f"final/{key}": value for key, value in final.items()}
    return result | {f"best/{key}": value for key, value in (best or {}).items()}


def run_trainer(case: dict, tensors: dict[str, np.ndarray]) -> tuple[list[dict], dict, dict | None]:
    """The loop of `psy_agents_noaug.training.train_loop`: its history, the last and the best parameters.

    A group of micro-batches that is not full at the end of an epoch is dropped; the schedule goes one step further
    after every validation.
    """
    settings = {**TRAINER, **case["trainer"]}
    model, unread = build(case, tensors)
    model_def, params, frozen, buffers = split(case, model, unread)
    batches, held_out = batches_of(tensors, "train"), batches_of(tensors, "val")
    optimizer, rates, schedule = optimizer_of(case["optim"], params, settings["gradient_clip"] or None)
    scheduled = case["optim"].get("scheduler", "none") not in (None, "none")
    forward = jax.jit(lambda p, b: model_def.merge(p, frozen, buffers)(b["input_ids"], b["attention_mask"])["logits"])

    def loss_fn(p, batch):
        logits = forward(p, batch)
        valid = jnp.ones(len(batch["labels"]), bool)
        return losses.classification_loss(logits, batch["labels"], valid), logits

    grad_fn = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))

    @jax.jit
    def update(grads, state, params, factor):
        lr = {group: rate * factor for group, rate in rates["lr"].items()}
        decay = {group: jnp.float32(value) for group, value in rates["weight_decay"].items()}
        return optimizer.update(grads, state, params, lr, decay)[:2]

    state, calls, history, best_params = optimizer.init(params), 0, [], None
    best, bad = (-np.inf if settings["early_stopping_mode"] == "max" else np.inf), 0
    group = settings["gradient_accumulation_steps"]
    for epoch in range(settings["num_epochs"]):
        total, means, right = None, [], []
        for i, batch in enumerate(batches):
            (loss, logits), grads = grad_fn(params, batch)
            means.append(float(loss))
            right += (np.argmax(logits, -1) == batch["labels"]).tolist()
            grads = jax.tree.map(lambda grad: grad / group, grads)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
            if (i + 1) % group == 0:
                params, state = update(total, state, params, jnp.float32(schedule(calls)))
                total, calls = None, calls + scheduled
        logits = np.concatenate([forward(params, batch) for batch in held_out])
        labels = np.concatenate([batch["labels"] for batch in held_out])
        scored = metrics.validation_scores(logits, labels, len(held_out[0]["labels"]))
        calls += scheduled
        scored |= {"train_loss": float(np.mean(means)), "train_accuracy": float(np.mean(right)), "epoch": epoch + 1}
        scored["lr"] = case["optim"]["lr"] * schedule(calls)
        history.append(scored)
        value = scored[settings["early_stopping_metric"]]
        if metrics.improved(value, best, settings["early_stopping_mode"], settings["min_delta"]):
            best, bad, best_params = value, 0, {**frozen, **params}
        else:
            bad += 1
            if bad >= settings["patience"]:
                break
    return history, {**frozen, **params}, best_params


def batches_of(tensors: dict[str, np.ndarray], split: str) -> list[dict[str, np.ndarray]]:
    found, names = [], ("input_ids", "attention_mask", "labels")
    while f"in/{split}{len(found)}_input_ids" in tensors:
        found.append({name: tensors[f"in/{split}{len(found)}_{name}"] for name in names})
    return found
