"""Read encoder sizes and weights from Hugging Face folders, and write a fine-tuned model to one."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from flax import nnx

from jaxtrain import hub
from jaxtrain.errors import UserError
from jaxtrain.runtime.prng import initial_rngs
from jaxtrain.systems.criteria_evidence import encoder_config, lora
from jaxtrain.systems.criteria_evidence.encoder_config import Encoder
from jaxtrain.systems.criteria_evidence.encoders import build_encoder
from torch_bridge.layouts import named_variables
from torch_bridge.lazy_array import LazyArray
from torch_bridge.state_dict import compare, explain

BASE_PREFIXES = ("bert.", "roberta.", "deberta.")


def locate(name: str) -> pathlib.Path:
    """Return the folder of a local path or hub id. Raises UserError if there is neither."""
    return hub.folder_of(name, "model.pretrained", hub.WITH_PICKLES)


def read_sizes(name: str) -> dict[str, Any]:
    """Return the settings of `Encoder` from the config.json of a folder or hub model.

    Raises UserError if the file is missing, not JSON, or describes an unknown model.
    """
    path = locate(name) / "config.json"
    if not path.is_file():
        raise UserError(f"model.pretrained: {path}: no such file; wanted a Hugging Face folder")
    try:
        return encoder_config.from_hf(json.loads(path.read_text(encoding="utf-8")))
    except (json.JSONDecodeError, ValueError) as error:
        raise UserError(f"model.pretrained: {path}: {error}") from None


def encoder_weights(name: str, sizes: Encoder) -> dict[str, Any]:
    """Return the encoder's state dict from a folder or hub model; arrays are not read from their files yet.

    Prefixes of a model with a head (`bert.`) are removed, old names (`gamma`, `beta`) are renamed, and head parameters
    are left out. A missing pooler keeps its random weights. Raises UserError for any other missing key or wrong shape.
    """
    from torch_bridge import files

    folder = locate(name)
    state = rename(files.open_weights(folder))
    model = nnx.eval_shape(lambda: build_encoder(sizes, rngs=initial_rngs(0)))
    expected = {key: (variable.shape, variable.dtype) for key, variable in named_variables(model)}
    missing, _, wrong = compare(expected, state)
    missing = [key for key in missing if not key.startswith("pooler.")]
    if missing or wrong:
        raise UserError(explain(missing, [], wrong, f"model.pretrained {folder}"))
    return {key: state[key] for key in expected if key in state}


def rename(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict under the keys of a bare encoder, without the model prefix and with current names."""
    renamed = {}
    for key, value in state.items():
        for prefix in BASE_PREFIXES:
            key = key.removeprefix(prefix)
        key = key.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        renamed[key] = value
    return renamed


def initial_weights(config: Any) -> dict[str, Any] | None:
    """Return the pretrained encoder weights under the model's own keys, or None without a pretrained encoder."""
    model, weights = config.model, {}
    sources = {"evidence_encoder": "evidence_pretrained", "encoder": "pretrained"}
    joint = hasattr(model, "evidence_encoder")
    for section, source in sources.items():
        name = getattr(model, source, None)
        if name is not None:
            sizes = getattr(model, section)
            prefix = "criteria_encoder" if joint and section == "encoder" else section
            for key, value in encoder_weights(name, sizes).items():
                weights[model_key(key, prefix, model, sizes)] = value
    return weights or None


def model_key(key: str, prefix: str, model: Any, sizes: Encoder) -> str:
    """Return the model's key of an encoder parameter, with the prefixes of the model family and of LoRA adapters."""
    parts = key.split(".")
    if model.lora.enabled:
        if len(parts) > 1 and parts[-2] in model.lora.target_names(sizes):
            parts.insert(-1, "base_layer")
        parts = ["base_model", "model", *parts]
    if model.family == "base":
        prefix = f"{prefix}.encoder"
    return f"{prefix}.{'.'.join(parts)}"


# --- out -----------------------------------------------------------------------------------------------------------


def export(architecture: str, config: Any, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the config.json and the weights of a model that transformers' AutoModel reads; adapters are merged.

    A plain head of family project becomes transformers' own (BertForSequenceClassification,
    RobertaForQuestionAnswering, ...), so AutoModelFor... returns the same logits too. Other heads keep their keys next
    to the encoder's. Raises UserError for joint, which has two encoders.
    """
    model = config.model
    if architecture == "joint":
        raise UserError("--hf: a joint model has two encoders, a Hugging Face folder one; take --output F.safetensors")
    described = encoder_config.to_hf(model.encoder)
    if model.lora.enabled:
        state = lora.merge(state, model.lora.alpha / model.lora.r)
    inner = "encoder.encoder." if model.family == "base" else "encoder."
    encoder = {key.removeprefix(inner): value for key, value in state.items() if key.startswith(inner)}
    heads = {key: value for key, value in state.items() if not key.startswith(inner)}
    known = transformers_head(architecture, model, heads, encoder)
    if known is None:
        return described, encoder | heads
    name, tensors = known
    described["architectures"] = [name]
    described["num_labels"] = model.num_labels if architecture == "criteria" else 2
    if architecture == "criteria":
        described["id2label"] = {str(i): label for i, label in enumerate(label_names(model.num_labels))}
        described["label2id"] = {label: i for i, label in enumerate(label_names(model.num_labels))}
    prefix = "bert." if model.encoder.kind == "bert" else "roberta."
    return described, {f"{prefix}{key}": value for key, value in encoder.items()} | tensors


def transformers_head(architecture: str, model: Any, heads: Mapping[str, Any], encoder: dict) -> tuple | None:
    """Return the class name and head tensors if transformers has exactly this head, else None.

    Removes from `encoder` the pooler keys that move into the head or that its class does not have.
    """
    kind = model.encoder.kind
    if model.family != "project" or kind == "deberta" or architecture == "share":
        return None
    class_prefix = {"bert": "Bert", "roberta": "Roberta"}[kind]
    if model.encoder.model_type == "xlm-roberta":
        class_prefix = "XLMRoberta"
    if architecture == "evidence":
        unused = [key for key in encoder if key.startswith("pooler.")]
        for key in unused:
            del encoder[key]
        tensors = {f"qa_outputs.{kind_}": heads[f"span_head.linear.{kind_}"] for kind_ in ("weight", "bias")}
        return f"{class_prefix}ForQuestionAnswering", tensors
    if any(".hidden_layers." in key for key in heads):
        return None
    ends = ("weight", "bias")
    if kind == "bert":
        tensors = {f"classifier.{end}": heads[f"classifier.output_layer.{end}"] for end in ends}
    else:  # RobertaClassificationHead is tanh(dense(first token)), which is our pooler, and a Linear
        tensors = {f"classifier.dense.{end}": encoder.pop(f"pooler.dense.{end}") for end in ends}
        tensors |= {f"classifier.out_proj.{end}": heads[f"classifier.output_layer.{end}"] for end in ends}
    return f"{class_prefix}ForSequenceClassification", tensors


def label_names(count: int) -> list[str]:
    return ["absent", "present"] if count == 2 else [f"LABEL_{i}" for i in range(count)]


def save(architecture: str, config: Any, state: Mapping[str, Any], folder: str | pathlib.Path, tokenizer=None):
    """Write config.json, model.safetensors and, if a tokenizer is given, its files; return the folder."""
    from torch_bridge import files

    described, tensors = export(architecture, config, state)
    folder = files.save_folder({key: as_array(value) for key, value in tensors.items()}, described, folder)
    for name, text in ({} if tokenizer is None else tokenizer_files(config, tokenizer)).items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def tokenizer_files(config: Any, tokenizer: Any) -> dict[str, str]:
    """Return the text files that AutoTokenizer.from_pretrained reads, by file name."""
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": tokenizer.pad_token}
    settings["model_max_length"] = min(config.model.encoder.longest, 512)
    return {"tokenizer.json": tokenizer.json, "tokenizer_config.json": json.dumps(settings, indent=1)}


def as_array(value: Any) -> Any:
    return value if isinstance(value, (LazyArray, np.ndarray)) else np.asarray(value)
