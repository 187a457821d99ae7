"""The profile of a few steps."""

import contextlib
import gzip
import json

import jax
import pytest

from jaxtrain.nn import scopes
from jaxtrain.train.tracking.profile import names, trace
from tests.unit.engine import runs


def lowered(folder):
    program = runs.trainer(folder, runs.task(runs.Network)).program
    return program.train_step().jitted.lower(*program.abstract_arguments())


@pytest.mark.slow
def test_names_change_nothing_but_locations(tmp_path, monkeypatch):
    named = lowered(tmp_path)
    monkeypatch.setattr(scopes.jax, "named_scope", lambda name: contextlib.nullcontext())
    plain = lowered(tmp_path)
    assert "blocks.0.fc" in named.as_text(debug_info=True)
    assert named.as_text(debug_info=True) != plain.as_text(debug_info=True)
    assert named.as_text() == plain.as_text()


def test_time_within_a_loop_counts_once():
    events = [(0.0, 100.0, "while", "p", "cpu 0"), (10.0, 40.0, "dot", "p", "cpu 0"), (50.0, 60.0, "add", "p", "cpu 0")]
    own = {operation.name: operation.own_ns for operation in trace._nested(events)}
    assert own == {"while": 60.0, "dot": 30.0, "add": 10.0}


def test_an_instruction_is_of_its_innermost_module():
    @jax.jit
    @jax.grad
    def gradient(weight, x):
        with scopes.scope("encoder"), scopes.scope("encoder.layer.3"):
            return jax.numpy.tanh(x @ weight).sum()

    x = jax.numpy.ones((8, 8))
    _, found = names.origins(gradient.lower(x, x).compile().as_text())
    products = [origin for origin in found.values() if origin.kind == names.MATMUL]
    assert {origin.module for origin in products} == {"encoder.layer.3"}
    assert {origin.backward for origin in products} == {False, True}


@pytest.mark.slow
def test_a_profile_of_a_run_adds_up(tmp_path):
    runs.trained(tmp_path, runs.task(runs.Network), profile__start=3, profile__steps=2)
    content = json.loads((tmp_path / "profile" / "profile.json").read_text())
    assert (content["first_step"], content["last_step"]) == (4, 5)
    assert sum(content["kinds_ms"].values()) == pytest.approx(content["ms_per_step"], rel=0.02)
    assert {"stem", "blocks.*.fc", "head", "optimizer"} <= content["modules"].keys()
    assert content["modules"]["blocks.*.fc"]["backward_ms"] > 0
    assert content["compiled"] == []
    assert content["lever"].startswith("largest lever: ")
    with gzip.open(tmp_path / "profile" / "perfetto.json.gz", "rt") as file:
        labels = {event["name"] for event in json.load(file)["traceEvents"] if "name" in event}
    assert any(label.startswith("blocks.1.fc: ") for label in labels)


@pytest.mark.slow
def test_a_profiled_run_has_the_same_bits(tmp_path):
    plain = runs.trained(tmp_path / "plain", runs.task(runs.Network))
    profiled = runs.trained(tmp_path / "profiled", runs.task(runs.Network), profile__start=2)
    runs.assert_same_bits(runs.arrays(plain), runs.arrays(profiled))
