"""Settings as flags, as the originals' scripts and their users type them."""

import os
import shlex

import pytest

from jaxtrain import config_io, config_mistakes, flags, run
from jaxtrain.errors import UserError
from tests.unit.set_completion.golden import CONFIGS

ROOT = CONFIGS.parent
SPLAT = "--embedding_dim 32 --hidden_dim 512 --num_layers 3 --learning_rate 1e-4 --batch_size 1024 " + (
    "--use_mixed_precision True --num_workers 16 --dropout 0.3 --num_epochs 20"
)


def typed(text: str, config: str = "configs/splat_production.yaml") -> list[str]:
    own, given = flags.split(shlex.split(text), run.OPTIONS)
    return [word for word in own if "=" in word] + flags.overrides(given, ROOT / config, ())


def test_the_splatnlp_readmes_command_line_is_taken_word_for_word():
    config = config_io.load(CONFIGS / "splat_production.yaml", typed(SPLAT))[1]
    assert (config.model.embedding_dim, config.model.hidden_dim, config.model.num_layers) == (32, 512, 3)
    assert (config.optim.lr, config.data.batch_size, config.precision.policy) == (1e-4, 1024, "bf16")
    assert (config.data.num_workers, config.model.dropout, config.train.epochs) == (16, 0.3, 20)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("--optim.lr 1e-3", ["optim.lr=1e-3"]),
        ("--use-layer-norm", ["model.use_layer_norm=true"]),
        ("--no-layer-norm", ["model.use_layer_norm=false"]),
        ("--no-use_mixed_precision --distributed", ["use_mixed_precision=false"]),
        ("--data_path a.csv --num-masks-per-set=3", ["data.path=a.csv", "data.masks_per_set=3"]),
        ("--use_fsdp optim.lr=1", ["optim.lr=1", "shard.strategy=fsdp"]),
        ("--verbose False --local_rank 0", []),
    ],
)
def test_a_flag_becomes_an_override(text, wanted):
    assert typed(text) == wanted


def test_the_autoencoders_flags_take_lists_and_tell_what_has_no_counterpart():
    config = "configs/splat_sae_tiny.yaml"
    assert typed("--resample-steps 7000 14000 --resample-bias -1.0 --l1-coeff 1e-4", config) == [
        "sae.resample_steps=[7000,14000]",
        "sae.resample_bias=-1.0",
        "sae.l1_coefficient=1e-4",
    ]
    with pytest.raises(UserError, match="--sae_train_steps: every step makes one update here"):
        typed("--sae-train-steps 4", config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--learnin_rate 1", "--learnin_rate: no such setting, did you mean --learning_rate? `--help` lists them"),
        ("--name x", "--name: could be --run.name, --optim.name, --optim.schedule.name; say which"),
        ("--dropout", "--dropout: wanted a value"),
        ("--device tpu:0", "--device: got 'tpu:0', wanted auto, cpu, cuda or cuda:<number>"),
    ],
)
def test_a_wrong_flag_is_one_sentence(text, message):
    with pytest.raises(UserError) as raised:
        typed(text)
    assert str(raised.value).startswith(message)


def test_flags_of_an_originals_file_are_its_own_keys():
    found = config_io.load(
        ROOT / "examples/train_config.yaml",
        typed("--learning_rate 3e-4 --reconstruction_weight 2 --scheduler_type none", "examples/train_config.yaml"),
    )[1]
    assert (found.optim.lr, found.loss.reconstruction_weight, found.optim.schedule.name) == (3e-4, 2.0, "constant")


def test_a_device_is_chosen_as_torch_names_it(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert flags.choose_device("cuda:1") == "shard.devices=1"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    with pytest.raises(UserError, match="leaves 1"):
        flags.choose_device("cuda:1")
    flags.choose_device("cpu")
    assert os.environ["JAX_PLATFORMS"] == "cpu"


def test_help_lists_every_setting_of_the_configs_task(capsys):
    with pytest.raises(SystemExit):
        run.main(["--config", str(CONFIGS / "splat_tiny.yaml"), "--help"])
    told = capsys.readouterr().out
    keys = config_mistakes.dotted_keys(config_io.schema(config_io.task_of(CONFIGS / "splat_tiny.yaml")[0]))
    assert [key for key in keys if f"--{key} " not in told] == []
    assert "--optim.lr --learning_rate --lr" in told


def test_a_torch_checkpoint_is_resumed_from(tmp_path, monkeypatch):
    (tmp_path / "checkpoint_epoch_3.pt").write_bytes(b"")
    seen = []
    monkeypatch.setattr(
        run, "start", lambda task, config, explanation, arguments: seen.append((config, arguments)) or 0
    )
    config = str(CONFIGS / "splat_tiny.yaml")
    assert run.main(["--config", config, "--resume", str(tmp_path / "checkpoint_epoch_3.pt"), "--lr", "0.1"]) == 0
    assert (seen[0][0].init_from, seen[0][0].optim.lr) == (str(tmp_path / "checkpoint_epoch_3.pt"), 0.1)
    assert seen[0][1].resume == "auto"
