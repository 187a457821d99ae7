"""The names that other people's scripts import."""

import argparse
import importlib
import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys

import pytest

import jaxtrain
from jaxtrain.__main__ import COMMANDS, ELSEWHERE, main

ROOT = pathlib.Path(__file__).parents[1]


@pytest.mark.parametrize("name", jaxtrain.__all__)
def test_every_public_name_resolves(name):
    assert getattr(jaxtrain, name) is not None


def test_importing_jaxtrain_loads_neither_jax_nor_torch():
    code = "import sys, jaxtrain; print(sorted({'jax', 'torch', 'flax', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_from_torch_is_a_function_under_both_of_its_names_and_its_package_loads_no_torch():
    code = "import sys, torch_bridge; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"
    torch = pytest.importorskip("torch")
    import torch_bridge
    from torch_bridge.from_torch import from_torch

    module, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    for convert in (torch_bridge.from_torch, from_torch):
        assert convert(module, (x,))(x.numpy()).shape == (4, 2)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        jaxtrain.Nothing  # noqa: B018


NO_COMMANDS = {  # parts of others
    f"benchmarks.{name}" for name in ("charts", "contact_checks", "page_tables", "systems", "torch_side")
}
BENCHMARKS = {f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
MODULES = sorted(
    ({ELSEWHERE.get(name, f"jaxtrain.{name}") for name in COMMANDS} | BENCHMARKS)
    - NO_COMMANDS
    - {"torch_bridge.torchrun"}  # its help is torchrun's
    | {"jaxtrain.systems.fmri_autoencoder.prepare"}
)


NEED_TORCH = (
    "torch_bridge.verify",
    "benchmarks.converted_bert",
    "benchmarks.input_pipeline",
    "benchmarks.many_lengths",
    "benchmarks.operators",
    "benchmarks.own_loop",
)


@pytest.mark.parametrize("module", MODULES)
def test_every_commands_help_ends_with_an_example_whose_files_exist(module, capsys, monkeypatch):
    if module in NEED_TORCH:
        pytest.importorskip("torch")
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(module).main()
    assert stopped.value.code == 0
    example = capsys.readouterr().out.partition("\nexample:\n")[2]
    assert example.strip().startswith(f"python -m {module}")
    assert all((ROOT / path).is_file() for path in re.findall(r"configs/\S+\.yaml", example))


@pytest.mark.parametrize("module", sorted(BENCHMARKS - NO_COMMANDS))
def test_a_benchmark_reads_no_argument_that_it_does_not_take(module, monkeypatch):
    """They run for minutes, and a name that is wrong in their last line loses the figures."""
    if module in NEED_TORCH:
        pytest.importorskip("torch")

    class Parsed(Exception):
        pass

    def parse(parser, *_):
        raise Parsed({action.dest for action in parser._actions})

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse)
    with pytest.raises(Parsed) as parsed:
        importlib.import_module(module).main()
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    read = set(re.findall(r"\barguments\.(\w+)", source))
    assert read
    assert read <= parsed.value.args[0]


def test_a_sub_command_that_lives_elsewhere_is_found(capsys):
    pytest.importorskip("torch")
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    assert "python -m torch_bridge.verify" in capsys.readouterr().out


def test_the_version_is_that_of_the_project(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxtrain {importlib.metadata.version('jaxtrain')}\n"


def test_an_unknown_command_is_refused_with_the_known_ones(capsys):
    assert main(["trian"]) == 2
    assert "evaluate" in capsys.readouterr().err


def test_the_console_command_finds_modules_in_the_working_directory(tmp_path):
    """`model: {target: parts.Net}` works with `jaxtrain run` as with `python -m jaxtrain.run`."""
    (tmp_path / "parts.py").write_text("Net = 3\n")
    script = "import sys; sys.argv = ['jaxtrain', '--version']; import jaxtrain.__main__ as m; m.main(); import parts"
    command = [sys.executable, "-P", "-c", script]  # -P: without the working directory, as in an installed script
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert done.returncode == 0, done.stderr
