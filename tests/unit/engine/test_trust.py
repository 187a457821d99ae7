"""A stranger's run folder runs none of its code; what the user allows runs."""

import json
import sys

import pytest

from jaxtrain import config_io, evaluate, export, trust
from jaxtrain.errors import UserError
from jaxtrain.task import find_task
from torch_bridge import verify

EXAMPLE = f"{trust.EXAMPLES}.DigitsNet"


def folder(tmp_path, **targets):
    """A run folder whose config names this code."""
    sections = {"model": EXAMPLE, "data": f"{trust.EXAMPLES}.digits", "loss": "torch.nn.CrossEntropyLoss"} | targets
    kwargs = {"model": {"command": f"touch {tmp_path}/ran"}}
    config = {"task": "torch_module.train"} | {
        name: {"target": path, "kwargs": kwargs.get(name, {}) if path != EXAMPLE else {}}
        for name, path in sections.items()
    }
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.yaml").write_text(json.dumps(config))
    return tmp_path / "run"


@pytest.mark.parametrize(
    "target",
    [
        "os.system", "subprocess.Popen", "builtins.exec", "importlib.import_module", "pathlib.Path.write_text",
        f"{trust.EXAMPLES}.importlib.import_module", f"{trust.EXAMPLES}.sys.exit", "jaxtrain.run.main", "torch.load",
        "torch.hub.load", "torch.nn.modules.module.warnings.warn", "torch.nn.functional.importlib.import_module",
        "torch.nn.utils.parametrize.register_parametrization", "numpy.load", "torch.utils.cpp_extension.load",
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", [evaluate, export, verify])
def test_no_command_on_a_run_folder_runs_what_its_config_names(command, target, tmp_path, capsys):
    more = ["--output", str(tmp_path / "w.pt")] if command is export else []
    assert command.main(["--run", str(folder(tmp_path, model=target)), *more]) == 2
    said = capsys.readouterr().err
    assert f"model.target names {target}, which would run here" in said
    assert "--trust" in said
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("section", ["data", "loss"])
def test_datasets_and_losses_are_code_too(section, tmp_path, capsys):
    assert evaluate.main(["--run", str(folder(tmp_path, **{section: "os.getcwd"}))]) == 2
    assert f"{section}.target names os.getcwd" in capsys.readouterr().err


def test_an_optimizer_is_code_too(tmp_path, capsys):
    place = folder(tmp_path)
    config = json.loads((place / "config.yaml").read_text())
    (place / "config.yaml").write_text(json.dumps(config | {"optim": {"name": "os.getcwd"}}))
    assert evaluate.main(["--run", str(place)]) == 2
    assert "optim.name names os.getcwd" in capsys.readouterr().err


def test_own_examples_and_torch_modules_are_taken(tmp_path):
    with trust.restricted():
        config_io.load(folder(tmp_path) / "config.yaml")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A module in the folder that a command is started in, which runs code when imported."""
    (tmp_path / "evil_package.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w'); TASKS = {{}}")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("evil_package", None)


@pytest.mark.parametrize("name", ["evil_package.task", "evil_package"])
def test_a_task_from_outside_is_not_imported(name, package):
    (package / "config.yaml").write_text(f"task: {name}")
    with trust.restricted(), pytest.raises(UserError, match="evil_package|unknown"):
        config_io.load(package / "config.yaml")
    assert not (package / "ran").exists()


def test_an_allowed_package_must_be_an_installed_one(package, monkeypatch):
    monkeypatch.setenv(trust.VARIABLE, "evil_package")
    with trust.restricted(), pytest.raises(UserError):
        find_task("evil_package.task")
    assert not (package / "ran").exists()


@pytest.mark.parametrize(
    ("path", "taken"),
    [("torchvision.models.ResNet", True), ("torchvision.models.resnet18", False), ("torchvision.io.os.system", False)],
)
def test_an_allowed_packages_modules_are_taken_and_its_functions_not(path, taken, monkeypatch):
    torchvision = pytest.importorskip("torchvision") if taken else None
    del torchvision
    monkeypatch.setenv(trust.VARIABLE, "timm, torchvision")
    assert trust._is_allowed(path) == taken


def test_remote_code_of_a_hub_model_is_refused(tmp_path):
    path = folder(tmp_path, model=f"{trust.EXAMPLES}.hugging_face") / "config.yaml"
    config = json.loads(path.read_text())
    config["model"]["kwargs"] = {"head": "AutoModel", "name": "someone/model", "trust_remote_code": True}
    path.write_text(json.dumps(config))
    with trust.restricted(), pytest.raises(UserError, match="trust_remote_code names code of a model's own repository"):
        config_io.load(path)


def test_with_trust_the_folders_code_runs(tmp_path, capsys):
    assert evaluate.main(["--run", str(folder(tmp_path, model="os.getcwd")), "--trust"]) == 2
    assert "holds no checkpoint" in capsys.readouterr().err
    config_io.load(tmp_path / "run/config.yaml")  # and what no command does is not restricted
