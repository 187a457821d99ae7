"""A mirror gives a run's checkpoints back, and never stops it."""

import random
import shutil
import time

import fsspec
import pytest

from jaxtrain import UserError
from jaxtrain.train.checkpoint import manifest, mirror
from tests.chaos.damages import DAMAGES
from tests.unit.engine.runs import arrays, assert_same_bits, trainer

SAVING = {"checkpoint__every_steps": 2, "train__steps": 8, "evaluation__every_epochs": None}


def names(folder):
    return {path.name for path in (folder / "checkpoints").iterdir()}


def log(folder):
    return (folder / "train.log").read_text()


def mirrored(tmp_path, place=None, **settings):
    """A trainer in tmp_path/run whose mirror is tmp_path/mirror."""
    place = str(tmp_path / "mirror") if place is None else place
    return trainer(tmp_path / "run", **SAVING | {"checkpoint__mirror": place} | settings)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run and its mirror, and the run's weights."""
    folder = tmp_path_factory.mktemp("whole")
    made = mirrored(folder)
    made.train()
    return folder, arrays(made)


@pytest.fixture
def finished(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path, dirs_exist_ok=True)
    return tmp_path, whole[1]


def test_a_mirror_holds_what_the_run_folder_holds_when_the_run_ends(whole):
    folder, _ = whole
    assert names(folder / "mirror") == names(folder / "run") == {"6", "8"}
    for path in (folder / "run/checkpoints").rglob("*"):
        copy = folder / "mirror" / path.relative_to(folder / "run")
        assert path.is_dir() or copy.read_bytes() == path.read_bytes()


def test_a_lost_run_folder_comes_back_from_its_mirror(finished):
    folder, weights = finished
    shutil.rmtree(folder / "run")
    again = mirrored(folder)
    again.train()
    assert "CHECKPOINT 8 comes from the mirror" in log(folder / "run")
    assert names(folder / "run") == {"6", "8"}
    assert_same_bits(arrays(again), weights)


@pytest.mark.slow
def test_a_run_goes_on_from_a_mirror_that_is_newer_than_its_folder(finished):
    folder, weights = finished
    shutil.rmtree(folder / "run/checkpoints/8")
    again = mirrored(folder)
    again.train()
    assert "at step 8 of 8" in log(folder / "run")
    assert_same_bits(arrays(again), weights)


@pytest.mark.slow
def test_an_empty_run_folder_goes_on_where_the_mirror_ended_to_the_same_bits(finished):
    folder, weights = finished
    shutil.rmtree(folder / "run")
    shutil.rmtree(folder / "mirror/checkpoints/8")
    again = mirrored(folder)
    again.train()
    assert "at step 6 of 8" in log(folder / "run")
    assert_same_bits(arrays(again), weights)
    assert names(folder / "mirror") == {"6", "8"}


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_replaced_by_its_copy(damage, finished):
    folder, _ = finished
    damage(folder / "run/checkpoints/8", random.Random(3))
    mirrored(folder).train()
    assert names(folder / "run") == {"6", "8", "8.damaged"}
    assert manifest.problems(folder / "run/checkpoints/8", 8) == []
    assert "now 8.damaged" in log(folder / "run")


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_copy_is_not_taken(damage, finished):
    folder, weights = finished
    damage(folder / "mirror/checkpoints/8", random.Random(3))
    shutil.rmtree(folder / "run")
    again = mirrored(folder)
    again.train()
    assert "at step 6 of 8" in log(folder / "run")
    assert_same_bits(arrays(again), weights)


def test_a_mirror_of_another_run_is_refused(finished):
    folder, _ = finished
    before = {path: path.read_bytes() for path in (folder / "mirror").rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="holds another run: optim.lr was 0.01 and is 0.02"):
        trainer(folder / "other", **SAVING, optim__lr=2e-2, checkpoint__mirror=str(folder / "mirror")).train()
    assert before == {path: path.read_bytes() for path in (folder / "mirror").rglob("*") if path.is_file()}


@pytest.mark.slow
def test_checkpoints_of_nobody_are_refused_as_a_mirror(finished):
    folder, _ = finished
    (folder / "mirror/fingerprint.json").unlink()
    with pytest.raises(UserError, match="holds checkpoints, but no fingerprint.json"):
        mirrored(folder).train()


@pytest.mark.slow
def test_never_to_resume_refuses_a_mirror_with_checkpoints(finished):
    folder, _ = finished
    shutil.rmtree(folder / "run")
    with pytest.raises(UserError, match="mirror: holds checkpoints up to step 8 and --resume never"):
        mirrored(folder).train(resume="never")


@pytest.mark.slow
def test_a_folder_that_is_named_to_resume_goes_before_its_mirror(finished):
    folder, _ = finished
    shutil.rmtree(folder / "run/checkpoints/8")
    mirrored(folder).train(resume=str(folder / "run"))
    assert "at step 6 of 8" in log(folder / "run")


def test_a_mirror_that_fails_is_told_once_a_checkpoint_and_training_ends_well(tmp_path, monkeypatch):
    def full(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(mirror.Mirror, "_put", full)
    mirrored(tmp_path).train()
    told = log(tmp_path / "run").count("COULD NOT BE COPIED to the mirror")
    assert 1 <= told <= 6  # four checkpoints, the last one's renewal, and one more try at the end
    assert "No space left on device" in log(tmp_path / "run")
    assert names(tmp_path / "run") == {"6", "8"}


@pytest.mark.slow
def test_a_mirror_that_was_away_catches_up(tmp_path, monkeypatch):
    put, calls = mirror.Mirror._put, []

    def at_first_full(self, *arguments):
        calls.append(arguments[0])
        if len(calls) == 1:
            raise OSError(28, "No space left on device")
        put(self, *arguments)

    monkeypatch.setattr(mirror.Mirror, "_put", at_first_full)
    mirrored(tmp_path).train()
    assert names(tmp_path / "mirror") == {"6", "8"}


@pytest.mark.slow
def test_a_checkpoint_stays_while_it_is_copied_and_goes_after(tmp_path, monkeypatch):
    put, seen = mirror.Mirror._put, []

    def slow(self, step, local, *arguments):
        while step == 2 and not (tmp_path / "run/checkpoints/8").exists():  # two more than keep_last
            time.sleep(0.01)
        seen.append((step, local.is_dir()))
        put(self, step, local, *arguments)

    monkeypatch.setattr(mirror.Mirror, "_put", slow)
    mirrored(tmp_path).train()
    assert seen[0] == (2, True)
    assert {step for step, _ in seen[1:]} >= {8}
    assert names(tmp_path / "run") == names(tmp_path / "mirror") == {"6", "8"}


@pytest.mark.slow
def test_a_mirror_that_cannot_be_read_starts_nothing_over(finished, monkeypatch):
    folder, _ = finished

    def away(self):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(mirror.Mirror, "_steps", away)
    mirrored(folder).train()  # its own folder is whole
    assert "cannot be read: Input/output error" in log(folder / "run")
    shutil.rmtree(folder / "run")
    with pytest.raises(UserError, match="cannot be read: Input/output error"):
        mirrored(folder).train()


@pytest.mark.slow
def test_a_bucket_is_a_mirror(tmp_path):
    place = f"memory://{tmp_path.name}"
    first = mirrored(tmp_path, place)
    first.train()
    bucket = fsspec.filesystem("memory")
    bucket.rm(f"/{tmp_path.name}/checkpoints/8/meta.json")  # a copy that never finished
    shutil.rmtree(tmp_path / "run")
    again = mirrored(tmp_path, place)
    again.train()
    assert "at step 6 of 8" in log(tmp_path / "run")
    assert_same_bits(arrays(again), arrays(first))
    assert bucket.exists(f"/{tmp_path.name}/checkpoints/8/meta.json")


@pytest.mark.slow
def test_a_stranger_s_mirror_writes_only_within_the_run_folder(finished):
    folder, _ = finished
    copy = folder / "mirror/checkpoints/8"
    sealed = manifest.read(copy)
    sealed["files"] = {"../../../escaped": {"bytes": 1, "sha256": ""}, **sealed["files"]}
    manifest._put(copy, sealed)
    (folder / "mirror/checkpoints/8/escaped").write_text("x")
    shutil.rmtree(folder / "run")
    mirrored(folder).train()
    assert "lies outside the checkpoint" in log(folder / "run")
    assert not (folder / "escaped").exists()


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nosuch://bucket/run", "Protocol not known: nosuch"),
        ("{run}/copy", "lies in the run folder"),
    ],
)
def test_a_place_that_cannot_be_a_mirror_is_named(tmp_path, place, message):
    with pytest.raises(UserError, match=f"checkpoint.mirror.*{message}"):
        mirrored(tmp_path, place.format(run=tmp_path / "run")).train()


def test_a_password_of_a_mirror_is_not_shown(tmp_path):
    made = mirror.Mirror("memory://user:secret@host/run", tmp_path)
    assert made.place == "memory://user:***@host/run"
