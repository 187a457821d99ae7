"""What users type, and the machines that they type it on."""

import argparse
import json
import math
import os

import jax
import pytest

from jaxtrain import Trainer, TrainingConfig, UserError, commands, run, strict_json
from jaxtrain.runtime.terminal import is_terminal
from jaxtrain.train import run_dir


def test_a_name_that_yaml_takes_for_a_number_stays_a_name(config):
    assert config("", "run.name=2024_01_05").run.name == "2024_01_05"


def test_a_section_left_empty_has_its_defaults(config):
    assert config("optim:\nrun:\n").optim.lr == 1e-3


@pytest.mark.parametrize("value", [".inf", ".nan", "1e400", "true"])
def test_what_is_no_finite_number_is_refused(config, value):
    with pytest.raises(UserError, match=r"optim\.lr"):
        config(f"optim: {{lr: {value}}}\n")


def test_a_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TrainingConfig(run={"dir": "~/a"}).run.folder == tmp_path / "a"


def test_json_has_null_for_what_the_format_lacks():
    assert json.loads(strict_json.dumps({"a": [math.nan, 1.5], "b": -math.inf})) == {"a": [None, 1.5], "b": None}


def test_json_that_is_read_back_keeps_what_the_format_lacks():
    values = {"a": [math.inf, 1.5], "b": -math.inf}
    assert strict_json.loads_whole(strict_json.dumps_whole(values)) == values


def test_json_that_is_read_back_is_strict():
    assert json.loads(strict_json.dumps_whole([math.nan]), parse_constant=pytest.fail) == [{"not finite": "nan"}]


def test_a_stream_without_isatty_is_no_terminal():
    assert (is_terminal(object()), is_terminal(None)) == (False, False)


def test_a_process_that_compiles_nothing_is_refused(config, tmp_path):
    """jax.jit's lower() and compile() raise there, in the middle of the first step."""
    with (
        jax.disable_jit(),
        pytest.raises(UserError, match="JAX_DISABLE_JIT is True, and a step is one compiled program"),
    ):
        Trainer(config=config("", f"run.dir={tmp_path}/run"), task="digits.classify")


def test_a_working_directory_that_is_gone_is_named(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert commands.main(lambda _: len(os.getcwd()), argparse.Namespace()) == 2
    assert "the working directory is gone" in capsys.readouterr().err


def test_a_dry_run_misses_the_file_that_the_run_would_start_from(tmp_path, capsys):
    arguments = ["--config", "configs/digits_tiny.yaml", "--dry-run", f"run.dir={tmp_path}/r"]
    assert run.main([*arguments, f"init_from={tmp_path}/w.pt"]) == 2
    assert f"init_from: {tmp_path}/w.pt: no such file or folder" in capsys.readouterr().err


def test_a_machine_without_git_has_no_revision(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert run_dir.environment(1)["git"] is None
