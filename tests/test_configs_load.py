"""Every shipped config is valid and says what it costs; so is every one that is compared with torch."""

import json
import pathlib

import pytest
from omegaconf import OmegaConf

from benchmarks.systems import CASES, CONSTANT_RATE
from jaxtrain import config_io

CONFIGS = sorted((pathlib.Path(__file__).parents[1] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_loads_and_survives_a_round_trip(path, tmp_path):
    _, config = config_io.load(path)
    config_io.save(config, tmp_path / "config.yaml")
    assert config_io.load(tmp_path / "config.yaml")[1] == config


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_names_its_command_and_its_expected_result(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert any(f"configs/{path.name}" in line for line in header)
    assert any("Expected" in line or "Cost" in line for line in header)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_an_editor_checks_a_shipped_config_by_its_schema(path):
    jsonschema = pytest.importorskip("jsonschema", reason="editors bring a validator of their own")
    schema = path.with_name("schema.json")
    assert path.read_text().startswith(f"# yaml-language-server: $schema={schema.name}\n")
    check = jsonschema.Draft7Validator(json.loads(schema.read_text()))
    values = OmegaConf.to_container(OmegaConf.load(path))
    assert [error.message for error in check.iter_errors(values)] == []
    values["optim"] = {"learning_rte": 1e-3}
    assert ["'learning_rte' was unexpected" in error.message for error in check.iter_errors(values)] == [True]


@pytest.mark.parametrize("size", ["small", "reference"])
@pytest.mark.parametrize("system", CASES)
def test_a_case_compared_with_torch_loads(system, size):
    case = CASES[system][size]
    config_io.load(case.config, [*case.overrides, *CONSTANT_RATE, "precision.policy=bf16"])
