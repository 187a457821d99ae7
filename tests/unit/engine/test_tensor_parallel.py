"""`shard.tensor`: layers that several devices compute together equal those of one."""

import pytest

from jaxtrain import config_io
from jaxtrain.errors import UserError
from jaxtrain.train.program import Program
from tests.contract.tasks import four_steps, largest_relative_difference, tiny_file

TENSOR = ("shard.devices=8", "shard.tensor=2")
DEBERTA = (
    "{kind: deberta, vocab_size: 55, hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, "
    "position_buckets: 8, intermediate_size: 64, "
    "max_position_embeddings: 48, pos_att_type: [c2p, p2c], share_att_key: false}"
)
MODELS = {  # task, what makes another model of it
    "decoder": ("memory_lm.scratch",),
    "scanned decoder": ("memory_lm.scratch", "model.num_layers=4", "model.scan_layers=true"),
    "adapter with LoRA": ("memory_lm.adapter",),
    "BERT": ("criteria_evidence.criteria",),
    "DeBERTa with LoRA": ("criteria_evidence.criteria", f"model.encoder={DEBERTA}", "model.lora.enabled=true"),
}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("model", MODELS)
def test_two_devices_to_a_layer_equal_one(model, strategy, tmp_path):
    name, *settings = MODELS[model]
    whole = four_steps(name, tmp_path / "whole", *settings)
    split = four_steps(name, tmp_path / "split", *settings, *TENSOR, f"shard.strategy={strategy}")
    assert largest_relative_difference(whole.weights, split.weights) < 1e-5
    assert largest_relative_difference(whole.moved, split.moved) < 1e-4


def _program(name, *overrides) -> Program:
    task, config = config_io.load(tiny_file(name), ["data.batch_size=16", *TENSOR, *overrides])
    return Program(task, config, abstract=True)


def _split(program: Program) -> dict[str, tuple]:
    """The parameters that no device holds whole, with the part that one holds."""
    arrays = {**program.state.params, **program.state.frozen}
    parts = {key: value.sharding.shard_shape(value.shape) for key, value in arrays.items()}
    return {key: part for key, part in parts.items() if part != arrays[key].shape}


def test_a_decoder_is_split_by_heads_inner_width_and_vocabulary():
    assert _split(_program("memory_lm.scratch", "memory.vanilla_mode=true", "model.num_layers=1")) == {
        "embed_tokens.weight": (129, 32),
        "layers.0.self_attn.q_proj.weight": (16, 32),
        "layers.0.self_attn.k_proj.weight": (8, 32),
        "layers.0.self_attn.v_proj.weight": (8, 32),
        "layers.0.self_attn.o_proj.weight": (32, 16),
        "layers.0.mlp.gate_proj.weight": (32, 32),
        "layers.0.mlp.up_proj.weight": (32, 32),
        "layers.0.mlp.down_proj.weight": (32, 32),
    }


def test_an_encoder_keeps_half_of_each_of_its_linear_layers():
    split = _split(_program("criteria_evidence.criteria"))
    assert len(split) == 10  # query, key, value and intermediate with their biases, two outputs


def test_more_devices_than_heads_are_refused():
    with pytest.raises(UserError, match=r"shard.tensor: 4 does not divide the model's num_kv_heads 2.*here: 1, 2"):
        _program("memory_lm.scratch", "shard.tensor=4")


def test_a_model_without_rules_is_refused():
    with pytest.raises(UserError, match="shard.tensor: 2, but no rule splits a parameter of this model"):
        _program("digits.classify")


def test_rules_of_ones_own_split_any_model():
    rules = r"shard.rules={'.*fc1\.weight': [tensor, null], '.*fc1\.bias': [tensor], '.*fc2\.weight': [null, tensor]}"

    split = _split(_program("digits.classify", rules))
    assert split["blocks.0.fc1.weight"] == (16, 16)
    assert len(split) == 3


def test_a_rule_that_does_not_fit_a_shape_is_refused():
    with pytest.raises(UserError, match=r"shard.rules: .* has 1 axes, its rule names 2"):
        _program("digits.classify", r"shard.rules={'.*bias': [tensor, null]}")
