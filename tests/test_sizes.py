"""A folder reads as a table of contents."""

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[1]


def tracked(folder: str) -> list[pathlib.PurePosixPath]:
    """Return the files that git tracks below a folder, as paths within it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT / folder, capture_output=True, text=True, check=True)
    return [pathlib.PurePosixPath(name) for name in listed.stdout.split("\0") if (ROOT / folder / name).is_file()]


def test_train_has_15_entries_at_most():
    assert len({path.parts[0] for path in tracked("jaxtrain/train")}) <= 15  # more of them: group them in a folder


def test_hjepa_has_20_files_at_most_beside_the_originals_and_the_evaluations():
    own = [path for path in tracked("jaxtrain/systems/hjepa") if path.parts[0] not in ("original", "evals")]
    assert len(own) <= 20
