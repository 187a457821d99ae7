"""The original's models and parts through the facade: torch modules with the recorded numbers and gradients."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from jaxtrain.systems import memory_lm as memory
from jaxtrain.systems.memory_lm.original import torch_models
from tests.unit.memory_lm.test_torch_compat import GOLDEN, original

SCRATCH = sorted(path.stem for path in GOLDEN.glob("scratch_*.json"))


def case_of(name: str) -> tuple[dict, dict[str, torch.Tensor]]:
    return json.loads((GOLDEN / f"{name}.json").read_text()), load_file(GOLDEN / f"{name}.safetensors")


def built(name: str):
    """A golden case's model with its weights, and the case's tensors."""
    config = original(name)[0]
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    model = memory.MemoryTransformer(config)
    model.load_state_dict({k.removeprefix("param/"): v for k, v in tensors.items() if k.startswith("param/")})
    return model, tensors


@pytest.mark.parametrize("name", SCRATCH)
def test_a_model_trains_in_torch_as_the_original(name):
    model, tensors = built(name)
    given = [tensors.get(f"in/{key}") for key in ("input_ids", "attention_mask", "labels")]
    with torch.no_grad():
        out = model.eval()(*given)
    torch.testing.assert_close(out["logits"], tensors["out/eval_logits"], atol=3e-5, rtol=1e-4)
    torch.testing.assert_close(out["loss"], tensors["loss/eval_ce"], atol=1e-5, rtol=1e-5)
    assert out["router_losses"] == [{} for _ in model.reading]
    out = model.train()(*given)
    torch.testing.assert_close(out["loss"], tensors["loss/train_total"], atol=1e-5, rtol=1e-5)
    layers = sorted({key.split("/")[2] for key in tensors if key.startswith("loss/router/")}, key=int)
    for layer, terms in zip(layers, [one for one in out["router_losses"] if one], strict=True):
        for term, value in terms.items():
            torch.testing.assert_close(value, tensors[f"loss/router/{layer}/{term}"], atol=1e-5, rtol=1e-4)
    out["loss"].backward()
    grads = {key: value for key, value in tensors.items() if key.startswith("grad/")}
    own = dict(model.named_parameters(remove_duplicate=False))
    assert grads
    for key, value in grads.items():
        torch.testing.assert_close(own[key.removeprefix("grad/")].grad, value, atol=2e-4, rtol=1e-3, msg=key)


@pytest.mark.parametrize("strategy", ["sequence", "sequence-rolling", "rolling", "hybrid", "token"])
def test_cached_decoding_gives_the_originals_logits(strategy):
    model, tensors = built("decode_cache_strategies")
    model.memory = model.memory.model_copy(update={"routing_strategy_inference": strategy})
    model.eval()
    ids, mask = tensors["in/input_ids"], tensors["in/attention_mask"]
    positions = ((mask.cumsum(1) - 1) * mask).clamp_min(0)
    with torch.no_grad():
        out = model(ids, mask, position_ids=positions, use_cache=True)
        torch.testing.assert_close(out["logits"], tensors[f"out/{strategy}/prefill_logits"], atol=3e-5, rtol=1e-4)
        if strategy == "sequence":
            torch.testing.assert_close(out["past_key_values"][0][0], tensors["out/kv_cache/0/k"], atol=1e-5, rtol=1e-5)
        logits = out["logits"][torch.arange(len(ids)), mask.sum(1) - 1]
        for step in range(5):
            token = logits.argmax(-1)[:, None]
            mask = torch.cat([mask, torch.ones_like(token)], 1)
            places = mask.sum(1, keepdim=True) - 1
            out = model(
                token, mask, position_ids=places, past_key_values=out["past_key_values"], use_cache=True
            )  # fmt: skip
            logits = out["logits"][:, -1]
            torch.testing.assert_close(logits, tensors[f"out/{strategy}/step{step}_logits"], atol=3e-5, rtol=1e-4)
        with pytest.raises(ValueError, match="attention_mask: 3 columns"):
            model(token, mask[:, :3], past_key_values=out["past_key_values"], use_cache=True)


class WhitespaceNumbers:
    """A tokenizer of whole numbers."""

    eos_token_id, pad_token_id = 1, 0

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, ids, skip_special_tokens=True):
        return " ".join(map(str, ids))


def test_greedy_generation_is_the_originals():
    case, tensors = case_of("generate_greedy")
    model = built("generate_greedy")[0]
    tokenizer, count = WhitespaceNumbers(), case["max_new_tokens"]
    one = memory.generate(model, tokenizer, case["prompts"][0], count, do_sample=False)
    assert tokenizer.encode(one) == [int(x) for x in tensors["out/generate_ids"]]
    rows = memory.generate_batch(model, tokenizer, case["prompts"], count, do_sample=False)
    width = max(len(prompt.split()) for prompt in case["prompts"])
    for prompt, text, want in zip(case["prompts"], rows, tensors["out/generate_batch_ids"].tolist(), strict=True):
        new = want[width:]
        new = new[: new.index(1) + 1] if 1 in new else new
        assert tokenizer.encode(text) == [*tokenizer.encode(prompt), *new]
    assert model.training
    torch.manual_seed(0)
    sampled = {memory.generate(model, tokenizer, "5 9", 6, temperature=2.0, top_k=5, top_p=0.9) for _ in range(8)}
    assert len(sampled) > 1
    for options in ({"temperature": 0.0}, {"top_p": 0.0}, {"top_k": -1}, {"max_new_tokens": -1}):
        with pytest.raises(ValueError, match=next(iter(options))):
            memory.generate(model, tokenizer, "5", **options)


def test_the_router_chooses_and_is_trained_as_the_original():
    case, tensors = case_of("router_losses")
    shared, window = case["exclude_prefix_chapters"], case["rolling_window_size"]
    for strategy in ("sequence", "sequence-rolling", "token", "token_level"):
        kind = "token" if strategy == "token_level" else strategy
        router = memory.ChapterRouter(case["hidden_dim"], case["num_chapters"], case["top_k"], kind)
        router.load_state_dict({f"router.{name}": tensors[f"param/router.{name}"] for name in ("weight", "bias")})
        hidden = tensors["in/hidden_states"].clone().requires_grad_()
        if strategy == "token_level":
            indices, weights, losses = router.route_token_level(hidden, True, shared)
        else:
            indices, weights, losses = router(hidden, True, shared, window)
        assert router(hidden, return_losses=False)[2] == {}
        assert torch.equal(indices, tensors[f"out/{strategy}/indices"].long())
        torch.testing.assert_close(weights, tensors[f"out/{strategy}/weights"])
        for name, value in losses.items():
            torch.testing.assert_close(value, tensors[f"loss/{strategy}/{name}"], atol=1e-6, rtol=1e-5)
        total = memory.compute_router_auxiliary_loss([losses], 0.3, 0.7, 0.05)
        (total + (weights * (1 + torch.arange(weights.shape[-1]))).sum()).backward()
        torch.testing.assert_close(hidden.grad, tensors[f"grad/{strategy}/hidden"], atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="top_k"):
        memory.ChapterRouter(8, 4, 5)
    with pytest.raises(ValueError, match="routing_strategy: 'first' is unknown"):
        memory.ChapterRouter(8, 4, 2, "first")
    with pytest.raises(ValueError, match="the strategy comes second"):
        memory.create_inference_router("sequence", router, 2)
    assert float(memory.compute_router_auxiliary_loss([])) == 0.0


def test_one_layers_router_terms_are_added_up_with_their_coefficients():
    terms = {"load_balance": torch.tensor(2.0), "z_loss": torch.tensor(3.0)}
    assert float(memory.compute_total_router_loss(terms, 0.5, 0.0, 0.1)) == pytest.approx(1.3)
    several = memory.compute_total_router_loss([terms, {}, {"load_balance": 4.0}], 0.5, 0.0, 0.1)
    assert float(several) == pytest.approx((1.3 + 2.0) / 2)
    assert (
        memory.compute_total_router_loss([], reference_tensor=torch.zeros(1, dtype=torch.float64)).dtype
        == torch.float64
    )


PARTS = {
    "ChapterRouter": {"hidden_dim": 8, "num_chapters": 6, "top_k": 2, "routing_strategy": "sequence-rolling"},
    "MemoryCrossAttention": {"hidden_dim": 8, "num_heads": 4, "num_kv_heads": 2, "memory_dim": 6, "dropout": 0.5},
    "MemoryBank": {"num_tokens": 6, "dim": 8},
    "FactorizedMemoryBank": {"num_tokens": 6, "dim": 8, "rank": 2},
    "ReducedDimMemoryBank": {"num_tokens": 6, "reduced_dim": 2},
    "QuantizedMemoryBank": {"num_tokens": 6, "dim": 4, "quant_bits": 4},
}


@pytest.mark.parametrize("name", PARTS)
def test_a_parts_arguments_are_its_attributes(name):
    part = getattr(memory, name)(**PARTS[name])
    assert {key: getattr(part, key) for key in PARTS[name]} == PARTS[name]


def test_a_lora_layer_has_the_sizes_of_its_linear():
    for layer in (memory.LoRALinear(5, 3, 2, 4), memory.LoRALinear.from_linear(nn.Linear(5, 3), 2, 4)):
        assert (layer.in_features, layer.out_features, layer.rank, layer.alpha, layer.scaling) == (5, 3, 2, 4, 2.0)
    assert memory.LoRALinear(5, 3).bias is None
    layer = memory.LoRALinear(5, 3, 2, merge_weights=True, bias=True)
    nn.init.normal_(layer.lora_B)
    x, weight = torch.randn(4, 5), layer.weight.clone()
    before = layer(x)
    torch.testing.assert_close(layer.eval()(x), before)
    assert layer.merged
    torch.testing.assert_close(layer.train().weight, weight)


def test_a_memory_attention_starts_at_zero_and_takes_each_kind_of_bank():
    x = torch.randn(2, 5, 8)
    assert not memory.MemoryCrossAttention(8, 2)(x, torch.randn(6, 8)).any()
    for options, width in (
        ({"use_low_rank_projections": True, "projection_rank": 3}, 8),
        ({"reduced_dim_mode": True, "reduced_dim": 4}, 4),
        ({"memory_dim": 6, "gradient_checkpointing": True}, 6),
    ):
        part = memory.MemoryCrossAttention(8, 2, **options, wo_init_zero=False)
        bank = torch.randn(6, width, requires_grad=True)
        out = part(x, bank)
        out.sum().backward()
        assert (out.shape, part.memory_dim) == (x.shape, width)
        assert bank.grad.any()
        torch.testing.assert_close(part.eval()(x, bank.expand(2, -1, -1)), out)
    for call, words in (
        (lambda: memory.MemoryCrossAttention(8, 2)(x), "memory: missing"),
        (lambda: memory.MemoryCrossAttention(8, 2)(x, bank, return_attn_weights=True), "not supported"),
        (lambda: memory.MemoryCrossAttention(8, 2, use_low_rank_projections=True), "projection_rank: missing"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


def test_a_bank_gives_chapters_one_by_one_and_together():
    bank = memory.ChapteredMemoryBank(memory.MemoryBank(6, 4), 3)
    whole = bank.get_memory()
    assert torch.equal(bank.get_chapter(1), whole[2:4])
    assert torch.equal(bank.get_chapters([2, 0]), torch.cat([whole[4:], whole[:2]]))
    assert bank.get_chapters_batched(torch.tensor([[0, 1], [1, 2]])).shape == (2, 4, 4)
    with pytest.raises(IndexError, match="chapter_idx: 3"):
        bank.get_chapter(3)


def test_a_model_names_its_memory_and_freezes_the_rest():
    model, _ = built("scratch_moc_seq_shared")
    parts = model.get_memory_parameters()
    assert model.get_num_parameters() == model.get_num_parameters(trainable_only=False)
    model.freeze_non_memory()
    assert model.get_num_parameters() == sum(p.numel() for p in parts)
    assert model.get_memory_for_layer(model.memory_layer_indices[0]).shape == (24, 32)
    assert model.get_memory_for_layer(99) is None
    ids = torch.randint(0, 53, (2, 7))
    torch.manual_seed(0)
    plain = model(ids, labels=ids)["loss"]
    model.gradient_checkpointing_enable()
    torch.manual_seed(0)
    assert torch.equal(model(ids, labels=ids)["loss"], plain)
    with pytest.raises(ValueError, match="return_dict=False"):
        model(ids, return_dict=False)


@pytest.mark.parametrize(
    ("layers", "reads", "calls"), [(True, True, (2, 2)), (False, True, (1, 2)), (False, False, (1, 1))]
)
def test_the_backward_pass_calls_again_what_gradient_checkpointing_names(layers, reads, calls):
    model, _ = built("scratch_moc_seq_shared")
    model.memory = model.memory.model_copy(update={"memory_gradient_checkpointing": reads})
    model.gradient_checkpointing_enable() if layers else model.gradient_checkpointing_disable()
    counts = {"layer": 0, "read": 0}
    layer = model.layers[model.memory_layer_indices[0]]
    for name, module in (("layer", layer.input_layernorm), ("read", layer.memory_attn.q_proj)):
        module.register_forward_hook(lambda *arguments, name=name: counts.update({name: counts[name] + 1}))
    ids = torch.randint(0, 53, (2, 7))
    model(ids, labels=ids)["loss"].backward()
    assert tuple(counts.values()) == calls


def test_a_model_refuses_a_keyword_that_it_does_not_know():
    model, _ = built("scratch_moc_seq_shared")
    with pytest.raises(TypeError, match="label"):
        model(torch.zeros(1, 4, dtype=torch.long), label=torch.zeros(1, 4, dtype=torch.long))


def test_lora_and_quantised_banks_are_the_originals():
    case, tensors = case_of("lora_linear")
    for kind in ("bias", "nobias"):
        linear = nn.Linear(case["in_features"], case["out_features"], bias=kind == "bias")
        layer = memory.LoRALinear.from_linear(linear, case["rank"], case["alpha"], 0.0)
        assert torch.equal(layer.lora_B, tensors[f"out/{kind}/init_lora_B"])
        layer.load_state_dict({k.split("/")[2]: v for k, v in tensors.items() if k.startswith(f"param/{kind}/")})
        x = tensors[f"in/{kind}/x"].clone().requires_grad_()
        y = layer(x)
        y.square().mean().backward()
        torch.testing.assert_close(y, tensors[f"out/{kind}/y"])
        torch.testing.assert_close(layer.lora_A.grad, tensors[f"grad/{kind}/lora_A"])
        assert layer.weight.grad is None
        layer.merge()
        torch.testing.assert_close(layer.weight, tensors[f"out/{kind}/merged_weight"])
        torch.testing.assert_close(layer(x), tensors[f"out/{kind}/y_merged"])
    bank = case_of("quantization")[1]
    for bits in (8, 4):
        found = memory.QuantizedMemoryBank(*bank["in/memory"].shape, bits, memory=bank["in/memory"])
        torch.testing.assert_close(found.get_memory(), bank[f"out/{bits}bit/dequantized"])
        assert found.quantized_memory.dtype == torch.int8


def test_a_fresh_model_is_a_module_equal_to_the_vanilla_one(tmp_path):
    config = original("init_zero_memory")[0]
    torch.manual_seed(0)
    model = memory.MemoryTransformer(config).eval()
    plain = copy.deepcopy(config)
    plain.memory.vanilla_mode = True
    vanilla = memory.MemoryTransformer(plain).eval()
    vanilla.load_state_dict(model.state_dict(), strict=False)
    ids = torch.randint(0, config.model.vocab_size, (2, 6))
    assert torch.equal(model(ids)["logits"], vanilla(ids)["logits"])
    assert model.embed_tokens.weight is model.lm_head.weight
    assert model.embed_tokens.weight.std().item() == pytest.approx(config.model.initializer_range, rel=0.1)
    seen = []
    model.layers[0].memory_attn.register_forward_hook(lambda *_: seen.append(1))
    twin = copy.deepcopy(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    twin.load_state_dict(torch.load(tmp_path / "model.pt"), strict=True)
    model(ids)
    assert seen == [1]
    quantised = memory.quantize_memory_for_deployment(twin, 8)
    assert "memory_banks.0.base_bank.scales" in quantised.state_dict()
    assert torch.isfinite(quantised(ids)["logits"]).all()


@pytest.mark.parametrize("bits", ["no", "bf16"])
def test_an_adapter_reads_its_base_and_trains_only_its_own(tmp_path, monkeypatch, bits):
    from tests.e2e.originals import memory as snippets

    monkeypatch.chdir(tmp_path)
    snippets.plant({})
    config = memory.load_config("configs/adapter_qwen2.5_1.5b.yaml")
    config.training.mixed_precision, config.memory.use_lora, config.memory.wo_init_zero = bits, True, False
    model = memory.MemoryAdapter(config)
    assert config.model.num_layers == 1
    dtypes = {p.dtype for key, p in model.named_parameters() if key.startswith("base_model.") and "lora" not in key}
    assert dtypes == {torch.bfloat16 if bits == "bf16" else torch.float32}
    trained = {key for key, p in model.named_parameters() if p.requires_grad}
    assert not any(key.startswith("base_model.") and "lora" not in key for key in trained)
    ids = torch.randint(0, 260, (2, 7))
    model(ids, labels=ids)["loss"].backward()
    assert model.memory_banks[0].memory.grad.abs().sum() > 0
    before = model.eval()(ids)["logits"]
    groups = model.get_parameter_groups()
    assert list(groups) == ["memory", "memory_bank", "lora"]
    assert sum(map(len, groups.values())) == len(model.get_trainable_parameters())
    assert len(model.lora_modules) == 2 and groups["memory"] == model.get_memory_parameters()  # noqa: PT018
    state = memory.merge_adapter_weights(model, tmp_path / "merged.pt")
    assert torch.load(tmp_path / "merged.pt").keys() == state.keys()
    assert not any("lora" in key for key in state)
    torch.testing.assert_close(model(ids)["logits"], before, atol=0.05 if bits == "bf16" else 1e-5, rtol=1e-2)
    assert "memory_adapters.0.memory_layernorm.weight" in memory.extract_memory_weights(model)
    assert isinstance(model, torch_models.MemoryAdapter)
