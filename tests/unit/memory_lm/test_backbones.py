"""Pretrained decoders against transformers' own."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jaxtrain.systems.memory_lm import decoding
from jaxtrain.systems.memory_lm.adapter import MemoryAdapter
from jaxtrain.systems.memory_lm.backbone_config import read_config
from jaxtrain.systems.memory_lm.config import Memory
from tests.unit.memory_lm.models import logits
from torch_bridge.state_dict import load_state_dict, state_dict

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
CASES = {
    "qwen2": ("Qwen2", {}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 4}),
}


@pytest.fixture(params=CASES)
def pair(request):
    """The torch model, and ours with its weights."""
    kind, options = CASES[request.param]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **options})
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    ours = MemoryAdapter(read_config(config.to_dict()), Memory(vanilla_mode=True), rngs=nnx.Rngs(0))
    state = {f"base_model.{key}": value for key, value in theirs.state_dict().items()}
    load_state_dict(ours, state, strict=True)
    return theirs, ours


def test_weights_load_strictly_and_logits_agree_to_1e_5(pair):
    theirs, ours = pair
    assert set(state_dict(ours)) == {f"base_model.{key}" for key in theirs.state_dict()}
    tokens = np.random.default_rng(0).integers(0, 97, (2, 12))
    with torch.no_grad():
        wanted = theirs(torch.tensor(tokens)).logits.numpy()
    got = np.asarray(logits(ours, jnp.asarray(tokens)))
    assert np.linalg.norm(got - wanted) < 1e-5 * np.linalg.norm(wanted)


def test_greedy_decoding_gives_the_same_tokens(pair):
    theirs, ours = pair
    prompt = [5, 9, 33, 2, 71]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = theirs.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 5, dtype=torch.long), **options)
    got = decoding.generate_ids(ours, [prompt], 12, decoding.Sampling(do_sample=False))
    assert got.tokens[0].tolist() == wanted[0, 5:].tolist()


def test_a_left_padded_prompt_has_the_logits_of_the_prompt_alone():
    ours = MemoryAdapter(read_config({**SIZES, "model_type": "llama"}), Memory(vanilla_mode=True), rngs=nnx.Rngs(0))
    tokens = jnp.asarray([[0, 0, 5, 9, 33]])
    mask, places = jnp.asarray([[0, 0, 1, 1, 1]]), jnp.asarray([[0, 0, 0, 1, 2]])
    padded = logits(ours, tokens, mask, position_ids=places)
    assert bool(jnp.isfinite(padded).all())
    np.testing.assert_allclose(padded[:, 2:], logits(ours, tokens[:, 2:]), atol=1e-5)
