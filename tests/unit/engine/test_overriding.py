"""Overrides: a text is taken as it is typed, the last of a setting counts, and what cannot be applied is refused."""

import pytest

from jaxtrain import TrainingConfig, config_io, run
from jaxtrain.errors import UserError


@pytest.mark.parametrize(
    "text",
    [
        "/runs/exp #2",
        " a",
        "a ",
        "&x",
        "a\nb",
        "[new]/x",
        "{x}/y",
        "*x",
        "%x",
        "@x",
        "a: b",
        "- x",
        "!x",
        "'a' and 'b'",
    ],
)
def test_a_path_is_taken_as_it_is_typed(config, text):
    assert config("", f"run.dir={text}").run.dir == text


@pytest.mark.parametrize("key", ["init_from", "checkpoint.mirror", "tracking.mlflow_uri", "tracking.wandb_project"])
def test_every_setting_that_is_a_text_is_taken_as_it_is_typed(config, key):
    assert config_io.flatten(config("", f"{key}=2024 #1").model_dump())[key] == "2024 #1"


def test_a_flat_name_of_a_path_takes_it_as_it_is_typed(config):
    assert config("", "output_dir=/runs/exp #2").run.dir == "/runs/exp #2"


@pytest.mark.parametrize(("typed", "meant"), [("null", None), ("", None), ("'a #b'", "a #b"), ('"a\\tb"', "a\tb")])
def test_null_is_none_and_quotes_around_a_text_are_no_part_of_it(config, typed, meant):
    assert config("", f"run.dir={typed}").run.dir == meant


def test_an_override_that_is_a_text_may_hold_an_interpolation(config):
    assert config("", "run.name=lr_${optim.lr} #1", "optim.lr=0.5").run.name == "lr_0.5 #1"


@pytest.mark.parametrize("lr", ["learning_rate: 0.5\n", "optim: {lr: 0.5}\n"])
def test_an_interpolation_may_use_the_flat_name_of_a_setting(config, lr):
    assert config(lr + "run: {name: 'lr_${learning_rate}'}\n").run.name == "lr_0.5"
    assert config(lr, "run.name=lr_${learning_rate}", "lr=0.25").run.name == "lr_0.25"


@pytest.mark.parametrize("name", ["w #2.pt", "${x}.pt", "'a'.pt"])
def test_resume_takes_the_name_of_a_file_as_it_is_typed(tmp_path, monkeypatch, name):
    seen = []
    monkeypatch.setattr(run, "start", lambda task, config, explanation, arguments: seen.append(config.init_from) or 0)
    (tmp_path / name).write_bytes(b"")
    run.main(["--config", "configs/digits_tiny.yaml", "--resume", f"{tmp_path}/{name}", f"run.dir={tmp_path}/r"])
    assert seen == [f"{tmp_path}/{name}"]


@pytest.mark.parametrize("overrides", [("learning_rate=1e-2", "optim.lr=5e-2"), ("optim.lr=1e-2", "lr=5e-2")])
def test_the_last_override_of_a_setting_counts_whatever_its_name(config, overrides):
    assert config("lr: 1e-4\n", *overrides).optim.lr == 5e-2


def test_two_names_of_one_setting_with_different_values_are_refused(config):
    expected = "learning_rate and optim.lr are one setting, got 0.001 and 0.0001; keep one"
    with pytest.raises(UserError, match=expected):
        config("learning_rate: 1e-3\noptim: {lr: 1e-4}\n")
    with pytest.raises(ValueError, match=expected):
        TrainingConfig(learning_rate=1e-3, optim={"lr": 1e-4})


def test_two_names_of_one_setting_with_the_same_value_are_taken(config):
    assert config("learning_rate: 1e-3\noptim: {lr: 1e-3}\n").optim.lr == 1e-3


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("", ["run.dir=a\udcff"], "bytes that are not UTF-8"),
        ("optim: {lr: '???'}\n", [], r"optim\.lr: is still \?\?\?; give a value, as in optim\.lr=\.\.\."),
        ("lora: {match: [a, '???']}\n", [], r"lora\.match: is still \?\?\?"),
        ("optim: adamw\nlr: 1\n", [], r"optim: wanted a section of settings, such as \{name: adamw\}"),
        ("optim: adamw\n", ["lr=1"], r"cannot apply lr=1: optim is 'adamw', wanted a section of settings"),
        ("optim.lr: 1\n", [], r"optim\.lr: unknown key; a file nests it: optim: \{lr: \.\.\.\}"),
        ("", ["optim.groups.a.match=*.bias"], r"""quotes within quotes: optim\.groups\.a\.match='"\*\.bias"'"""),
        ("", ["lora.match[0]=c"], r"give the whole list: 'lora\.match=\[a, b\]'"),
        ("", ["data.micro_batch=0"], r"data\.micro_batch: wanted a number of samples from 1 on, or auto, got 0"),
    ],
)
def test_what_cannot_be_applied_is_refused_by_its_key(config, text, overrides, expected):
    with pytest.raises(UserError, match=expected):
        config(text, *overrides)


def test_a_section_in_python_that_is_only_its_name_is_refused():
    with pytest.raises(ValueError, match=r"wanted a section of settings, such as \{name: adamw\}"):
        TrainingConfig(optim="adamw", learning_rate=1)


@pytest.mark.parametrize("text", ["${x}", r"\${x}", r"a\\${x", "$${{", r"a\b"])
def test_a_config_that_is_written_reads_back_with_every_dollar_and_backslash(tmp_path, text):
    (tmp_path / "c.yaml").write_text(config_io.dump(TrainingConfig(task="digits.classify", run={"dir": text})))
    assert config_io.load_config(tmp_path / "c.yaml").run.dir == text
