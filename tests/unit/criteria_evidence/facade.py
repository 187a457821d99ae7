"""Tiny encoders as Hugging Face folders, and golden models built through the facade."""

import functools
import importlib
import json
import pathlib
import shutil

import torch
from safetensors.torch import load_file, save_file

from jaxtrain.systems.criteria_evidence.encoder_config import Encoder, to_hf, with_defaults
from tests.unit.criteria_evidence.golden import FOLDER
from tests.unit.criteria_evidence.judge import hf_model, transformers

ENCODER = {"kind": "bert", "vocab_size": 131, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
ENCODER |= {"intermediate_size": 8, "max_position_embeddings": 64}


@functools.cache
def original(name: str):
    """A module of the facade; transformers' models are loaded first, without torchvision (see judge.transformers)."""
    transformers()
    return importlib.import_module(f"jaxtrain.systems.criteria_evidence.original.{name}")


def folder_of(path: pathlib.Path, values: dict | None = None) -> str:
    """A folder that AutoModel and AutoTokenizer read: a tiny random encoder and the fixture's tokenizer."""
    known = {key: value for key, value in (values or ENCODER).items() if key in Encoder.model_fields}
    config = Encoder(**with_defaults(known | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}))
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(to_hf(config)))
    state = {key: value.contiguous() for key, value in hf_model(config).state_dict().items()}
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(FOLDER / "fixture" / "tokenizer.json", path)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(path)


def case_of(name: str) -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((FOLDER / f"{name}.json").read_text()), load_file(FOLDER / f"{name}.safetensors")


def params_of(tensors: dict, prefix: str = "param/") -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
