"""Torch stays in its files, and the settings need no JAX. `make lint` checks the layers (import-linter)."""

import pathlib
import re
import tomllib

import grimp
import pytest

ROOT = pathlib.Path(__file__).parents[1]

TORCH_PACKAGES = {
    "certificate",
    "comparison",
    "capture",
    "evaluated_module",
    "torch_edits",
    "setting_edits",
    "files",
    "torchrun",
    "datasets",
    "device_tensor",
    "awaited",
    "batch_tensors",
    "records",
    "exchange",
    "function",
    "module",
    "modes",
    "module_tensors",
    "verification",
    "lowering",
    "from_torch",
    "double_values",
    "lazy_scalar",
    "optimizers",
    "replicas",
    "same_tensors",
    "torchvision_operators",
    "loose_parameters",
    "step_rules",
    "script_loop",
    "second_derivatives",
    "script_watch",
    "random_state",
    "torch_step",
    "training",
}


DROP_INS = {"jaxtrain.transformers", "jaxtrain.lightning", "jaxtrain.accelerate"}  # on another package's torch loop


@pytest.fixture(scope="module")
def imports():
    return grimp.build_graph("jaxtrain", "torch_bridge", include_external_packages=True, cache_dir=None)


def test_torch_is_imported_in_its_files_only(imports):
    assert [name for name in imports.find_modules_that_directly_import("torch") if not _may_import_torch(name)] == []


def _may_import_torch(module: str) -> bool:
    """Return True for a system's torch_*.py, the facade in its `original` folder, and the bridge's torch files."""
    package, *folders, file = module.split(".")
    if module in DROP_INS:
        return True
    if package == "torch_bridge":
        return bool(TORCH_PACKAGES & {*folders, file})
    return "systems" in folders and ("original" in folders or file.startswith("torch_"))


def test_the_core_settings_import_nothing_beyond_pydantic(imports):
    assert imports.find_modules_directly_imported_by("jaxtrain.config") <= {
        "pathlib",
        "typing",
        "pydantic",
        "jaxtrain.config_mistakes",
    }


def test_every_module_stands_in_a_layer(imports):
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layered = set(re.findall(r"[\w.]+", " ".join(linter["contracts"][0]["layers"])))
    assert imports.find_children("jaxtrain") | imports.find_children("torch_bridge") == layered - {"benchmarks"}
