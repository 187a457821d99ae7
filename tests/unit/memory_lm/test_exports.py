"""Exports that other libraries read, judged by those libraries."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import exports, pretrained
from jaxtrain.systems.memory_lm.adapter import build_model
from jaxtrain.systems.memory_lm.config import Memory, Model
from jaxtrain.systems.memory_lm.lora import lora_layers
from tests.unit.memory_lm.models import MODEL, ids, small
from torch_bridge import files
from torch_bridge.state_dict import load_state_dict, open_state_dict

BASE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}


@pytest.fixture
def trained(tmp_path):
    """A Qwen2 folder, and an adapter on it whose LoRA is not zero any more."""
    torch.manual_seed(0)
    base = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**BASE)).eval()
    base.save_pretrained(tmp_path / "base")
    config = SimpleNamespace(
        model=Model(base_model_name=str(tmp_path / "base")),
        memory=Memory(use_memory_adapter=False, use_lora=True, lora_rank=4, lora_alpha=8),
        compat="correct",
    )
    model = build_model(config, nnx.Rngs(0))
    load_state_dict(model, pretrained.initial_weights(config), strict=False)
    for i, (_, layer) in enumerate(lora_layers(model)):
        layer.lora_B[...] = jnp.asarray(np.random.default_rng(i).normal(size=layer.lora_B.shape), jnp.float32) * 0.1
    return config, model, base


def logits_of(theirs) -> np.ndarray:
    with torch.no_grad():
        return theirs(torch.tensor(np.asarray(ids()))).logits.numpy()


def agree(ours, theirs) -> bool:
    wanted = np.asarray(ours.logits(ids()))
    return np.linalg.norm(logits_of(theirs) - wanted) < 1e-5 * np.linalg.norm(wanted)


def test_the_base_weights_come_from_the_folder(trained):
    _, model, base = trained
    for _, layer in lora_layers(model):
        layer.lora_B[...] = jnp.zeros(layer.lora_B.shape)
    assert agree(model, base)


def test_the_lora_reloads_in_peft_with_the_same_logits(trained, tmp_path):
    config, model, base = trained
    folder = exports.peft_folder(config, open_state_dict(model), tmp_path / "peft")
    assert agree(model, peft.PeftModel.from_pretrained(base, folder).eval())


def test_the_merged_folder_reloads_in_transformers_with_the_same_logits(trained, tmp_path):
    config, model, _ = trained
    described, state = exports.hugging_face(config, open_state_dict(model))
    folder = files.save_folder(state, described, tmp_path / "merged")
    assert agree(model, transformers.AutoModelForCausalLM.from_pretrained(folder).eval())


def test_merging_twice_adds_the_update_once_and_unmerging_takes_it_back(trained):
    _, model, _ = trained
    layer = dict(lora_layers(model))["base_model.model.layers.0.self_attn.q_proj"]
    before = layer.weight[...]
    layer.merge()
    layer.merge()
    np.testing.assert_allclose(layer.weight[...], before + layer.update, atol=1e-6)
    layer.unmerge()
    np.testing.assert_allclose(layer.weight[...], before, atol=1e-6)


def test_a_vanilla_model_from_scratch_is_a_llama(tmp_path):
    model = small(vanilla_mode=True)
    config = SimpleNamespace(model=Model(**MODEL), memory=Memory(vanilla_mode=True))
    described, state = exports.hugging_face(config, open_state_dict(model))
    folder = files.save_folder(state, described, tmp_path)
    assert agree(model, transformers.AutoModelForCausalLM.from_pretrained(folder).eval())


def test_a_model_with_memory_has_no_hugging_face_form():
    config = SimpleNamespace(model=Model(**MODEL), memory=Memory())
    with pytest.raises(UserError, match="reads a memory"):
        exports.hugging_face(config, {})


def test_the_originals_checkpoint_folder_loads_strictly(tmp_path):
    model = small()
    config = SimpleNamespace(model=model.config, memory=model.memory)
    folder = exports.original_checkpoint(config, open_state_dict(model), tmp_path / "c", {"global_step": 3})
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.yaml", "trainer_state.json"}
    other = small(seed=1)
    load_state_dict(other, files.open_weights(folder), strict=True)
    np.testing.assert_array_equal(other.logits(ids()), model.logits(ids()))
