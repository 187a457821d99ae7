"""Under Lightning's and transformers' Trainer torch runs the steps until XLA has compiled them, with the library's
curves; who asks for the same bits waits."""

import jax
import numpy as np
import pytest
import torch

import jaxtrain.compiled_step as package
from jaxtrain.compiled_step import meanwhile
from jaxtrain.compiled_step.step import CompiledStep
from jaxtrain.runtime import background
from jaxtrain.runtime.mesh import make_layout
from tests.e2e import test_drop_in_lightning as lightning
from tests.e2e import test_drop_in_transformers as transformers

ASKED = 4  # calls that find a program unfinished


@pytest.fixture
def sides(monkeypatch):
    """Who has run each step, "torch" or "XLA": torch the first calls of each program, on one device."""
    done, captured, sides, asked = background.Compilation.done, CompiledStep.captured, [], {}

    def late(compilation):
        asked[id(compilation)] = asked.get(id(compilation), 0) + 1
        if asked[id(compilation)] <= ASKED:
            return False
        compilation._over.wait()
        return done(compilation)

    def noted(step, *arguments, **options):
        found = captured(step, *arguments, **options)
        sides.append("XLA" if step.ahead else "torch")
        return found

    monkeypatch.setenv("JAXTRAIN_WAIT", "0")
    monkeypatch.setattr(meanwhile, "CAPTURE_S", 0.0)
    monkeypatch.setattr(meanwhile, "MODULE_S", 0.0)
    monkeypatch.setattr(package, "make_layout", lambda shard, *_: make_layout(shard, None, jax.devices()[:1]))
    monkeypatch.setattr(background._Queue, "_into_cache", lambda *given: None)  # the thread compiles: no second JAX
    monkeypatch.setattr(background.Compilation, "done", late)
    monkeypatch.setattr(CompiledStep, "captured", noted)
    return sides


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}])
def test_lightnings_curve_stays_its_own_over_the_switch(sides, tmp_path, options):
    values = {}
    for engine in ("lightning", "jaxtrain"):
        made = lightning.trainer(engine, tmp_path / engine, **options)
        made.fit(lightning.Classifier(), lightning.loader(5), lightning.loader(25))
        values[engine] = lightning.logged(tmp_path / engine)
    assert [list(row) for row in values["jaxtrain"]] == [list(row) for row in values["lightning"]]
    for mine, theirs in zip(values["jaxtrain"], values["lightning"], strict=True):
        np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=1e-5)
    assert sides[:ASKED] == ["torch"] * ASKED
    assert sides.count("XLA") > 2


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}])
def test_transformers_curve_stays_its_own_over_the_switch(sides, tmp_path, options):
    curves = {}
    for engine in ("transformers", "jaxtrain"):
        made = transformers.trainer(
            engine, tmp_path / engine, per_device_train_batch_size=5, num_train_epochs=4, **options
        )
        made.train()
        curves[engine] = transformers.curve(made)
    np.testing.assert_allclose(curves["jaxtrain"], curves["transformers"], rtol=1e-5)
    assert sides[:ASKED] == ["torch"] * ASKED
    assert sides.count("XLA") > 2


def test_a_resumed_run_of_lightning_waits(sides, tmp_path):
    lightning.trainer("jaxtrain", tmp_path, max_epochs=1).fit(
        lightning.Classifier(), lightning.loader(10), lightning.loader(25)
    )
    (kept,) = (tmp_path / "kept").glob("*.ckpt")
    sides.clear()
    again = lightning.trainer("jaxtrain", tmp_path / "again", max_epochs=2)
    again.fit(lightning.Classifier(), lightning.loader(10), lightning.loader(25), ckpt_path=kept)
    assert sides == ["XLA"] * 5


@pytest.mark.slow
def test_a_resumed_run_of_transformers_waits(sides, tmp_path):
    transformers.trainer("jaxtrain", tmp_path, num_train_epochs=1).train()
    sides.clear()
    transformers.trainer("jaxtrain", tmp_path, num_train_epochs=2).train(resume_from_checkpoint=True)
    assert sides == ["XLA"] * 7


@pytest.mark.parametrize("library", ["lightning", "transformers"])
def test_a_librarys_own_word_for_the_same_bits_waits(sides, tmp_path, library):
    try:
        if library == "lightning":
            made = lightning.trainer("jaxtrain", tmp_path, max_epochs=1, deterministic=True)
            made.fit(lightning.Classifier(), lightning.loader(10), lightning.loader(25))
        else:
            transformers.trainer("jaxtrain", tmp_path, num_train_epochs=1, full_determinism=True).train()
    finally:
        torch.use_deterministic_algorithms(False)
    assert set(sides) == {"XLA"}
