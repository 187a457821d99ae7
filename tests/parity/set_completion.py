"""Golden cases of SplatNLP: set-transformer blocks, the completion model, its training, the sparse autoencoder."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.optim.plateau import Plateau
from jaxtrain.systems.set_completion import model
from jaxtrain.systems.set_completion.losses import completion_loss, multi_hot
from jaxtrain.systems.set_completion.model import masked_mean
from jaxtrain.systems.set_completion.original.early_stopping import EarlyStopping
from jaxtrain.train.step.state import ModelDef
from tests.parity.set_sae import replay_ring_buffer, replay_sae_hooks, replay_sae_loop, replay_sae_step
from tests.parity.set_training import Training, build_model, group, numbered, optimizer_of, prefixed
from torch_bridge.state_dict import load_state_dict, state_dict

BLOCKS = {
    "MultiheadAttentionBlock",
    "SelfAttentionBlock",
    "InducedSetAttentionBlock",
    "PoolingMultiheadAttention",
    "SetTransformer",
    "SetTransformerLayer",
}


def claims(name: str, case: dict) -> bool:
    return kind_of(case) is not None


def kind_of(case: dict) -> str | None:
    config = case.get("config") or {}
    if case.get("class") in BLOCKS:
        return "block"
    if "loop" in case and "sae_config" in case:
        return "sae_loop"
    if "primary_config" in case and "sae_config" in case:
        return "sae_hooks"
    if "max_size" in case and "d" in case:
        return "ring_buffer"
    if "weapon_vocab_size" not in config:
        return "sae_step" if "expansion_factor" in config and "input_dim" in config else None
    if "training_config" in case:
        return "train_loop"
    if "weapon_vocab" in case:
        return "reconstruct"
    return "model"


def replay(name: str, case: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    recipes = {
        "block": replay_block,
        "sae_loop": replay_sae_loop,
        "sae_hooks": replay_sae_hooks,
        "ring_buffer": replay_ring_buffer,
        "sae_step": replay_sae_step,
        "train_loop": replay_train_loop,
        "reconstruct": replay_reconstruct,
        "model": replay_model,
    }
    return recipes[kind_of(case)](case, tensors)


# --- blocks and model ---------------------------------------------------------------------------------------------


def replay_block(case, tensors):
    block = getattr(model, case["class"])(**case["config"], rngs=nnx.Rngs(0))
    load_state_dict(block, group(tensors, "param/"))
    given = group(tensors, "in/")
    cotangent, mask = given.pop("cotangent"), given.pop("key_padding_mask", None)
    model_def = ModelDef.of(block, lambda key: True)
    params = model_def.split(block)[0]

    def run(params, given):
        block = model_def.merge(params, {}, {})
        names = ("query", "key") if case["class"] == "MultiheadAttentionBlock" else ("x",)
        y = block(*(given[name] for name in names if name in given), mask=mask)
        return (y * cotangent).sum(), y

    (loss, y), (grads, grads_in) = jax.jit(jax.value_and_grad(run, argnums=(0, 1), has_aux=True))(params, given)
    return {"out/y": y, "loss/sum": loss, **prefixed("grad/", grads), **prefixed("grad_in/", grads_in)}


def replay_model(case, tensors):
    model = build_model(case["config"], group(tensors, "param/"))
    if "in/ability_tokens" in tensors:
        return replay_edge_cases(case, tensors, model)
    steps = [
        group(tensors, f"in/s{i}.") for i in range(len({k.split(".")[0] for k in tensors if k.startswith("in/s")}))
    ]
    outputs = model_outputs(model, steps[0])

    def loss_fn(model, batch):
        logits = model(batch["ability_tokens"], batch["weapon_token"], batch.get("key_padding_mask"))
        return completion_loss(logits, batch["target_multi_hot"]).mean(), None

    training = Training(model, **optimizer_of(case["optimizer"]))
    losses, norms = [], []
    for i, batch in enumerate(steps):
        loss, _, grads, norm = training.step(loss_fn, batch)
        losses.append(loss)
        norms.append(norm)
        if i == 0:
            outputs |= {"loss/bce": loss, **prefixed("grad/", grads)}
    outputs |= {"loss/steps": jnp.stack(losses), "loss/grad_norms_preclip": jnp.stack(norms)}
    return outputs | prefixed(f"after{len(steps)}/", state_dict(training.model()))


def model_outputs(model, batch):
    """Logits, pooled vectors and the outputs of every named part, by the names of the golden cases."""
    mask = batch.get("key_padding_mask", jnp.zeros(batch["ability_tokens"].shape, bool))
    x = model.embed(batch["ability_tokens"], batch["weapon_token"])
    outputs = {"out/input_proj": x}
    for i, layer in enumerate(model.transformer_layers):
        part, inner = layer.set_transformer, layer.set_transformer.input_proj(x)
        outputs[f"out/layer{i}.enc_layer1"] = first = part.enc_layer1(inner, mask)
        outputs[f"out/layer{i}.enc_layer2"] = second = part.enc_layer2(first + inner, mask)
        outputs[f"out/layer{i}.dec_layer1"] = seeds = part.dec_layer1(second + first + inner, mask)
        outputs[f"out/layer{i}.dec_layer2"] = refined = part.dec_layer2(seeds)
        outputs[f"out/layer{i}.dec_layer3"] = part.dec_layer3(refined + seeds)
        outputs[f"out/layer{i}.set_transformer"] = summary = part(x, mask)
        outputs[f"out/layer{i}.cross_attention"] = layer.cross_attention(x, summary)
        outputs[f"out/layer{i}"] = x = layer(x, mask)
    pooled = masked_mean(x, mask)
    logits = model(batch["ability_tokens"], batch["weapon_token"], mask)
    norm = jnp.maximum(jnp.linalg.norm(pooled, axis=1, keepdims=True), 1e-12)
    return outputs | {
        "out/pooled": pooled,
        "out/pooled_l2normed": pooled / norm,
        "out/logits": logits,
        "out/probs": jax.nn.sigmoid(logits),
    }


def replay_edge_cases(case, tensors, model):
    given = group(tensors, "in/")
    mask = given["key_padding_mask"]
    logits = model(given["ability_tokens"], given["weapon_token"], mask)
    zero_rows = case["expects"].get("out/zero_length_seq_logits", [1])[0]
    no_tokens = jnp.zeros((zero_rows, 0), jnp.int32)
    return {
        "out/logits": logits,
        "out/logits_nan_replaced_by_0": jnp.nan_to_num(logits),
        "out/row_isnan": jnp.isnan(logits).any(1).astype(jnp.uint8),
        "out/masked_mean_only": masked_mean(jnp.ones((*mask.shape, case["config"]["hidden_dim"])), mask),
        "out/zero_length_seq_logits": model(no_tokens, jnp.zeros((zero_rows, 1), jnp.int32), no_tokens.astype(bool)),
    }


def replay_train_loop(case, tensors):
    settings = case["training_config"]
    pad = case.get("vocab_pad", case["config"].get("pad_token_id"))
    model = build_model(case["config"], group(tensors, "param/"))
    size = case["config"]["output_dim"]

    def loss_fn(model, batch):
        logits = model(batch["inputs"], batch["weapons"], batch["inputs"] == pad)
        return completion_loss(logits, multi_hot(batch["targets"], size, pad)).mean(), None

    training = Training(
        model,
        lr=settings["learning_rate"],
        weight_decay=settings["weight_decay"],
        clip_norm=settings["clip_grad_norm"],
    )
    evaluate = jax.jit(lambda *arrays, batch: loss_fn(training.model_def.merge(*arrays), batch)[0])
    plateau = Plateau(settings["learning_rate"], settings["scheduler_factor"], settings["scheduler_patience"])
    stopping = EarlyStopping(settings["patience"], tie_is_improvement=True)
    train, validation = numbered(tensors, "train"), numbered(tensors, "val")
    outputs = {}
    for epoch in range(settings["num_epochs"]):
        for batch in train:
            training.step(loss_fn, batch)
        arrays = training.params, training.frozen, training.buffers
        loss = float(np.mean([evaluate(*arrays, batch=batch) for batch in validation], dtype=np.float64))
        outputs |= prefixed(f"after_epoch{epoch + 1}/", state_dict(training.model()))
        training.lr = plateau.update(loss)
        if stopping.check(loss):
            break
    # The original's "best" weights are a live reference: it returns those of the last epoch.
    return outputs | prefixed("final/", state_dict(training.model()))


# --- prediction -----------------------------------------------------------------------------------------------------


def replay_reconstruct(case, tensors):
    model = build_model(case["config"], group(tensors, "param/"))
    vocab, weapons, pad = case["vocab"], case["weapon_vocab"], case["config"]["pad_token_id"]
    contexts = [[vocab[token] for token in entry["context"]] for entry in case["cases"]]

    def probabilities(rows, weapon_ids):
        width = max(map(len, rows))
        tokens = np.array([row + [pad] * (width - len(row)) for row in rows], np.int32)
        return jax.nn.sigmoid(model(tokens, np.array(weapon_ids, np.int32)[:, None], tokens == pad))

    outputs = {
        f"out/probs{i}": probabilities([row], [weapons[entry["weapon"]]])[0]
        for i, (row, entry) in enumerate(zip(contexts, case["cases"], strict=True))
    }
    for key in case["expects"]:
        if match := re.fullmatch(r"out/batch_probs_weapon(\d+)", key):
            outputs[key] = probabilities(contexts, [int(match[1])] * len(contexts))
    return outputs
