"""Absurd settings are refused in a sentence, before anything is built of them."""

import pytest

from jaxtrain import config_io, run, yaml_limits
from jaxtrain.config import TrainingConfig
from jaxtrain.errors import UserError

TINY = "configs/digits_tiny.yaml"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("shard.threads=2147483647", "shard.threads: input should be less than or equal to 1024"),
        ("model.depth=18446744073709551616", "depth: an integer of 65 bits, wanted at most 63 and a sign"),
        ("model.depth=1000000000000000000", "model.depth: input should be less than or equal to 10000"),
        ("train.steps=9223372036854775807", "train.steps: input should be less than or equal to 100000000"),
        ("model.num_heads=3", "digits.classify: no model can be built with these settings: embed_dim="),
        ("run.name=../..", "wanted one name of at most 200 bytes without `/`"),
        ("run.name=" + "a" * 300, "wanted one name of at most 200 bytes without `/`"),
        ("lora.match=" + "[" * 3000, "nested more than 64 deep"),
        (".".join("a" * 3000) + "=1", "nested more than 64 deep"),
        ("seed=" + "9" * 5000, "cannot apply"),
        (r'run.dir="a\0b"', "holds a character that is none of a text"),
    ],
)
def test_an_absurd_override_is_refused_in_one_short_sentence(override, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run.main(["--config", TINY, "--dry-run", override]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert len(said) < 1500


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[" * 5000 + "]" * 5000, "nest"),
        ("[" * 100 + "]" * 100, "nested more than 64 deep"),
        ("{a: " * 3000 + "1" + "}" * 3000, "nest"),
        ("a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(f"{c}: &{c} [{','.join(['*' + p] * 9)}]\n"
            for p, c in zip("abcdefgh", "bcdefghi", strict=True)), "more than 50,000 values"),
        ("a: &a\n  b: *a\n", r"\*a stands within itself"),
        ("x: " + "a" * 5_000_000, "5,000,003 characters, wanted at most 1,048,576"),
        ("a: " + "9" * 5000, "cannot be read as YAML"),
    ],
)  # fmt: skip
def test_a_text_that_stands_for_more_than_it_shows_is_refused_unbuilt(text, expected, tmp_path):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=expected):
        config_io.read(tmp_path / "c.yaml")


def test_aliases_within_reason_are_taken():
    yaml_limits.check("a: &a {x: 1, y: [1, 2]}\nb: *a\nc: {<<: *a}\n")


def test_a_run_of_more_steps_than_its_schedule_can_keep_is_refused(tmp_path, capsys):
    assert run.main(["--config", TINY, "--dry-run", f"run.dir={tmp_path}", "train.epochs=2147483647"]) == 2
    assert "are more than the 100,000,000 steps that a run may take" in capsys.readouterr().err


def test_settings_made_in_python_are_within_the_same_limits():
    with pytest.raises(ValueError, match="seed: an integer of 401 bits"):
        TrainingConfig(seed=1 << 400)


def test_sections_with_dicts_are_hashed_by_their_values():
    one, same, other = ({"data": {"pad_values": {"ids": value}}} for value in (1, 1, 2))
    hashes = [hash(TrainingConfig(**values).data) for values in (one, same, other)]
    assert hashes[0] == hashes[1] != hashes[2]
