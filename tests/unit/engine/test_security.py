"""What a user may have downloaded (configs, weights, checkpoints) runs no code and tells no secrets."""

import ast
import hashlib
import json
import pathlib
import sys

import pytest

from jaxtrain import UserError, config_io, run
from jaxtrain.train.checkpoint import manifest

ROOT = pathlib.Path(__file__).parents[3]
BETWEEN_OWN_PROCESSES = {"jaxtrain/data/shared_memory.py"}  # its bytes never were a file
OF_THE_USERS_SCRIPT = {"jaxtrain/script_doctor.py", "torch_bridge/script_loop.py"}  # the one that `--script` names
RUNS_CODE = {"pickle.load", "pickle.loads", "eval", "exec", "marshal.loads", "shelve.open", "joblib.load"}
RUNS_CODE |= {"yaml.load", "yaml.unsafe_load", "yaml.full_load", "os.system", "dill.load", "cloudpickle.load"}


def calls():
    """(file, dotted name, call) of every call in the two packages."""
    for package in ("jaxtrain", "torch_bridge"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    yield path.relative_to(ROOT).as_posix(), ast.unparse(node.func), node


def test_no_file_is_unpickled_evaluated_or_built_into_objects():
    found = [
        (file, name)
        for file, name, _ in calls()
        if name in RUNS_CODE and file not in BETWEEN_OWN_PROCESSES | OF_THE_USERS_SCRIPT
    ]
    assert found == []


def test_every_unpickler_names_what_it_allows():
    for path in [p for package in ("jaxtrain", "torch_bridge") for p in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and any("Unpickler" in ast.unparse(base) for base in node.bases):
                assert "find_class" in {f.name for f in node.body if isinstance(f, ast.FunctionDef)}, path


def test_torch_load_and_numpy_load_take_no_pickles():
    for file, name, node in calls():
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name == "torch.load":
            assert given.get("weights_only") == "True", file
        if name in ("np.load", "numpy.load"):
            assert "allow_pickle" not in given, file  # False by default


@pytest.mark.parametrize(
    "text",
    ["!!python/object/apply:os.mkdir [{}]", "task: !!python/object/apply:os.mkdir [{}]", "task: !!python/name:os"],
)
def test_a_config_builds_no_python_objects(text, tmp_path, capsys):
    path, target = tmp_path / "evil.yaml", tmp_path / "made"
    path.write_text(text.format(target))
    assert run.main(["--config", str(path), "--dry-run"]) == 2
    assert "cannot be read as YAML" in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize("form", ["{}/evil_task.py", "{}/evil_task", "../evil_task", "evil_task", ".evil_task"])
def test_a_task_comes_from_importable_packages_only(form, tmp_path, capsys, monkeypatch):
    (tmp_path / "evil_task.py").write_text(f"import os; os.mkdir({str(tmp_path / 'made')!r})")
    (tmp_path / "config.yaml").write_text(f"task: {form.format(tmp_path)}")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert run.main(["--config", "config.yaml", "--dry-run"]) == 2
    assert "is unknown; known here" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("setting", "secret"),
    [
        ("tracking.mlflow_uri=http://user:hunter2@host/x", "hunter2"),
        ("tracking.wandb_project=${oc.env:WANDB_API_KEY}", "0123456789abcdef"),
        ("run.name=${oc.env:HF_TOKEN}", "0123456789abcdef"),
    ],
)
def test_secrets_are_refused_and_not_shown(setting, secret, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, secret)
    config = str(ROOT / "configs/digits_tiny.yaml")
    assert run.main(["--config", config, "--print-config", setting]) == 2
    output = capsys.readouterr()
    assert setting.partition("=")[0] in output.err
    assert secret not in output.out + output.err


def test_tokens_of_the_environment_are_not_in_the_saved_config(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    config = config_io.load_config(ROOT / "configs/digits_tiny.yaml", "tracking.wandb=true")
    assert "0123456789abcdef" not in config_io.dump(config)


def test_a_checkpoint_that_names_files_outside_its_folder_is_damaged(tmp_path):
    outside, folder = tmp_path / "secret", tmp_path / "10"
    outside.write_text("secret")
    folder.mkdir()
    file = {"bytes": 6, "sha256": hashlib.sha256(b"secret").hexdigest()}
    content = {"step": 10, "files": {"../secret": file}}
    (folder / "meta.json").write_text(json.dumps(content | {"seal": manifest._hash_of(content)}))
    assert manifest.problems(folder) == ["../secret: lies outside the checkpoint"]
    with pytest.raises(UserError, match="damaged"):
        manifest.read(tmp_path)
