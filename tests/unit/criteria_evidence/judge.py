"""transformers as an independent judge, and tiny encoders of every kind."""

import importlib
import sys

import numpy as np

from jaxtrain.systems.criteria_evidence.encoder_config import Encoder, to_hf, with_defaults

SMALL = {"vocab_size": 60, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 24, "max_position_embeddings": 40}
KINDS = {
    "bert": {"kind": "bert"},
    "bert_relu": {"kind": "bert", "hidden_act": "relu", "type_vocab_size": 3},
    "roberta": {"kind": "roberta"},
    "xlm_roberta": {"kind": "roberta", "model_type": "xlm-roberta"},
    "deberta_v3": {"kind": "deberta", "position_buckets": 6},
    "deberta_v2": {
        "kind": "deberta",
        "position_buckets": -1,
        "max_relative_positions": 7,
        "share_att_key": False,
        "norm_rel_ebd": "none",
        "position_biased_input": True,
        "type_vocab_size": 2,
        "conv_kernel_size": 3,
        "embedding_size": 12,
        "pos_att_type": ("c2p", "p2c"),
    },
    "deberta_c2p": {"kind": "deberta", "pos_att_type": ("c2p",), "position_buckets": 4, "max_relative_positions": 20},
    "deberta_p2c": {"kind": "deberta", "pos_att_type": ("p2c",), "share_att_key": False},
    "deberta_content_only": {"kind": "deberta", "pos_att_type": (), "position_buckets": 4},
    "deberta_absolute": {"kind": "deberta", "relative_attention": False, "position_biased_input": True},
}


def encoder(name: str) -> Encoder:
    return Encoder(**with_defaults({**SMALL, **KINDS[name]}))


def transformers():
    """The package. torchvision from PyPI fails to load beside a CPU-only torch; text models do without it."""
    absent = "torchvision" not in sys.modules
    if absent:
        sys.modules["torchvision"] = None  # type: ignore[assignment]
    try:
        package = importlib.import_module("transformers")
        package.utils.import_utils.is_torchvision_available.cache_clear()  # another test's answer
        for name in ("bert", "roberta", "xlm_roberta", "deberta_v2"):
            importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    finally:
        if absent:
            del sys.modules["torchvision"]
    return package


def hf_model(config: Encoder, seed: int = 0):
    """transformers' own encoder of these sizes, freshly drawn."""
    import torch

    described = to_hf(config)
    package = transformers()
    torch.manual_seed(seed)
    kind = package.AutoConfig.for_model(**described)
    model = getattr(package, described["architectures"][0])(kind)
    for parameter in model.parameters():  # biases and gains differ from 0 and 1, so that they count
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval()


def texts(config: Encoder, seed: int = 0, batch: int = 3, tokens: int = 17) -> dict[str, np.ndarray]:
    """Ids with padding at the end, a text without padding, types."""
    draw = np.random.default_rng(seed)
    ids = draw.integers(2, config.vocab_size, (batch, tokens))
    mask = np.ones((batch, tokens), np.int64)
    for row in range(1, batch):
        mask[row, tokens - 4 * row :] = 0
    ids[mask == 0] = config.pad_token_id
    types = draw.integers(0, max(1, config.type_vocab_size), (batch, tokens))
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
