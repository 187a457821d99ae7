"""Numbers of the original that are tables: sizes, operations, placements, early stopping, settings."""

import json
import pathlib
from types import SimpleNamespace

import pytest

from jaxtrain import config_io, run
from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import flops, param_groups
from jaxtrain.systems.memory_lm.config import Memory, Model, get_memory_bank_assignments, get_memory_layer_indices
from jaxtrain.systems.memory_lm.model import build_model
from jaxtrain.systems.memory_lm.original import legacy_config

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden" / "memory_lm"
PAPER = {
    "hidden_dim": 768,
    "num_heads": 12,
    "num_kv_heads": 4,
    "num_layers": 16,
    "intermediate_dim": 2304,
    "vocab_size": 49152,
    "max_seq_len": 1024,
}
CHAPTERS = {
    "num_memory_tokens": 262208,
    "memory_num_heads": 12,
    "memory_num_kv_heads": 12,
    "memory_layer_placement": "custom",
    "memory_layer_indices": [2, 6, 10, 14],
    "use_chapters": True,
    "num_chapters": 4097,
    "top_k_chapters": 64,
    "num_shared_chapters": 1,
}
MODELS = {  # parameters, TFLOP per sequence of 1024 tokens (None: not published)
    "paper": (PAPER, CHAPTERS, 371_292_932, 1.378),
    "backbone": (PAPER, {"vanilla_mode": True}, 147_874_560, 1.069),
    "iso_flop": ({**PAPER, "num_layers": 24}, {"vanilla_mode": True}, 202_937_088, 1.487),
    "default": ({}, {}, 166_948_608, None),
}


def settings(model, memory):
    return SimpleNamespace(model=Model(**model), memory=Memory(**memory), compat="correct")


@pytest.mark.parametrize("name", MODELS)
def test_parameters_equal_the_published_count(name):
    model, memory, count, _ = MODELS[name]
    assert sum(flops.parameters(settings(model, memory), build_model).values()) == count


@pytest.mark.parametrize("name", [name for name in MODELS if MODELS[name][3]])
def test_operations_equal_the_published_figure(name):
    model, memory, _, published = MODELS[name]
    assert round(flops.training_flops(settings(model, memory), 1024) / 1e12, 3) == published


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"memory_layer_placement": "none"}, []),
        ({"vanilla_mode": True}, []),
        ({"memory_layer_placement": "first_k", "memory_layer_k": 9}, [0, 1, 2, 3, 4, 5]),
        ({"memory_layer_placement": "last_k", "memory_layer_k": 2}, [4, 5]),
        ({"memory_layer_placement": "every_n", "memory_layer_n": 4}, [0, 4]),
        ({"memory_layer_placement": "custom", "memory_layer_indices": [7, 3, -1, 0]}, [0, 3]),
    ],
)
def test_placement(options, layers):
    assert get_memory_layer_indices(Memory(**options), 6) == layers


@pytest.mark.parametrize(
    ("options", "banks"),
    [
        ({}, {1: 0, 3: 0, 5: 0}),
        ({"memory_sharing": "per_layer"}, {1: 0, 3: 1, 5: 2}),
        ({"memory_sharing": "every_k_layers", "memory_sharing_k": 2}, {1: 0, 3: 0, 5: 1}),
    ],
)
def test_bank_assignment(options, banks):
    assert get_memory_bank_assignments(Memory(**options), [1, 3, 5]) == banks


@pytest.mark.parametrize(
    "options",
    [
        {"memory_layer_placement": "every_n", "memory_layer_n": 0},
        {"memory_layer_placement": "custom"},
    ],
)
def test_impossible_placements_are_refused(options):
    with pytest.raises(UserError, match=r"memory\.memory_layer"):
        get_memory_layer_indices(Memory(**options), 6)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"use_chapters": True, "num_memory_tokens": 10, "num_chapters": 3, "top_k_chapters": 1}, "no multiple"),
        ({"use_chapters": True, "num_memory_tokens": 12, "num_chapters": 3, "top_k_chapters": 4}, "top_k_chapters"),
        ({"routing_strategy_train": "rolling"}, "unknown routing strategy"),
        ({"token_routing_kernel_version": "v9"}, "kernel version"),
        ({"routed_scaling_factor": -1}, "greater than or equal"),
    ],
)
def test_impossible_memories_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        Memory(**options)


def test_other_spellings_of_the_original_are_taken():
    memory = Memory(routing_strategy_train="sequence_rolling", token_routing_kernel_version="kernel_v2")
    assert (memory.routing_strategy_train, memory.token_routing_kernel_version) == ("sequence-rolling", "v2")


@pytest.mark.parametrize(
    ("key", "group"),
    [
        ("routers.2.router.bias", "memory"),
        ("layers.0.post_memory_mlp.up_proj.weight", "memory"),
        ("memory_adapters.1.memory_attn.q_proj.weight", "memory"),
        ("memory_banks.0.base_bank.memory", "memory_bank"),
        ("base_model.model.layers.0.self_attn.q_proj.lora_A", "lora"),
        ("layers.0.mlp.up_proj.weight", "base_model"),
        ("lm_head.weight", "base_model"),
    ],
)
def test_parameter_groups(key, group):
    assert param_groups.param_group(key, None) == group


def test_a_config_of_the_original_is_converted_and_accepted():
    case = json.loads((GOLDEN / "trainer_run.json").read_text())
    task, config = config_io.check(legacy_config.convert(case["config"], compat="original"))
    assert config.task == "memory_lm.scratch"
    assert (config.data.batch_size, config.train.accumulate_steps, config.train.epochs) == (4, 2, 2)
    assert config.optim.groups["memory_bank"].lr == 0.005
    factor = task.schedule(config.model_copy(update={"train": config.train.model_copy(update={"steps": 6})}), None, 3)
    assert [factor(0), factor(1)] == [0.0, 1.0]


def test_a_dry_run_tells_the_published_sizes_before_it_looks_for_data(capsys, tmp_path):
    overrides = [f"data.tokenizer={tmp_path / 'absent.json'}", f"run.dir={tmp_path / 'run'}"]
    assert run.main(["--config", str(ROOT / "configs/memory_lm_paper.yaml"), "--dry-run", *overrides]) == 2
    printed = capsys.readouterr()
    assert "371,292,932" in printed.out
    assert "1.378 TFLOP per sequence of 1024 tokens" in printed.out
    assert printed.err.startswith("error: data.tokenizer")
