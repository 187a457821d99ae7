"""Golden cases of training: optimizer steps, the original's loop, its range test."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain import nn
from jaxtrain.config import OptimConfig
from jaxtrain.optim import optimizer as optimizers
from jaxtrain.systems.memory_lm import losses
from jaxtrain.systems.memory_lm.original.schedules import original_schedule
from jaxtrain.systems.memory_lm.param_groups import param_group
from jaxtrain.systems.memory_lm.router import router_losses
from tests.parity.memory_lm_models import (
    Functional,
    Settings,
    batch_of,
    given_state,
    make_model,
    original_mean,
    router_outputs,
)
from torch_bridge.state_dict import state_dict

SCHEDULE_KEYS = (
    "warmup_steps",
    "warmup_ratio",
    "min_lr_ratio",
    "decay_start_step",
    "decay_start_ratio",
    "wsd_stable_steps",
    "wsd_stable_ratio",
)


def replay_model(case: dict, tensors: dict) -> dict:
    """A whole model: evaluation, one training batch with its gradients, and some optimizer steps on it."""
    settings = Settings(case)
    functional = Functional(make_model(settings, given_state(tensors)), settings)
    batch = batch_of(tensors)
    gradient = _gradient(settings, functional, batch)
    out = _evaluated(settings, functional, batch) | _trained(settings, *gradient(functional.params))
    steps = _steps_wanted(case)
    if steps:
        gradients = [lambda params: gradient(params)[1]] * steps
        final, *_ = run_steps(settings, functional.params, gradients, factor_of(settings))
        out |= {f"after{steps}/{key}": value for key, value in final.items()}
    return out


def _evaluated(settings: Settings, functional: Functional, batch: dict) -> dict:
    def evaluate(params):
        model = functional(params)
        output = losses.run_model(model, batch)
        ce = original_mean(losses.loss(model, batch, settings, None))
        return model.head(output.hidden), output.blocks, output.routing, ce

    logits, blocks, routing, ce = jax.jit(evaluate)(functional.params)
    out = {"out/eval_logits": logits, "loss/eval_ce": ce}
    out |= {f"out/eval_hidden/{i}": block for i, block in enumerate(blocks)}
    return out | router_outputs("out/eval_router", routing)


def _gradient(settings: Settings, functional: Functional, batch: dict):
    """params -> ((loss, (logits, routing, Loss)), gradients)."""

    def train(params):
        model = functional(params)
        rngs = nn.Rngs(jax.random.key(0))
        output = losses.run_model(model, batch, rngs)
        loss = losses.loss(model, batch, settings, rngs)
        return original_mean(loss), (model.head(output.hidden), output.routing, loss)

    return jax.jit(jax.value_and_grad(train, has_aux=True))


def _trained(settings: Settings, values, grads: dict) -> dict:
    total, (logits, routing, loss) = values
    terms = {layer: router_losses(one) for layer, one in routing.items()}
    out = {
        "out/train_logits": logits,
        "loss/train_total": total,
        "loss/train_ce": jnp.where(jnp.isnan(total), jnp.nan, loss.parts["ce"]),
        "loss/router_aux_total": loss.parts.get("router", 0.0),
        "loss/unused_losses_py_aggregate": losses.aggregate_router_losses(list(terms.values()), settings.memory),
    }
    out |= router_outputs("out/train_router", routing)
    for layer, values in terms.items():
        out |= {f"loss/router/{layer}/{name}": value for name, value in values.items()}
    return out | {f"grad/{key}": value for key, value in grads.items()}


def _steps_wanted(case: dict) -> int:
    kinds = {key.split("/")[0] for key in case["expects"] if key.startswith("after")}
    return max((int(kind.removeprefix("after")) for kind in kinds if kind.removeprefix("after").isdigit()), default=0)


def factor_of(settings: Settings, total: int | None = None):
    training = settings.training
    total = training["max_steps"] if total is None else total
    return original_schedule(training["scheduler"], total, **{key: training[key] for key in SCHEDULE_KEYS})


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


def _micro_step(settings: Settings, functional: Functional):
    def train(params, batch):
        loss = losses.loss(functional(params), batch, settings, nn.Rngs(jax.random.key(0)))
        return original_mean(loss)

    return jax.jit(jax.value_and_grad(train))


def rows_of(batch: dict, start: int, stop: int) -> dict:
    return {key: value[start:stop] for key, value in batch.items()}


def replay_trainer(case: dict, tensors: dict) -> dict:
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
    factor = factor_of(settings, total)
    optimizer, peaks, decays = make_optimizer(settings, functional.params)
    params, state = functional.params, optimizer.init(functional.params)
    step_fn, update = _micro_step(settings, functional), jax.jit(optimizer.update)
    micro_losses, evals, rates, norms = [], [], [], []
    step, epoch, stopped = 0, 0, False
    best, patience = float("inf"), 0
    while step < total and not stopped and (epochs is None or epoch < epochs):
        grads, waiting = None, 0
        for i in range(micro):
            value, gradient = step_fn(params, rows_of(data, i * size, (i + 1) * size))
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
        loss = losses.loss(model, rows_of(batch, start, start + size), settings, None)
        total, count = total + float(loss.value * loss.weight), count + float(loss.weight)
    return total / count


def replay_lr_finder(case: dict, tensors: dict) -> dict:
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
        value, grads = step_fn(params, rows_of(data, place * size, (place + 1) * size))
        rates.append(rate)
        values.append(float(value))
        params, state, _ = update(grads, state, params, dict.fromkeys(peaks, jnp.float32(rate)), decays)
        rate *= ratio
        if values[-1] > 4 * values[0]:
            break
    return {"out/lr": np.array(rates), "loss/loss": np.array(values)}
