"""Search spaces: what varies, under which conditions, and what is refused before a trial is spent."""

import pytest

from jaxtrain import TrainingConfig
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
        ("run.dir: [a, b]", "run.dir cannot vary"),
        (
            "a: {type: int, low: 0, high: 1, when: {b: 1}}\nb: {type: int, low: 0, high: 1}",
            "must come before",
        ),
        ("study: {seed: 4294967297}\na.b: {type: uniform, low: 0, high: 1}", "study.seed: .* less than 4294967296"),
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


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "when: {optim.schedule.nam: linear}",
            "optim.lr: when optim.schedule.nam: .* did you mean `optim.schedule.name`",
        ),
        ("when: {optim.schedule.name: linea}", "optim.schedule.name=linea: a mistake"),
        ("when: {data.batch_size: 48}", r"when data.batch_size: 48 is none of its choices, \[32, 64\]"),
        ("when: {optim.eps: 1.0}", r"when optim.eps: 1.0 is not between 1e-08 and 1e-06"),
    ],
)
def test_a_condition_that_never_holds_is_refused(tmp_path, text, words):
    before = (
        "data.batch_size: {type: categorical, choices: [32, 64]}\noptim.eps: {type: float, low: 1e-8, high: 1e-6}\n"
    )
    found = space.load(write(tmp_path / "s.yaml", f"{before}optim.lr: {{type: float, low: 0.1, high: 1, {text}}}\n"))
    with pytest.raises(UserError, match=words):
        space.check(found, {"task": "digits.classify"}, "digits.yaml")


def test_every_choice_is_checked_under_its_condition(tmp_path):
    text = """
optim.schedule.name: {type: categorical, choices: [constant, linear]}
data.batch_size: {type: categorical, choices: [32, 0, 64], when: {optim.schedule.name: linear}}
"""
    found = space.load(write(tmp_path / "space.yaml", text))
    with pytest.raises(UserError, match=r"optim\.schedule\.name=linear, data\.batch_size=0: a mistake"):
        space.check(found, {"task": "digits.classify"}, "digits.yaml")


def test_a_setting_within_a_value_is_refused(tmp_path):
    found = space.load(write(tmp_path / "space.yaml", "optim.lr.x: {type: float, low: 0, high: 1}\n"))
    with pytest.raises(UserError, match=r"optim\.lr\.x: optim\.lr is 0\.5, a setting and no section"):
        space.check(found, {"task": "digits.classify", "optim": {"lr": 0.5}}, "digits.yaml")


def test_two_names_of_one_setting_are_refused_in_a_space(tmp_path):
    text = "learning_rate: {type: float, low: 0, high: 1}\noptim.lr: {type: float, low: 0, high: 1}\n"
    with pytest.raises(UserError, match=r"learning_rate and optim\.lr are one setting"):
        space.load(write(tmp_path / "space.yaml", text))


@pytest.mark.parametrize("storage", ["nonsense://x", "sqlite:////no/such/folder/x.db", "nonsense"])
def test_a_storage_that_cannot_be_opened_is_refused_by_its_option(tmp_path, storage):
    study = pytest.importorskip("jaxtrain.tuning.study", reason="a study needs the extra `tune`")
    found = space.load(write(tmp_path / "space.yaml", "optim.lr: {type: float, low: 0, high: 1}\n"))
    with pytest.raises(UserError, match=f"--storage {storage}: cannot be opened"):
        study.Study(tmp_path / "study", found, "min", storage)


def test_a_study_keeps_its_trials_in_its_folder_whatever_that_is_called(tmp_path):
    study = pytest.importorskip("jaxtrain.tuning.study", reason="a study needs the extra `tune`")
    found = space.load(write(tmp_path / "space.yaml", "optim.lr: {type: float, low: 0, high: 1}\n"))
    study.Study(tmp_path / "lr? {x} #1", found, "min").close()
    assert (tmp_path / "lr? {x} #1/study.db").is_file()


def test_a_trial_without_an_evaluation_says_what_is_missing():
    trials = pytest.importorskip("jaxtrain.tuning.trials", reason="a study needs the extra `tune`")
    evaluation = TrainingConfig().evaluation
    with pytest.raises(UserError, match="this one made no evaluation: the config has no validation data"):
        trials.best_score(evaluation, {"val_history": []})
    with pytest.raises(UserError, match="loss was never a finite number"):
        trials.best_score(evaluation, {"val_history": [{"loss": float("nan")}]})
    assert trials.best_score(evaluation, {"val_history": [{"loss": 2.0}, {"loss": 1.0}]}) == 1.0
