"""Recipes of the H-JEPA golden cases about parts: losses, masks, evaluation."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.systems.hjepa import losses, masks, regularizers
from jaxtrain.systems.hjepa.evals.knn import KNN
from jaxtrain.systems.hjepa.evals.linear_probe import LinearProbe
from jaxtrain.systems.hjepa.losses import LossInputs
from jaxtrain.systems.hjepa.model import HJEPA
from jaxtrain.systems.hjepa.transforms import eval_transform
from torch_bridge.layouts import named_variables
from torch_bridge.state_dict import load_state_dict

BASE = "vit_tiny_patch16_224"  # the preset whose sizes the cases' `vit_kwargs` override


def parameters_of(tensors: dict, prefix: str = "param/") -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def numbers_in(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text)]


# ---- losses


def replay_losses(case: dict, tensors: dict) -> dict:
    inputs = {key.removeprefix("in/"): jnp.asarray(value) for key, value in tensors.items() if key.startswith("in/")}
    found = {}
    for name, entry in case["cases"].items():
        if isinstance(entry, dict):
            function = _loss_of(entry, inputs)
            floats = {key: x for key, x in inputs.items() if key.startswith(("pred", "target", "context"))}
            compared = lambda floats, function=function: ((terms := function(floats))["loss"], terms)
            (_, terms), grads = jax.jit(jax.value_and_grad(compared, has_aux=True))(floats)
            found |= {f"loss/{name}/{key}": value for key, value in terms.items()}
            found |= {f"grad/{name}/{key}": value for key, value in grads.items()}
    for method, options in case.get("epps", {}).items():
        found |= _epps(method, options, inputs["epps_x"])
    return found


def _epps(method: str, options: dict, x) -> dict:
    if method == "reference_points":
        points = options.get("num_points", options.get("num_test_points", 17))
        value = regularizers.epps_pulley(x, test_method=method, num_test_points=points)
        return {f"out/epps_{method}": value, "out/epps_reference_buffer": regularizers.reference_points(points)}
    t_min, t_max = options.get("t_min", 0.2), options.get("t_max", 4.0)
    count = options.get("num_quadrature", 32)
    value = regularizers.epps_pulley(
        x, test_method=method, t_min=t_min, t_max=t_max, num_quadrature=count, lambda_=options.get("lambda", 1.0)
    )
    buffer = regularizers.quadrature_points(t_min, t_max, count)
    return {f"out/epps_{method}": value, "out/epps_quadrature_buffer": buffer}


def _levels(inputs: dict, name: str) -> list:
    return [inputs[f"{name}/{level}"] for level in range(sum(key.startswith(f"{name}/") for key in inputs))]


def _loss_of(entry: dict, inputs: dict):
    """The case's loss as a function of its float inputs -> terms."""
    kind = entry["class"]
    if kind == "HJEPALoss":
        options = {key: entry[key] for key in _HJEPA_OPTIONS if key in entry}
        given = _levels(inputs, "mask") if entry.get("masks") else None
        return lambda floats: losses.hjepa(
            LossInputs(_levels(floats, "pred"), _levels(floats, "target"), masks=given),
            masked_mean="position",
            **options,
        )
    if kind in ("CombinedLoss", "HierarchicalCombinedLoss"):
        return _combined_of(entry)
    if kind == "ContrastiveJEPALoss":
        return _contrastive_of(entry)
    views = lambda floats: [_pick(text, floats) for text in _views(entry)]
    if kind == "VICRegLoss":
        options = dict(zip(_VICREG_ORDER, entry.get("args", ()), strict=False))
        options |= {key: entry[key] for key in _VICREG_ORDER if key in entry} | entry.get("kwargs", {})
        return lambda floats: regularizers.vicreg(*views(floats), **options)
    if kind == "NTXentLoss":
        options = {key: entry[key] for key in ("temperature", "use_cosine_similarity") if key in entry}
        return lambda floats: regularizers.ntxent(*views(floats), **options)
    directions = inputs["sigreg_slices"]
    sliced = {
        ours: entry[theirs]
        for theirs, ours in (
            ("test_method", "test_method"),
            ("num_test_points", "num_test_points"),
            ("char_function_num_quadrature", "num_quadrature"),
            ("char_function_t_min", "t_min"),
            ("char_function_t_max", "t_max"),
            ("char_function_lambda", "lambda_"),
            ("flatten_patches", "flatten_patches"),
            ("eps", "eps"),
        )
        if theirs in entry
    }
    if kind == "SIGRegLoss":
        sliced |= {key: entry[key] for key in ("invariance_weight", "sigreg_weight") if key in entry}
        return lambda floats: regularizers.sigreg(*views(floats), directions, **sliced)
    if kind == "HybridVICRegSIGRegLoss":
        weights = {key: entry.get(key, 1.0) for key in ("vicreg_weight", "sigreg_weight")}
        return lambda floats: _hybrid(*views(floats), directions, weights, {"eps": entry.get("eps", 1e-6)}, sliced)
    raise ValueError(f"no recipe for the loss class {kind}")


def _hybrid(a, b, directions, weights: dict, vicreg_options: dict, sigreg_options: dict) -> dict:
    """vicreg_weight * VICReg + sigreg_weight * SIGReg, in which sigreg_weight also multiplies the statistic."""
    first = regularizers.vicreg(a, b, **vicreg_options)
    second = regularizers.sigreg(a, b, directions, **({"sigreg_weight": weights["sigreg_weight"]} | sigreg_options))
    return {
        "loss": weights["vicreg_weight"] * first["loss"] + weights["sigreg_weight"] * second["loss"],
        "vicreg_loss": first["loss"],
        "sigreg_loss": second["loss"],
        "invariance_loss": first["invariance_loss"],
        "variance_loss": first["variance_loss"],
        "covariance_loss": first["covariance_loss"],
        "sigreg_regularization": second["sigreg_loss"],
    }


_HJEPA_OPTIONS = (
    "loss_type", "hierarchy_weights", "reduction", "normalize_embeddings", "huber_delta", "eps", "detach_targets",
)  # fmt: skip
_VICREG_ORDER = (
    "invariance_weight", "variance_weight", "covariance_weight", "variance_threshold", "eps", "flatten_patches",
)  # fmt: skip


def _views(entry: dict) -> list[str]:
    text = entry.get("inputs", "pred/0, target/0")
    return re.findall(r"[a-z]+\d?(?:/\d+)?(?:\[[^\]]*\])?", re.split(r" alone| \(", text)[0])


def _pick(text: str, floats: dict):
    """`pred/0[:,0]` -> that array at that index."""
    name, _, index = text.partition("[")
    if not index:
        return floats[name]
    parts = [
        slice(*(int(end) if end else None for end in part.split(":"))) if ":" in part else int(part)
        for part in index.rstrip("]").replace(" ", "").split(",")
    ]
    return floats[name][tuple(parts)]


def _combined_of(entry: dict):
    jepa = {
        "loss_type": entry.get("jepa_loss_type", "smoothl1"),
        "hierarchy_weights": entry.get("jepa_hierarchy_weights", 1.0),
        "normalize_embeddings": entry.get("normalize_embeddings", True),
        "masked_mean": "position",
    }

    def function(floats):
        given = LossInputs(
            _levels(floats, "pred"), _levels(floats, "target"), floats["context"] if entry.get("context") else None
        )
        weight = entry.get("vicreg_weight", 0.1)
        if entry["class"] == "HierarchicalCombinedLoss":
            return losses.hierarchical_combined(
                given, jepa=jepa, vicreg_configs=entry["vicreg_configs"], vicreg_weight=weight
            )
        regular = {
            key.removeprefix("vicreg_"): entry[key]
            for key in entry
            if key.startswith("vicreg_") and key.endswith(("invariance_weight", "variance_weight", "threshold", "eps"))
        }
        return losses.combined(
            given,
            jepa=jepa,
            vicreg_options={"eps": 1e-8} | regular,
            vicreg_weight=weight,
            apply_vicreg_per_level=entry.get("apply_vicreg_per_level", True),
            vicreg_on_targets=entry.get("vicreg_on_targets", False),
        )

    return function


def _contrastive_of(entry: dict):
    words = entry["jepa"]
    weights = re.search(r"\[(.*?)\]", words)
    jepa = {
        "loss_type": re.search(r"smoothl1|mse|huber", words).group(),
        "normalize_embeddings": "normalized" in words,
        "hierarchy_weights": numbers_in(weights.group(1).replace(",.", ",0.")) if weights else 1.0,
        "masked_mean": "position",
    }
    options = {key: entry[key] for key in ("jepa_weight", "contrastive_weight", "temperature") if key in entry}
    return lambda floats: losses.contrastive(
        LossInputs(_levels(floats, "pred"), _levels(floats, "target")),
        floats[entry.get("view_i", "context")],
        floats[entry.get("view_j", "context2")],
        jepa=jepa,
        **options,
    )


# ---- masks


def replay_masks(case: dict, tensors: dict) -> dict:
    found: dict = {}
    for name, entry in case["cases"].items():
        rng = np.random.RandomState(entry["np_random_seed"])
        generator = getattr(masks, entry["class"])(**entry["kwargs"], rng=rng)
        drawn = generator(entry["batch_size"])
        if isinstance(drawn, tuple):
            drawn = dict(zip(("context", "targets"), drawn, strict=True))
        _flatten(f"out/{name}", drawn, found)
    return found


def _flatten(prefix: str, value, found: dict) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{prefix}/{key}", inner, found)
    else:
        found[prefix] = value


# ---- evaluation


def replay_evaluation(case: dict, tensors: dict) -> dict:
    found: dict = {}
    train, test = ((tensors.get(f"in/{s}_features"), tensors.get(f"in/{s}_labels")) for s in ("train", "test"))
    for name, entry in case["cases"].items():
        if name.startswith("knn_"):
            knn = KNN(*train, normalize=entry.get("normalize", True), **entry["kwargs"])
            found[f"out/{name}/predictions"], found[f"out/{name}/probs"] = knn.predict(test[0])
        elif name.startswith("probe_"):
            found |= _probe(name, entry, train, test, parameters_of(tensors, f"param/{name}."))
        elif name.startswith("transform_"):
            letter = name.removeprefix("transform_")
            found[f"out/transform/{letter}"] = eval_transform(entry["image_size"])(tensors[f"in/transform/{letter}"])
    if "in/infer_images" in tensors:
        model = _hjepa_from_shapes(case, tensors)
        for level in range(model.num_hierarchies):
            found[f"out/optimized/{level}"] = model.extract_features(jnp.asarray(tensors["in/infer_images"]), level)
    return found


def _probe(name: str, entry: dict, train, test, params: dict) -> dict:
    width, classes = train[0].shape[-1], params["classifier.weight"].shape[0]
    probe = LinearProbe(width, classes, **entry["probe_kwargs"], rngs=nnx.Rngs(0))
    load_state_dict(probe, params)
    found = {f"out/{name}/logits_init": probe(jnp.asarray(test[0]))}
    probe.fit(*train, batch_size=entry.get("batch_size", 8), shuffle=False, **entry["train_kwargs"])
    return found | {f"out/{name}/after.{key}": variable[...] for key, variable in named_variables(probe)}


def _hjepa_from_shapes(case: dict, tensors: dict) -> HJEPA:
    """The model of the inference case: its sizes are in its tensors, its heads in the JSON where it says."""
    params = parameters_of(tensors, "param/hjepa.")
    prefix = "context_encoder.vit."
    width, patch = params[prefix + "cls_token"].shape[-1], params[prefix + "patch_embed.proj.weight"].shape[-1]
    depth = 1 + max(int(key[len(prefix) :].split(".")[1]) for key in params if key.startswith(prefix + "blocks."))
    levels = 1 + max(int(key.split(".")[1]) for key in params if key.startswith("hierarchy_projections."))
    sizes = {"patch_size": patch, "embed_dim": width, "depth": depth}
    stated = case.get("vit_kwargs") or case["cases"].get("optimized", {}).get("vit_kwargs") or {}
    model = HJEPA(
        BASE,
        tensors["in/infer_images"].shape[-1],
        width,
        predictor_depth=1,
        predictor_num_heads=1,
        num_hierarchies=levels,
        vit=sizes | {"num_heads": stated.get("num_heads", max(1, width // 8))},
        rngs=nnx.Rngs(0),
    )
    load_state_dict(model, params, strict=False)
    return model
