"""Search spaces: what varies, under which conditions, and what is refused before a trial is spent."""

import pytest

from jaxtrain.errors import UserError
from jaxtrain.tuning import space


def write(path, text):
    path.write_text(text)
    return path


def test_a_condition_decides_whether_a_setting_varies(tmp_path):
    text = """
optim.schedule.name: {type: categorical, choices: [cosine, constant]}
optim.schedule.warmup_ratio: {type: uniform, low: 0.0, high: 0.2, when: {optim.schedule.name: [cosine, linear]}}
model.width: {type: int, low: 8, high: 64, log: true, when: {compat: original}}
"""
    found = space.load(write(tmp_path / "space.yaml", text))
    first = found.choose(lambda name, setting: setting.ends[0], {"compat": "original"})
    assert first == {"optim.schedule.name": "cosine", "optim.schedule.warmup_ratio": 0.0, "model.width": 8}
    assert found.choose(lambda name, setting: setting.ends[1], {}) == {"optim.schedule.name": "constant"}


def test_all_mistakes_of_a_space_are_named_together(tmp_path):
    text = """
study: {trails: 3}
optim.lr: {type: loguniform, low: 0.0, high: 1.0}
optim.weight_decay: {type: uniform, low: 1.0, high: 0.5}
model.width: {type: categorical}
"""
    with pytest.raises(UserError) as error:
        space.load(write(tmp_path / "space.yaml", text))
    for part in ("4 mistakes", "did you mean `trials`?", "wants low > 0", "wants low <= high", "wants choices"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no setting varies"),
        (
            "a: {type: int, low: 0, high: 1, when: {b: 1}}\nb: {type: int, low: 0, high: 1}",
            "must come before",
        ),
        ("study: {sampler: {name: grid}}\na.b: {type: uniform, low: 0, high: 1}", "grid wants categorical"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(tmp_path, text, words):
    with pytest.raises(UserError, match=words):
        space.load(write(tmp_path / "space.yaml", text + "\n"))


def test_a_setting_that_the_config_does_not_have_is_refused_before_the_first_trial(tmp_path):
    found = space.load(write(tmp_path / "space.yaml", "optim.lrr: {type: uniform, low: 0.1, high: 1}\n"))
    with pytest.raises(UserError, match="did you mean `lr`"):
        space.check(found, {"task": "digits.classify"}, "digits.yaml")


def test_the_spaces_of_the_repository_can_be_read():
    from tests.contract.tasks import CONFIGS

    files = sorted((CONFIGS / "hpo").glob("*.yaml"))
    assert len(files) >= 4
    assert all(space.load(path).settings for path in files)
