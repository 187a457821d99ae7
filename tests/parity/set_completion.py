"""Golden cases of SplatNLP: set-transformer blocks, the completion model, its training, the sparse autoencoder."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import OptimConfig
from jaxtrain.optim import optimizer as optimizers
from jaxtrain.optim.plateau import Plateau
from jaxtrain.systems.set_completion import model, steering
from jaxtrain.systems.set_completion.losses import completion_loss, multi_hot
from jaxtrain.systems.set_completion.model import SetCompletionModel, masked_mean
from jaxtrain.systems.set_completion.original.early_stopping import EarlyStopping
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
from jaxtrain.train.state import ModelDef
from torch_bridge.state_dict import load_state_dict, state_dict

BLOCKS = {
    "MultiheadAttentionBlock",
    "SelfAttentionBlock",
    "InducedSetAttentionBlock",
    "PoolingMultiheadAttention",
    "SetTransformer",
    "SetTransformerLayer",
}
SAE_UNTRAINED = ("decoder.weight", "decoder.bias")


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


# --- training loop --------------------------------------------------------------------------------------------------


def numbered(tensors, stem: str) -> list[dict]:
    count = len({key.split(".")[0] for key in tensors if re.match(rf"in/{stem}\d+\.", key)})
    return [group(tensors, f"in/{stem}{i}.") for i in range(count)]


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


# --- sparse autoencoder ---------------------------------------------------------------------------------------------


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
