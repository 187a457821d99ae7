"""Every shipped config is valid and says what it costs."""

import pathlib

import pytest

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
