"""Golden cases of the Sherlock autoencoders: models, training, criteria, learning rates, data pipeline."""

import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import OptimConfig
from jaxtrain.nn import Rngs
from jaxtrain.optim import optimizer as optimizers
from jaxtrain.systems.fmri_autoencoder import metrics
from jaxtrain.systems.fmri_autoencoder.blocks import DenseEncoder
from jaxtrain.systems.fmri_autoencoder.config import Gen1Options, HeadOptions
from jaxtrain.systems.fmri_autoencoder.gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.head import MultimodalAutoencoder
from jaxtrain.train.step.state import ModelDef
from tests.compiling import OPTIMISED
from tests.parity import fmri_pipeline
from tests.parity.fmri_losses import criterion, group, narrow, prefixed, rate_of, replay_losses, replay_rates
from tests.parity.torch_order import in_torch_order
from torch_bridge.state_dict import load_state_dict, state_dict

FIELDS = ("video", "audio", "text", "fmri")
PROBE_SEED = 777
widened = lambda tree: jax.tree.map(lambda v: v.astype(jnp.float64), tree)
narrowed = lambda tree: jax.tree.map(lambda v: v.astype(jnp.float32) if v.dtype == jnp.float64 else v, tree)


def claims(name: str, case: dict) -> bool:
    return kind_of(case) is not None


def kind_of(case: dict) -> str | None:
    config, expects = case.get("config") or {}, case["expects"]
    if "n_voxels" in config and "bottleneck_dim" in config:
        return "model"
    if str(case.get("generation", "")).startswith(("head", "gen1")):
        if "fill_seed" in case and isinstance(case.get("cases"), dict):
            return "encoders"
        if any(
            key.startswith(("hrf/", "align/", "encodec/", "fmri/", "dataset/", "video/", "text/")) for key in expects
        ):
            return "pipeline"
        return "losses" if isinstance(case.get("cases"), dict) else None
    return "rates" if any(re.match(r"(gen1|head)/.*/lr$", key) for key in expects) else None


def replay(name: str, case: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Gradients and outputs of evaluation in float64 from the recorded float32 weights, so that what differs is the
    original's own rounding: one ReLU that it turns shows in every gradient below (5e-3). Outputs in training mode in
    float32 and torch's order: BatchNorm over four rows amplifies rounding, which the record has too.
    Optimizer steps in float32 as they train; the inside of BatchNorm in float64 always.
    """
    recipes = {
        "model": replay_model,
        "encoders": replay_encoders,
        "losses": replay_losses,
        "rates": replay_rates,
        "pipeline": fmri_pipeline.replay,
    }
    with jax.enable_x64(True):
        return recipes[kind_of(case)](case, tensors)


# --- weights and inputs from the recipe -----------------------------------------------------------------------------


def stream(key: str, shape, seed: int) -> np.ndarray:
    """float32 in [-1, 1), a hash of the key, the seed and the flat position."""
    start = np.uint32(zlib.crc32(key.encode()) ^ seed)
    x = np.arange(int(np.prod(shape)), dtype=np.uint32) * np.uint32(0x9E3779B1) + start
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return (((x >> np.uint32(8)).astype(np.int32) - 2**23).astype(np.float32) / np.float32(2**23)).reshape(shape)


def filled(key: str, shape, seed: int, scaled_codes: bool = False) -> np.ndarray:
    """One entry of a state dict by the recipe."""
    if key.endswith("num_batches_tracked"):
        return np.array(3, np.int64)
    v = stream(key, shape, seed)
    tenth, codes = np.float32(0.1), scaled_codes and key.startswith("encoder.audio_encoder.bn1.")
    if key.endswith("running_var"):
        return (1 + np.float32(0.5) * v) * np.float32(9e4 if codes else 1)
    if key.endswith("running_mean"):
        return tenth * v * np.float32(300 if codes else 1)
    if v.ndim >= 2:
        return v * np.float32(np.sqrt(3 / np.prod(shape[1:])))
    return 1 + np.float32(0.2) * v if key.endswith("weight") else tenth * v


def stream_batch(prefix: str, shapes: dict, seed: int) -> dict[str, np.ndarray]:
    """A trainer batch of a full-width case, which is not stored."""
    batch = {}
    for field, (shape, dtype) in shapes.items():
        key = f"{prefix}/{field}"
        if field == "video":
            batch[field] = (stream(key, shape, seed) + 1) / 2
        elif np.issubdtype(dtype, np.integer):
            batch[field] = np.floor((stream(key, shape, seed) + 1) * 512).astype(np.int64)
        else:
            batch[field] = sum(stream(f"{key}#{i}", shape, seed) for i in range(3))
    return batch


def digest(prefix: str, values: dict[str, np.ndarray], positions: dict[str, np.ndarray], expects) -> dict:
    """Sum, norm, probe product, largest; and a few elements, of every tensor that is asked for."""
    out = {}
    for key, value in values.items():
        if f"{prefix}stat/{key}" in expects:
            value = np.asarray(value, np.float64)
            probe = stream(f"probe/{key}", value.shape, PROBE_SEED)
            norm, dot = np.sqrt(np.square(value).sum()), (value * probe).sum()
            out[f"{prefix}stat/{key}"] = np.array([value.sum(), norm, dot, np.abs(value).max()])
        if f"{prefix}sample/{key}" in expects:
            out[f"{prefix}sample/{key}"] = np.asarray(value).reshape(-1)[positions[key]]
    return out


# --- models ---------------------------------------------------------------------------------------------------------


def build_model(case: dict):
    """The case's model without dropout, its weights still to be loaded."""
    weights = {name: case["loss_weights"][name] for name in ("reconstruction_weight", "fmri_weight")}
    config = {**weights, **case["config"]}
    if str(case["generation"]).startswith("gen1"):
        widths = {"widths": case.get("width_map_linear", {}), "channel_widths": case.get("width_map_conv", {})}
        options = Gen1Options(**config, **widths, encoder_dropout=0.0, decoder_dropout=0.0)
        return nnx.eval_shape(lambda: SherlockAutoencoder(options, rngs=nnx.Rngs(0)))
    options = HeadOptions(**config, widths=case.get("width_map", {}), encoder_dropout=0.0, decoder_dropout=0.0)
    return nnx.eval_shape(lambda: MultimodalAutoencoder(options, statistics_twice=True, rngs=nnx.Rngs(0)))


def losses_in_float64(case: dict, tensors) -> np.ndarray:
    """Loss of every step of the original's Trainer, computed in float64."""
    with jax.enable_x64(True):
        recorded = _Case(case, tensors, build_model(case), group(tensors, "param/"))
        return recorded.trainer(float64=True)["trainer/loss_per_step"]


def replay_model(case: dict, tensors) -> dict[str, np.ndarray]:
    given, expects = group(tensors, "param/"), case["expects"]
    codes = bool(case["config"].get("use_encodec"))
    if not given:
        shapes = case["state_dict_shapes"].items()
        given = {key: filled(key, shape, case["fill_seed"], codes) for key, shape in shapes}
    model = build_model(case)
    out = digest("param", given, group(tensors, "sampleidx/"), expects)
    case_ = _Case(case, tensors, model, given)
    del given
    out |= case_.evaluation()
    if any(key.startswith("out_train/") for key in expects):
        out |= case_.training_forward()
    out |= case_.gradient()
    if any(key.startswith(("after3", "final", "trainer")) for key in expects):
        out |= case_.trainer()
    return out


class _Case:
    """A model, its weights, and the computations that a case asks for; each starts from the given weights."""

    def __init__(self, case, tensors, model, given):
        self.case, self.tensors, self.expects = case, tensors, case["expects"]
        load_state_dict(model, given)
        self.model_def = ModelDef.of(model, lambda key: True)
        self.arrays = narrowed(self.model_def.split(model))
        self.batch = widened({k: jnp.asarray(narrow(v)) for k, v in group(tensors, "in/").items()})
        self.train_mode = "train mode" in case.get("grad_of", "train mode")
        self.grad_of = "normalized" if "'normalized'" in case.get("grad_of", "") else "plain"
        self.digests = any(key.startswith("gradstat/") for key in self.expects)

    def model(self, arrays=None):
        return self.model_def.merge(*(arrays or self.arrays))

    def kinds(self, prefix: str) -> list[str]:
        return sorted({key.split("/")[1] for key in self.expects if key.startswith(prefix)})

    def report(self, prefix: str, values: dict) -> dict:
        values = {key: np.asarray(value) for key, value in values.items()}
        if self.digests:
            return digest(prefix, values, group(self.tensors, "sampleidx/"), self.expects)
        return prefixed(f"{prefix}/", values)

    def losses(self, prefix: str, outputs: dict) -> dict:
        targets = [self.batch[name] for name in FIELDS]
        out = {}
        for kind in self.kinds(prefix):
            parts = criterion(kind, self.case["loss_weights"])(outputs, *targets)[1]
            out |= prefixed(f"{prefix}{kind}/", parts)
        return out

    def evaluation(self) -> dict:
        model, batch = self.model(), self.batch
        run = jax.jit(lambda arrays: self._evaluate(self.model_def.merge(widened(arrays[0]), *arrays[1:]), batch))
        outputs, before_round = run(self.arrays)
        rows = {
            "fmri_correlation_rows": metrics.compute_correlation_metric(outputs["predicted_fmri"], batch["fmri"]),
            "fmri_r2_rows": metrics.compute_r2_score(outputs["predicted_fmri"], batch["fmri"]),
        }
        if isinstance(model, MultimodalAutoencoder) and model.options.use_encodec:
            rows["audio_recon_before_round"] = before_round
        return prefixed("out_eval/", {**outputs, **rows}) | self.losses("loss_eval/", outputs)

    @staticmethod
    def _evaluate(model, batch):
        outputs = model(batch["video"], batch["audio"], batch["text"])
        if not isinstance(model, MultimodalAutoencoder):
            return outputs, None
        raw = model.decoder.audio_head(model.decoder.trunk(outputs["bottleneck"]), rounded=False)
        return outputs, raw[..., 0] if model.decoder.frames == 1 else raw

    def training_forward(self) -> dict:
        batch = narrowed(self.batch)

        def run(arrays):
            model = self.model_def.merge(*arrays)
            outputs = model(batch["video"], batch["audio"], batch["text"], batch["fmri"], rngs=Rngs(jax.random.key(0)))
            return outputs, self.model_def.split(model)[2]

        outputs, buffers = jax.jit(in_torch_order(run))(self.arrays)
        internal = {key: value for key, value in outputs.items() if key.endswith("_loss")}
        out = prefixed("out_train/", {key: value for key, value in outputs.items() if key not in internal})
        out |= prefixed("loss_train_internal/", internal) | self.losses("loss_train/", outputs)
        return out | self.report("buffers_after_train_forward", buffers)

    def loss(self, params, buffers, batch, kind, training: bool):
        model = self.model_def.merge(params, {}, buffers)
        rngs = Rngs(jax.random.key(0)) if training else None
        outputs = model(batch["video"], batch["audio"], batch["text"], rngs=rngs)
        total, parts = criterion(kind, self.case["loss_weights"])(outputs, *(batch[name] for name in FIELDS))
        return total, (parts, self.model_def.split(model)[2])

    def gradient(self) -> dict:
        params, _, buffers = self.arrays
        loss = lambda p, b: self.loss(widened(p), b, self.batch, self.grad_of, self.train_mode)
        (total, _), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, buffers)
        return {"loss/total": np.asarray(total), **self.report("grad", grads)}

    def trainer(self, float64: bool = False) -> dict:
        """The original's Trainer: fixed batches, AdamW over one group, clipping, its own learning rate.

        The optimizer is not compiled: every one of its operations rounds, as in torch.
        float64: forward and backward in it, and the optimizer compiled, which rounds less; weights stay float32.
        """
        given = self.case["trainer"]["config"]
        per_epoch, batches = self.train_batches(given)
        head = not str(self.case["generation"]).startswith("gen1")
        rate = rate_of(head, given, per_epoch)
        clip = given["gradient_clip_val"] or None
        config = OptimConfig(lr=given["learning_rate"], weight_decay=given["weight_decay"], clip_norm=clip)
        params, _, buffers = jax.tree.map(jnp.copy, self.arrays)
        optimizer = optimizers.build(config, params, lambda key: "default")
        kind = "normalized" if head else "plain"
        decay = {"default": jnp.float32(given["weight_decay"])}

        compute = widened if float64 else lambda tree: tree
        loss = lambda params, buffers, batch: self.loss(compute(params), buffers, batch, kind, True)
        gradients = jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=OPTIMISED)
        update = (
            jax.jit(optimizer.update, compiler_options=OPTIMISED) if float64 else jax.disable_jit()(optimizer.update)
        )
        state = optimizer.init(params)
        steps = self.expects["trainer/loss_per_step"][0]
        trace, out = [], {}
        for step in range(steps):
            batch = compute({k: jnp.asarray(narrow(v)) for k, v in batches(step % per_epoch).items()})
            lr = rate(step)
            (total, (parts, buffers)), grads = gradients(params, buffers, batch)
            params, state, norm = update(grads, state, params, {"default": jnp.float32(lr)}, decay)
            trace.append({"loss": total, "norm": norm, "lr": lr, "parts": parts})
            if step == 2:
                out |= self.report("after3", self.saved(params, buffers))
        if any(key.startswith("final/") for key in self.expects):
            out |= prefixed("final/", self.saved(params, buffers))
        out |= {
            "trainer/loss_per_step": np.array([point["loss"] for point in trace]),
            "trainer/grad_norm_before_clip_per_step": np.array([point["norm"] for point in trace]),
            "trainer/lr_per_step": np.array([point["lr"] for point in trace], np.float64),
        }
        names = trace[0]["parts"]
        return out | {f"trainer/loss_dict/{n}": np.array([point["parts"][n] for point in trace]) for n in names}

    def saved(self, params, buffers) -> dict:
        return state_dict(self.model_def.merge(params, {}, buffers))

    def train_batches(self, given: dict):
        stored = group(self.tensors, "in_trainer/")
        if stored:
            count = len({key.split("/")[0] for key in stored if key.startswith("train")})
            return count, lambda index: group(stored, f"train{index}/")
        shapes = {k: ((given["batch_size"], *v.shape[1:]), v.dtype) for k, v in group(self.tensors, "in/").items()}
        count = -(-self.expects["trainer/loss_per_step"][0] // given["num_epochs"])
        return count, lambda index: stream_batch(f"b{index}", shapes, self.case["fill_seed"])


def replay_encoders(case: dict, tensors) -> dict[str, np.ndarray]:
    """An encoder alone at its real width: names say which, shapes how wide."""
    out = {}
    for name in case["cases"]:
        shapes = group(case["expects"], f"{name}/param/")
        weights = {key: filled(key, shape, case["fill_seed"]) for key, shape in shapes.items()}
        layers = sum(key.startswith("fc") and key.endswith("weight") for key in shapes)
        sizes = [shapes[f"fc{i}.bias"][0] for i in range(1, layers + 1)]
        x = jnp.asarray(narrow(tensors[f"{name}/in/x"])).astype(jnp.float32)
        relu_first = not name.startswith("audio")
        model = DenseEncoder(x.shape[1], sizes, [0.0] * layers, rngs=nnx.Rngs(0), relu_first=relu_first)
        load_state_dict(model, weights)
        model_def = ModelDef.of(model, lambda key: True)
        params, _, buffers = model_def.split(model)

        def loss(params, name=name, model_def=model_def, buffers=buffers, x=x):
            model = model_def.merge(params, {}, buffers)
            y = model(x, Rngs(jax.random.key(0)))
            return (y * tensors[f"{name}/in/cot"]).sum(), (y, model_def.split(model)[2])

        (total, (y, moved)), grads = jax.value_and_grad(loss, has_aux=True)(params)
        out |= prefixed(f"{name}/param/", weights) | prefixed(f"{name}/grad/", grads)
        out |= {f"{name}/out_eval/y": np.asarray(model(x)), f"{name}/out_train/y": np.asarray(y)}
        out |= {f"{name}/loss/sum": np.asarray(total), **prefixed(f"{name}/buffers_after_train_forward/", moved)}
    return out
