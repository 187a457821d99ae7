"""Exports that other libraries read, judged by those libraries."""

import copy
import json
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
import transformers
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.nn.lora import LoRALinear, named_layers
from jaxtrain.systems import memory_lm
from jaxtrain.systems.memory_lm import adapter, exports
from jaxtrain.systems.memory_lm.adapter import build_model
from jaxtrain.systems.memory_lm.config import Memory, Model
from tests.unit.memory_lm.models import MODEL, ids, logits, small
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
}
ATTENTION, WITH_HEAD = ["q_proj", "v_proj"], ["q_proj", "down_proj", "lm_head"]
KINDS = {  # the base model's class, its options, what LoRA changes
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}, ATTENTION),
    "qwen2_tied_head": ("Qwen2", {"tie_word_embeddings": True}, WITH_HEAD),
    "qwen3": ("Qwen3", {"head_dim": 16}, ATTENTION),
    "llama": ("Llama", {}, WITH_HEAD),
    "mistral": ("Mistral", {"sliding_window": 4}, ATTENTION),
}


@pytest.fixture(scope="module", params=KINDS)
def trained(request, tmp_path_factory):
    """A pretrained folder, and an adapter on it whose LoRA is not zero any more."""
    kind, options, targets = KINDS[request.param]
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    base = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**BASE, **options)).eval()
    base.save_pretrained(folder)
    config = SimpleNamespace(
        model=Model(base_model_name=str(folder)),
        memory=Memory(use_memory_adapter=False, use_lora=True, lora_rank=4, lora_alpha=8, lora_targets=targets),
        compat="correct",
    )
    model = build_model(config, nnx.Rngs(0))
    load_state_dict(model, adapter.initial_weights(config), strict=False)
    for i, (*_, layer) in enumerate(named_layers(model, LoRALinear)):
        layer.lora_B[...] = jnp.asarray(np.random.default_rng(i).normal(size=layer.lora_B.shape), jnp.float32) * 0.1
    return config, model, base


def logits_of(theirs) -> np.ndarray:
    with torch.no_grad():
        return theirs(torch.tensor(np.asarray(ids()))).logits.numpy()


def agree(ours, theirs) -> bool:
    wanted = np.asarray(logits(ours, ids()))
    return np.linalg.norm(logits_of(theirs) - wanted) < 1e-5 * np.linalg.norm(wanted)


def test_the_base_weights_come_from_the_folder(trained):
    _, model, base = trained
    plain = nnx.clone(model)
    for *_, layer in named_layers(plain, LoRALinear):
        layer.lora_B[...] = jnp.zeros(layer.lora_B.shape)
    assert agree(plain, base)


def test_the_lora_reloads_in_peft_with_the_same_logits(trained, tmp_path):
    config, model, base = trained
    folder = exports.peft_folder(config, open_state_dict(model), tmp_path / "peft")
    assert agree(model, peft.PeftModel.from_pretrained(copy.deepcopy(base), folder).eval())


def test_the_merged_folder_reloads_in_transformers_with_the_same_logits(trained, tmp_path):
    config, model, _ = trained
    described, state = exports.hugging_face(config, open_state_dict(model))
    folder = files.save_folder(state, described, tmp_path / "merged")
    assert agree(model, transformers.AutoModelForCausalLM.from_pretrained(folder).eval())


def test_merging_twice_adds_the_update_once_and_unmerging_takes_it_back(trained):
    _, model, _ = trained
    merged = nnx.clone(model)
    wanted = logits(model, ids())
    layers = [layer for *_, layer in named_layers(merged, LoRALinear)]
    for layer in [*layers, *layers]:
        layer.merge()
    np.testing.assert_allclose(logits(merged, ids()), wanted, atol=1e-4)
    for layer in layers:
        layer.unmerge()
    np.testing.assert_allclose(logits(merged, ids()), wanted, atol=1e-4)


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


def test_peft_has_no_form_for_a_memory():
    with pytest.raises(UserError, match="reads a memory"):
        exports.peft_folder(None, {"memory_adapters.0.memory_layernorm.weight": None}, "unused")


META = {"step": 7, "steps_per_epoch": 3, "metrics": {"loss": 2.5}, "best_metrics": {"loss": 2.25, "step": 5}}


def test_the_originals_checkpoint_folder_loads_strictly_with_its_config(tmp_path):
    model = small()
    config = SimpleNamespace(model=model.config, memory=model.memory)
    folder = exports.original_checkpoint(config, open_state_dict(model), tmp_path / "c", META)
    assert {path.name for path in folder.iterdir()} == {"model.safetensors", "config.yaml", "trainer_state.json"}
    progress = json.loads((folder / "trainer_state.json").read_text())
    assert progress == {"best_loss": 2.25, "epoch": 2, "global_step": 7, "loss": 2.5, "patience_counter": 0}
    other = memory_lm.MemoryTransformer(memory_lm.load_config(folder / "config.yaml")).eval()
    other.load_state_dict(files.open_weights(folder), strict=True)
    theirs = other(torch.from_numpy(np.array(ids())).long())["logits"].detach()
    np.testing.assert_allclose(theirs, model.logits(ids()), atol=2e-5)


@pytest.mark.parametrize("options", [{"mask_aware_pooling": True}, {"routing_strategy_train": "prefix"}])
def test_what_the_original_cannot_compute_is_not_exported_for_it(options, tmp_path):
    config = SimpleNamespace(model=Model(**MODEL), memory=Memory(**options))
    with pytest.raises(UserError, match=f"the original has no memory.{next(iter(options))}"):
        exports.original_checkpoint(config, {}, tmp_path, META)
