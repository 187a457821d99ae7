"""Every shipped config is valid and says what it costs; so is every one that is compared with torch."""

import pathlib

import pytest

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


@pytest.mark.parametrize("size", ["small", "reference"])
@pytest.mark.parametrize("system", CASES)
def test_a_case_compared_with_torch_loads(system, size):
    case = CASES[system][size]
    config_io.load(case.config, [*case.overrides, *CONSTANT_RATE, "precision.policy=bf16"])
