"""`shard.sequence`: decoders whose rows lie on several devices, token by token."""

import numpy as np
import pytest

from jaxtrain import config_io
from jaxtrain.errors import UserError
from jaxtrain.train.program import Program
from tests.contract.tasks import four_steps, largest_relative_difference, tiny_file

ROWS = ("data.packing=false",)  # of one document each
MODELS = {
    "decoder": ("memory_lm.scratch",),
    "scanned decoder": ("memory_lm.scratch", "model.num_layers=4", "model.scan_layers=true", "loss.chunk_tokens=64"),
    "memory read whole": ("memory_lm.scratch", "memory.use_chapters=false", "memory.wo_init_zero=false"),
    "adapter with LoRA, prefix routing": ("memory_lm.adapter",),
}
MESHES = {
    "4 of a row": ("shard.devices=8", "shard.sequence=4", "shard.strategy=ddp"),
    "2 of a row, 2 of a layer, sharded": (
        "shard.devices=8",
        "shard.sequence=2",
        "shard.tensor=2",
        "shard.strategy=fsdp",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_rows_on_several_devices_train_as_on_one(model, mesh, tmp_path):
    name, *settings = MODELS[model]
    whole = four_steps(name, tmp_path / "whole", *ROWS, *settings)
    split = four_steps(name, tmp_path / "split", *ROWS, *settings, *MESHES[mesh])
    np.testing.assert_allclose(split.losses, whole.losses, rtol=1e-5)
    assert largest_relative_difference(whole.weights, split.weights) < 1e-5
    assert largest_relative_difference(whole.moved, split.moved) < 1e-4


def _program(name, *overrides) -> Program:
    rows = ROWS if name.startswith("memory_lm") else ()
    sequence = ("data.batch_size=8", "shard.devices=8", "shard.sequence=8")
    task, config = config_io.load(tiny_file(name), [*sequence, *rows, *overrides])
    return Program(task, config, abstract=True)


def test_devices_of_a_row_each_keep_other_pieces_of_the_weights():
    program = _program("memory_lm.scratch", "shard.strategy=fsdp")
    weight = program.state.params["layers.0.mlp.up_proj.weight"]
    assert weight.sharding.shard_shape(weight.shape) == (8, 32)
    assert program.layout.batch_devices == 1


WINDOW = "model.base_config={model_type: mistral, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, \
num_attention_heads: 4, num_key_value_heads: 2, vocab_size: 258, sliding_window: 16}"


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("memory_lm.scratch", "data.packing=true", "does not go with data.packing"),
        ("memory_lm.scratch", "model.attention_dropout=0.1", "does not go with model.attention_dropout"),
        ("memory_lm.scratch", "compat=original", "does not go with compat: original"),
        ("memory_lm.scratch", "data.max_length=56", "data.max_length: 56 is not a multiple of 16.*next multiple is 64"),
        ("memory_lm.adapter", WINDOW, "base model's attention reaches 16 tokens back"),
        ("memory_lm.scratch", "shard.devices=6", "shard.sequence: 8 does not divide 6 devices"),
        ("digits.classify", "data.batch_size=8", "this task does not split a sample's tokens over devices"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(name, setting, message):
    with pytest.raises(UserError, match=message):
        _program(name, setting)
