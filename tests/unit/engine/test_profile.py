"""The profile of a few steps."""

import contextlib
import gzip
import json

import jax
import pytest

from jaxtrain.config import TrainingConfig
from jaxtrain.nn import scopes
from jaxtrain.train.tracking.profile import names, trace
from jaxtrain.train.tracking.profile.profile import Profile
from jaxtrain.train.tracking.profile.table import Table, Window
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
    spans = {"while": (0.0, 100.0), "dot": (10.0, 40.0), "add": (50.0, 60.0)}
    events = [(*span, name, "p", "cpu 0", False) for name, span in spans.items()]
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


def test_what_a_cuda_graph_runs_is_found_by_its_kernels_name():
    """The names as a trace of an H200 gives them."""
    program = {"loop_select_fusion_1": names.Origin("decoder.layer11", names.ELEMENTWISE, True)}
    times = {"loop_select_fusion_1": 30.0, "nvjet_sm90_tst_256x160_64x3_1x2_h_bz_coopA_NTT": 60.0, "Memset": 10.0}
    operations = [
        trace.Operation(name, "jit_train_step", "gpu 0", 100.0 * i, 100.0 * i + ns, ns, in_graph=True)
        for i, (name, ns) in enumerate(times.items())
    ]
    window = Window(1, 1, 100e-9, 0.0, "1 x NVIDIA H200", [], True, {"jit_train_step": program})
    found = Table.of(window, operations, TrainingConfig(), "gpu")
    assert found.kinds["elementwise"] == pytest.approx(30e-6)
    assert found.kinds["matmul"] == pytest.approx(60e-6)
    assert found.kinds["copies"] == pytest.approx(10e-6)
    assert found.modules["decoder.layer11"] == (0.0, pytest.approx(30e-6))
    assert found.modules[names.OF_LIBRARIES] == (pytest.approx(70e-6), 0.0)


def test_an_instruction_has_its_kernels_name_too():
    compiled = jax.jit(lambda x: jax.numpy.tanh(x).sum()).lower(jax.numpy.ones((8, 8))).compile()
    _, found = names.origins(compiled.as_text())
    dotted = [name for name in found if "." in name]
    assert dotted
    assert all(name.replace(".", "_").replace("-", "_") in found for name in dotted)


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


def test_a_run_beyond_its_end_traces_nothing():
    profile = Profile(TrainingConfig(profile={"start": 0, "steps": 3}), None, step=5, total=4, on_device=False)
    assert profile.steps == 0
