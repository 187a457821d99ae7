"""MemoryAdapter as the original's users know it: its parts by their classes, its cache by its length."""

import pytest
import torch

from jaxtrain.systems import memory_lm as memory
from tests.e2e.originals import memory as snippets


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The config of an adapter over a tiny Qwen2 with random weights."""
    monkeypatch.chdir(tmp_path)
    snippets.plant({})
    config = memory.load_config("configs/adapter_qwen2.5_1.5b.yaml")
    config.memory.wo_init_zero = False
    return config


@torch.no_grad()
def test_cached_tokens_stand_behind_those_of_the_cache(config):
    model = memory.MemoryAdapter(config).eval()
    ids = torch.randint(0, 260, (2, 5))
    past = model(ids[:, :4], use_cache=True)["past_key_values"]
    cached = model(ids[:, 4:], past_key_values=past, use_cache=True)["logits"]
    torch.testing.assert_close(cached[:, -1], model(ids)["logits"][:, -1], atol=1e-5, rtol=1e-5)


def test_a_models_parts_are_of_the_exported_classes(config):
    config.memory.use_chapters, config.memory.num_chapters, config.memory.top_k_chapters = True, 4, 2
    config.memory.use_lora = True
    model = memory.MemoryAdapter(config)
    router = model.routers["0"]
    assert isinstance(router, memory.ChapterRouter)
    assert (router.num_chapters, router.top_k) == (4, 2)
    assert router(torch.zeros(1, 3, 16))[0].shape == (1, 2)
    assert isinstance(model.memory_adapters["0"].memory_attn, memory.MemoryCrossAttention)
    assert isinstance(model.base_model.model.layers[0].self_attn.q_proj, memory.LoRALinear)


def test_a_reduced_width_that_the_heads_do_not_divide_is_refused_when_built():
    sizes = {"hidden_dim": 16, "num_heads": 4, "num_layers": 1, "intermediate_dim": 8, "vocab_size": 32}
    low = memory.MemoryConfig(use_low_rank_memory=True, low_rank_mode="reduced_dim", memory_rank=6)
    with pytest.raises(ValueError, match="4 heads and 4 key/value heads do not divide a width of 6"):
        memory.MemoryTransformer(memory.Config(memory.ModelConfig(**sizes), low))


def test_an_unknown_precision_is_refused(config):
    config.training.mixed_precision = "weird"
    with pytest.raises(ValueError, match="training.mixed_precision: 'weird', wanted one of no, bf16, fp16"):
        memory.MemoryAdapter(config)
