"""Replay the recorded sparse autoencoder of set_completion: steps, loops, hooks."""

import re

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.systems.set_completion import steering
from jaxtrain.systems.set_completion.sae import (
    RingBuffer,
    SparseAutoencoder,
    cosine_rate,
    l1_coefficient,
    original_total_steps,
    replace,
    row_errors,
    row_probabilities,
    sae_loss,
    token_influence,
    usage_coefficient,
)
from tests.parity.set_training import (
    SAE_UNTRAINED,
    Training,
    build_model,
    build_sae,
    group,
    numbered,
    optimizer_of,
    prefixed,
)
from torch_bridge.state_dict import state_dict


def sae_training(sae, *, lr, weight_decay, clip_norm, beta1=0.9, beta2=0.999, eps=1e-8) -> Training:
    return Training(
        sae,
        lr=lr,
        weight_decay=weight_decay,
        clip_norm=clip_norm,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        untrained=SAE_UNTRAINED,
    )


def replay_sae_step(case, tensors):
    config = case["config"]
    batches = [tensors[f"in/x{i}"] for i in range(sum(key.startswith("in/x") for key in tensors))]
    coefficients = (config["l1_coefficient"], config["usage_coeff"], config["target_usage"])
    training = sae_training(
        build_sae(config, group(tensors, "param/")),
        **optimizer_of(case["optimizer"]),
    )
    start = training.model()
    reconstruction, h = start(batches[0])
    total, parts = sae_loss(start, batches[0], *coefficients)
    outputs = {
        "out/h_pre": start.encode(batches[0])[0],
        "out/h_post": h,
        "out/reconstruction": reconstruction,
        "out/usage_ema_after_loss": start.usage_ema[...],
        "loss/total": total,
        **prefixed("loss/", parts),
    }

    def loss_fn(sae, x):
        return sae_loss(sae, x, *coefficients)

    for i, x in enumerate(batches):
        _, _, grads, _ = training.step(loss_fn, x, after=SparseAutoencoder.normalize_decoder)
        if i == 0:
            outputs |= prefixed("grad/", grads)
    return outputs | prefixed(f"after{len(batches)}/", state_dict(training.model()))


def replay_sae_loop(case, tensors):
    primary = build_model(case["primary_config"], group(tensors, "param/primary."))
    pad = case["primary_config"]["pad_token_id"]
    outputs = {}
    for i, batch in enumerate(numbered(tensors, "train")):
        tokens = batch["ability_tokens"]
        outputs[f"out/train{i}.pooled"] = primary.pooled(tokens, batch["weapon_token"], tokens == pad)

    config, loop = case["sae_config"], case["loop"]
    sae = build_sae(config, group(tensors, "param/sae."), case["primary_config"]["hidden_dim"])
    rate = {"lr": loop["lr"], "weight_decay": loop.get("weight_decay", 0.01), "clip_norm": loop["gradient_clip_val"]}
    training = sae_training(sae, **rate)
    total_steps = original_total_steps(
        loop["epochs"],
        loop["n_train_batches"],
        loop["primary_batch"],
        loop["steps_before_train"],
        loop["sae_train_steps"],
    )

    def loss_fn(sae, x, l1, usage):
        return sae_loss(sae, x, l1, usage, config["target_usage"])

    ends = np.cumsum(tensors["in/sae_batch_sizes"])
    rows = np.split(tensors["in/sae_batches_concat"], ends[:-1])
    resampled = 0
    for step, x in enumerate(rows):
        usage = usage_coefficient(
            step, config["usage_coeff"], loop["kl_warmup_steps"], loop["kl_period_steps"], loop["kl_floor"]
        )
        l1 = l1_coefficient(step, config["l1_coefficient"], loop["l1_warmup_steps"], loop["l1_start"])
        training.lr = cosine_rate(step, loop["lr"], total_steps)
        training.step(loss_fn, x, l1, usage, after=SparseAutoencoder.normalize_decoder)
        if step + 1 in loop["resample_steps"]:
            outputs |= resample_with_recorded_rows(case, tensors, training, resampled)
            resampled += 1
    return outputs | prefixed("afterN/sae.", state_dict(training.model()))


def resample_with_recorded_rows(case, tensors, training: Training, number: int) -> dict:
    """The original's resampling with the rows that torch.multinomial drew; changes `training` in place."""
    config, loop = case["sae_config"], case["loop"]
    sae, prefix = training.model(), f"resample{number}"
    threshold = config["dead_neuron_threshold"]
    dead = np.asarray(sae.usage_ema[...] < threshold)
    outputs = {}
    if dead.any():
        sample, drawn = tensors[f"in/{prefix}.sample"], tensors[f"in/{prefix}.idx"]
        errors = row_errors(sae, jnp.asarray(sample))
        outputs[f"out/{prefix}.probs"] = row_probabilities(errors, jnp.ones(len(sample), bool))
        rows = np.zeros((sae.hidden_dim, sample.shape[1]), np.float32)
        rows[np.flatnonzero(dead)] = sample[drawn]
        replace(
            sae,
            jnp.asarray(dead),
            jnp.asarray(rows),
            threshold=threshold,
            weight=loop["resample_weight"],
            bias=loop["resample_bias"],
            target_usage=config["target_usage"],
        )
        training.take(sae)
        training.opt_state = forget(training.opt_state, jnp.asarray(dead))
    return outputs | prefixed(f"out/{prefix}.after.", state_dict(sae))


def forget(opt_state, dead):
    """Zero Adam's moments of the encoder rows and biases of dead features; its step count stays."""

    def clear(path, leaf):
        name = jax.tree_util.keystr(path)
        if "encoder.weight" in name:
            return jnp.where(dead[:, None], 0.0, leaf)
        return jnp.where(dead, 0.0, leaf) if "encoder.bias" in name else leaf

    return jax.tree_util.tree_map_with_path(clear, opt_state)


def replay_ring_buffer(case, tensors):
    buffer = RingBuffer(case["max_size"], case["d"], exact_fill_bug=True)
    outputs = {}
    for i in range(sum(key.startswith("in/add") for key in tensors)):
        rows = tensors[f"in/add{i}"]
        if rows.size and rows.shape[-1] == case["d"]:  # the original logs and skips another width
            buffer.add(jnp.asarray(rows))
        outputs[f"out/buf{i}"] = buffer.rows[...]
    return outputs


def replay_sae_hooks(case, tensors):
    primary = build_model(case["primary_config"], group(tensors, "param/primary."))
    sae = build_sae(case["sae_config"], group(tensors, "param/sae."), case["primary_config"]["hidden_dim"])
    batch = group(tensors, "in/b0.")
    tokens = batch["ability_tokens"]
    arguments = (primary, sae, tokens, batch["weapon_token"], tokens == case["primary_config"]["pad_token_id"])
    plain = steering.steer(*arguments)
    outputs = {
        "out/logits_base": primary(*arguments[2:]),
        "out/logits_bypass": steering.steer(*arguments, mode="bypass").logits,
        "out/logits_nochange": steering.steer(*arguments, mode="no_change").logits,
        "out/logits_recon": plain.logits,
        "out/hook_last_in": plain.pooled,
        "out/hook_last_h_pre": plain.h_pre,
        "out/hook_last_h_post": plain.h_post,
        "out/hook_x_recon": plain.reconstruction,
        "out/feature_token_influence": token_influence(primary.output_layer.weight[...], sae),
    }
    for key in case["expects"]:
        if match := re.fullmatch(r"out/logits_edit_n(\d+)_v(.+)", key):
            edited = steering.steer(*arguments, feature=int(match[1]), value=float(match[2]))
            outputs[key] = edited.logits
    return outputs
