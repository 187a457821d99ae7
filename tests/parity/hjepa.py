"""Recipes of the H-JEPA golden cases: from a case's JSON, parameters and inputs to every output that it expects."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.config import OptimConfig
from jaxtrain.nn import Rngs, rotary
from jaxtrain.nn.vit import Encoder, ViTSize, vit_size
from jaxtrain.optim import optimizer as optim
from jaxtrain.systems.hjepa import regularizers, tokens
from jaxtrain.systems.hjepa.config import LossConfig
from jaxtrain.systems.hjepa.losses import LossInputs, build
from jaxtrain.systems.hjepa.model import HJEPA, Outputs
from jaxtrain.systems.hjepa.original.schedules import OriginalProcedure
from jaxtrain.systems.hjepa.pretraining import is_trainable, momentum_at, move_towards
from jaxtrain.systems.hjepa.world_model import LeWorldModel, goal_distance, rollout
from jaxtrain.train.step.state import ModelDef
from tests.parity.hjepa_parts import BASE, numbers_in, parameters_of, replay_evaluation, replay_losses, replay_masks
from torch_bridge.layouts import named_variables
from torch_bridge.state_dict import load_state_dict


def claims(name: str, case: dict) -> bool:
    """Whether a case's JSON is one of this system's kinds."""
    return _recipe(case) is not None


def replay(name: str, case: dict, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Every tensor under `case["expects"]`."""
    with jax.default_matmul_precision("highest"):
        return _recipe(case)(case, tensors)


def _recipe(case: dict):
    if "lewm_kwargs" in case:
        return replay_world_model
    if "encoder_kwargs" in case and "vit_kwargs" in case:
        return replay_rope
    if "ema_kwargs" in case:
        return replay_ema
    if "hjepa_kwargs" in case:
        return replay_checkpoint if "file" in case else replay_model
    entries = case.get("cases")
    if not isinstance(entries, dict):
        return None
    classes = {str(entry.get("class")) for entry in entries.values() if isinstance(entry, dict)}
    if any(kind.endswith("MaskGenerator") for kind in classes):
        return replay_masks
    if classes & {"HJEPALoss", "VICRegLoss", "CombinedLoss", "NTXentLoss", "SIGRegLoss", "HierarchicalCombinedLoss"}:
        return replay_losses
    if any(name.startswith(("knn_", "probe_", "fq_", "transform_", "collapse_metrics")) for name in entries):
        return replay_evaluation
    return None


# ---- models


def build_hjepa(case: dict) -> HJEPA:
    known = dict(case["hjepa_kwargs"])
    for absent in ("ema_momentum", "ema_momentum_end", "ema_warmup_steps", "pretrained", "use_flash_attention"):
        known.pop(absent, None)  # of the procedure or without effect on numbers
    known["encoder_type"] = BASE
    return HJEPA(**known, vit=case["vit_kwargs"], rngs=nnx.Rngs(0))


def in_lists(mask: np.ndarray) -> tokens.Masked:
    """The mask as the original pads it: to the batch's largest count."""
    mask = np.asarray(mask) > 0.5
    return tokens.Masked(*tokens.masked_patches(jnp.asarray(mask), int(mask.sum(1).max())), int(mask.sum(1).max()))


def forward_outputs(model, tensors) -> tuple[dict, Outputs, list]:
    """`out/*` of one evaluation forward, the forward's own outputs, and the validity that the original reports."""
    model_def = ModelDef.of(model, lambda key: True)
    masked = in_lists(tensors["in/mask"])

    @jax.jit
    def run(params, frozen, buffers, images, mask):
        live = model_def.merge(params, frozen, buffers)
        outputs = live(images, mask, masked)
        valid = live.original_validity(masked)
        found = {"out/context_features": outputs.context_features, "out/target_features": outputs.target_features}
        for level in range(live.num_hierarchies):
            found[f"out/predictions/{level}"] = outputs.predictions[level]
            found[f"out/targets/{level}"] = outputs.targets[level]
            found[f"out/masks_valid/{level}"] = valid[level]
            for encoder in ("target", "context"):
                features = live.extract_features(images, level, encoder == "target")
                found[f"out/extract_features/{encoder}/{level}"] = features
        found["out/encode_context_nomask"] = live.encode_context(images)
        return found, outputs._replace(masked=None), valid

    return run(*model_def.split(model), jnp.asarray(tensors["in/images"]), jnp.asarray(tensors["in/mask"]))


def compared(model, outputs, directions, masks=None) -> LossInputs:
    return LossInputs(outputs.predictions, outputs.targets, outputs.context_features, masks, directions)


def replay_model(case: dict, tensors: dict) -> dict:
    vit_kwargs = case.get("encoder", case).get("vit_kwargs", case.get("vit_kwargs", {}))
    case = case | {"vit_kwargs": vit_kwargs}
    model = build_hjepa(case)
    load_state_dict(model, parameters_of(tensors))
    found, outputs, reported = forward_outputs(model, tensors)
    loss = build(LossConfig(**case["loss_config"]), model.num_hierarchies, masked_mean="position")
    directions = tensors.get("in/sigreg_slices")
    for group, valid in (("loss", None), ("loss_masked", reported)):
        terms = loss(compared(model, outputs, directions, valid), outputs.target_features)
        found |= {f"{group}/{key}": value for key, value in terms.items()}
    found |= _gradients(model, loss, directions, tensors)
    found |= _after_training(case, model, loss, directions, tensors)
    return found


def _gradients(model, loss, directions, tensors) -> dict:
    model_def = ModelDef.of(model, lambda key: True)
    params, frozen, buffers = model_def.split(model)
    masked = in_lists(tensors["in/mask"])

    def value(params, buffers, images, mask):
        live = model_def.merge(params, frozen, buffers)
        outputs = live(images, mask, masked, rngs=Rngs(jax.random.key(0)))
        terms = loss(compared(live, outputs, directions), outputs.target_features)
        return terms["loss"], (terms, outputs.predictions, outputs.targets, model_def.split(live)[2])

    step = jax.jit(jax.value_and_grad(value, has_aux=True))
    (_, (terms, predictions, targets, buffers)), grads = step(params, buffers, tensors["in/images"], tensors["in/mask"])
    found = {f"loss_train/{key}": item for key, item in terms.items()} | {f"grad/{k}": v for k, v in grads.items()}
    for level in range(len(predictions)):
        found[f"out/train/predictions/{level}"] = predictions[level]
        found[f"out/train/targets/{level}"] = targets[level]
    return found | {f"out/buffers_after_one_train_forward/{key}": item for key, item in buffers.items()}


def training_optimizer(training: dict, shapes: dict):
    """The original's create_optimizer as a config of this project's optimizer."""
    name = training.get("optimizer", "adamw").lower()
    beta1, beta2 = (training.get("betas") or (0.9, 0.95)) if name == "adamw" else (0.9, 0.999)
    config = OptimConfig(
        name=name,
        beta1=beta1,
        beta2=beta2,
        momentum=training.get("momentum", 0.9) if name == "sgd" else 0.0,
        weight_decay=training.get("weight_decay", 0.0),
        clip_norm=training.get("clip_grad") or None,
    )
    return optim.build(config, shapes, lambda key: "default"), config.weight_decay


def _after_training(case: dict, model, loss, directions, tensors) -> dict:
    """`after3/*`: the original's loop over the micro-batches in/step*/, gradients summed, target moved first."""
    training = case["training_config"]
    batches = sorted({int(found.group(1)) for key in tensors if (found := re.match(r"in/step(\d+)/", key))})
    if not batches:
        return {}
    procedure = OriginalProcedure(training, case.get("trainer", {}).get("steps_per_epoch", 0) or len(batches))
    if "trainer" in case:
        procedure = OriginalProcedure(
            training, case["trainer"]["steps_per_epoch"] * training.get("accumulation_steps", 1)
        )
    model_def = ModelDef.of(model, lambda key: is_trainable(key, None))
    params, frozen, buffers = model_def.split(model)
    optimizer, decay = training_optimizer(training, params)
    state = optimizer.init(params)

    @functools.partial(jax.jit, static_argnums=6)
    def micro_batch(params, frozen, buffers, images, mask, momentum, length):
        def value(params):
            live = model_def.merge(params, frozen, buffers)
            masked = tokens.Masked(*tokens.masked_patches(mask, length), length)
            outputs = live(images, mask, masked, rngs=Rngs(jax.random.key(0)))
            terms = loss(compared(live, outputs, directions), outputs.target_features)
            return terms["loss"], model_def.split(live)[2]

        (_, moved), grads = jax.value_and_grad(value, has_aux=True)(params)
        live = model_def.merge(params, frozen, moved)
        if live.target_encoder is not None:
            move_towards(live.target_encoder, live.context_encoder, momentum)
        return grads, *model_def.split(live)[1:]

    update = jax.jit(optimizer.update)
    summed, step = None, 0
    for count, batch in enumerate(batches, start=1):
        images, mask = (tensors[f"in/step{batch}/{name}"] for name in ("images", "mask"))
        length = int(np.asarray(mask).sum(1).max())
        given = (params, frozen, buffers, images, mask, procedure.momentum(step), length)
        grads, frozen, buffers = micro_batch(*given)
        summed = grads if summed is None else {key: summed[key] + grads[key] for key in grads}
        if count % procedure.accumulation_steps:
            continue
        rates = ({"default": jnp.float32(value)} for value in (procedure.lr(step), decay))
        params, state, _ = update(summed, state, params, *rates)
        summed, step = None, step + 1
    return {f"after3/{key}": value for key, value in (params | frozen | buffers).items()}


def replay_checkpoint(case: dict, tensors: dict) -> dict:
    """A `.pth` of the original, read through the importer that users have."""
    import pathlib

    from jaxtrain.systems.hjepa.original.torch_checkpoint import read_checkpoint

    model = build_hjepa(case)
    path = pathlib.Path(__file__).parents[1] / "golden" / "hjepa" / case["file"]
    load_state_dict(model, read_checkpoint(path)["model_state_dict"])
    return forward_outputs(model, tensors)[0]


def replay_ema(case: dict, tensors: dict) -> dict:
    options = case["ema_kwargs"]
    model = _encoders_from_shapes(parameters_of(tensors))
    found = {}
    for step in case["steps"]:
        momentum = momentum_at(step, options["ema_momentum"], options["ema_momentum_end"], options["ema_warmup_steps"])
        move_towards(model.target_encoder, model.context_encoder, momentum)
        found |= {f"out/after_step_{step}/{key}": np.asarray(v[...]) for key, v in named_variables(model)}
    return found


def _encoders_from_shapes(params: dict) -> nnx.Module:
    """Both encoders with the sizes that their tensors have; the number of heads does not matter here."""
    prefix = "context_encoder.vit."
    width = params[prefix + "cls_token"].shape[-1]
    patch = params[prefix + "patch_embed.proj.weight"].shape[-1]
    depth = 1 + max(int(key[len(prefix) :].split(".")[1]) for key in params if key.startswith(prefix + "blocks."))
    grid = int(np.sqrt(params[prefix + "pos_embed"].shape[1] - 1))
    ratio = params[prefix + "blocks.0.mlp.fc1.weight"].shape[0] / width
    gain = 1.0 if prefix + "blocks.0.ls_attn.gamma" in params else None
    size = ViTSize(patch, width, depth, 1, ratio, params[prefix + "patch_embed.proj.weight"].shape[1])

    class Pair(nnx.Module):
        def __init__(self):
            self.context_encoder = Encoder(grid * patch, size, layerscale_init=gain, rngs=nnx.Rngs(0))
            self.target_encoder = Encoder(grid * patch, size, layerscale_init=gain, rngs=nnx.Rngs(1))

    model = Pair()
    load_state_dict(model, params, strict=False)
    return model


def replay_rope(case: dict, tensors: dict) -> dict:
    options = dict(case["encoder_kwargs"])
    size = vit_size(BASE, **case["vit_kwargs"])
    build_encoder = lambda: Encoder(
        options["img_size"],
        size,
        rope_theta=options.get("rope_theta", 10000.0) if options.get("use_rope") else None,
        layerscale_init=options.get("layerscale_init", 1e-5) if options.get("use_layerscale") else None,
        rngs=nnx.Rngs(0),
    )
    context, target = build_encoder(), build_encoder()
    load_state_dict(context, parameters_of(tensors, "param/context."))
    load_state_dict(target, parameters_of(tensors, "param/target."))
    images, mask = jnp.asarray(tensors["in/images"]), jnp.asarray(tensors["in/mask"])
    found = {"out/context_masked": context(images, mask), "out/context_nomask": context(images)}
    found["out/target"] = target(images)
    model_def = ModelDef.of(context, lambda key: True)
    params, frozen, buffers = model_def.split(context)
    loss = lambda params: jnp.square(model_def.merge(params, frozen, buffers)(images, mask)).mean()
    found["loss/loss"], grads = jax.jit(jax.value_and_grad(loss))(params)
    found |= {f"grad/context.{key}": value for key, value in grads.items()}
    key = next(key for key in case if key.startswith("ema_momenta_returned_for_steps"))
    start, end, ramp = numbers_in(case["how"]["out/target_after_ema"].rpartition("momentum")[2])[:3]
    for step in map(int, re.findall(r"\d+", key)):
        move_towards(target, context, momentum_at(step, start, end, int(ramp)))
    found |= {f"out/target_after_ema.{key}": variable[...] for key, variable in named_variables(target)}
    return found | _rope_tables(case, tensors, size, options)


def _rope_tables(case: dict, tensors: dict, size: ViTSize, options: dict) -> dict:
    theta, grid = options.get("rope_theta", 10000.0), options["img_size"] // size.patch_size
    found = {}
    for name in tensors:
        match = re.fullmatch(r"in/rope_([qk])(?:_(\d+)x(\d+))?", name)
        if match:
            x = jnp.asarray(tensors[name])
            rows, columns = (int(match.group(2)), int(match.group(3))) if match.group(2) else (grid, grid)
            if not match.group(2) and rows * columns != x.shape[2]:
                rows = columns = int(np.sqrt(x.shape[2]))
            cos, sin = rotary.grid_table(rows, columns, x.shape[-1], theta)
            found["out" + name[2:]] = rotary.rotate_pairs(x.swapaxes(1, 2), cos, sin).swapaxes(1, 2)
            if not match.group(2):
                angles = rotary.axis_angles(rows, columns, x.shape[-1], theta)
                found["out/rope_freqs_h"], found["out/rope_freqs_w"] = angles
    return found


# ---- the world model


def replay_world_model(case: dict, tensors: dict) -> dict:
    model = LeWorldModel(**case["lewm_kwargs"] | {"encoder_type": BASE}, vit=case["vit_kwargs"], rngs=nnx.Rngs(0))
    load_state_dict(model, parameters_of(tensors))
    frames, actions = jnp.asarray(tensors["in/frames"]), jnp.asarray(tensors["in/actions"])
    found = _predict_and_plan(model, frames, actions, jnp.asarray(tensors["in/plan_actions"]))
    return found | _train_world_model(case, model, tensors)


@nnx.jit
def _predict_and_plan(model, frames, actions, planned) -> dict:
    found = {f"out/{key}": value for key, value in model(frames, actions)._asdict().items()}
    start, goal = model.frame_encoder(jnp.stack([frames[0, 0], frames[0, -1]]))
    found |= {"out/plan_z_init": start, "out/plan_z_goal": goal}
    found["out/plan_rollout"] = rollout(model.action_predictor, start, planned)
    found["out/plan_cost"] = goal_distance(found["out/plan_rollout"], goal)
    return found


def _train_world_model(case: dict, model, tensors: dict) -> dict:
    frames, actions = jnp.asarray(tensors["in/frames"]), jnp.asarray(tensors["in/actions"])
    weight = float(re.search(r"([\d.]+)\*sigreg", case["loss"]).group(1))
    quadrature = int(re.search(r"(\d+) quadrature", case["loss"]).group(1))
    t_min, t_max = numbers_in(re.search(r"\[(.*?)\]", case["loss"]).group(1))
    lambda_ = float(re.search(r"lambda ([\d.]+)", case["loss"]).group(1))
    test = {
        "test_method": "char_function",
        "num_quadrature": quadrature,
        "t_min": t_min,
        "t_max": t_max,
        "lambda_": lambda_,
    }
    model_def = ModelDef.of(model, lambda key: True)
    params, frozen, buffers = model_def.split(model)

    @jax.jit
    def step(params, buffers):
        def value(params):
            live = model_def.merge(params, frozen, buffers)
            outputs = live(frames, actions, rngs=Rngs(jax.random.key(0)))
            wanted = jax.lax.stop_gradient(outputs.target_embeddings)
            prediction = jnp.square(outputs.prediction_inputs - wanted).mean()
            rows = outputs.embeddings.reshape(-1, outputs.embeddings.shape[-1])
            statistic = regularizers.sigreg_statistic(rows, jnp.asarray(tensors["in/sigreg_slices"]), **test)
            terms = {"prediction": prediction, "sigreg": statistic, "loss": prediction + weight * statistic}
            return terms["loss"], (terms, outputs, model_def.split(live)[2])

        return jax.value_and_grad(value, has_aux=True)(params)

    numbers = dict(re.findall(r"(lr|eps|weight_decay) ([\d.e-]+)", case["optimizer"]))
    beta1, beta2 = numbers_in(re.search(r"betas \((.*?)\)", case["optimizer"]).group(1))
    steps = int(re.search(r"(\d+) steps", case["optimizer"]).group(1))
    config = OptimConfig(beta1=beta1, beta2=beta2, eps=float(numbers["eps"]), clip_norm=None)
    optimizer = optim.build(config, params, lambda key: "default")
    rates = [{"default": jnp.float32(numbers[key])} for key in ("lr", "weight_decay")]
    state, update, found = optimizer.init(params), jax.jit(optimizer.update), {}
    for index in range(steps):
        (_, (terms, outputs, buffers)), grads = step(params, buffers)
        if index == 0:
            found |= {f"loss/{key}": value for key, value in terms.items()}
            found |= {f"out/train/{key}": value for key, value in outputs._asdict().items()}
            found |= {f"grad/{key}": value for key, value in grads.items()}
        params, state, _ = update(grads, state, params, *rates)
    return found | {f"after{steps}/{key}": value for key, value in (params | buffers).items()}
