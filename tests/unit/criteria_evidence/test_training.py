"""Losses, decoding, what is trained, and what a change of a rate compiles."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain import config_io
from jaxtrain.config import TrainingConfig
from jaxtrain.nn import Rngs
from jaxtrain.nn.remat import rematerialise
from jaxtrain.runtime import traced_hparams
from jaxtrain.systems import criteria_evidence
from jaxtrain.systems.criteria_evidence import TASKS, losses, metrics
from jaxtrain.systems.criteria_evidence.config import Decode
from jaxtrain.systems.criteria_evidence.original import torch_compat
from jaxtrain.train.step.state import ModelDef
from tests.unit.criteria_evidence.golden import table

ENCODER = {"vocab_size": 55, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
ENCODER |= {"intermediate_size": 8, "max_position_embeddings": 64}

DATA = {"synthetic_posts": 60, "max_length": 16, "evidence_max_length": 48}


def settings(architecture: str, model=None, **sections) -> TrainingConfig:
    values = {
        "model": {"encoder": ENCODER, **(model or {})},
        "data": DATA,
    }
    return config_io.validate(config_io.schema(TASKS[architecture]), {**values, **sections})


def batch_of(architecture: str, config, rows: int = 4) -> dict:
    source = TASKS[architecture].build_data(config, "train")
    return {**source[np.arange(rows)], "valid": np.ones(rows, bool), "index": np.arange(rows)}


@pytest.mark.parametrize(("smoothing", "gamma"), [(0.0, 0.0), (0.1, 0.0), (0.0, 2.0)])
def test_row_losses_are_torchs(smoothing, gamma):
    draw = np.random.default_rng(0)
    logits, labels = draw.normal(size=(6, 3)).astype(np.float32), draw.integers(0, 3, 6)
    want = torch.nn.functional.cross_entropy(
        torch.from_numpy(logits), torch.from_numpy(labels), label_smoothing=smoothing, reduction="none"
    ).numpy()
    chosen = np.exp(logits)[np.arange(6), labels] / np.exp(logits).sum(1)
    got = losses.row_cross_entropy(jnp.asarray(logits), jnp.asarray(labels), smoothing, gamma)
    np.testing.assert_allclose(got, want * (1 - chosen) ** gamma, rtol=1e-5)


def test_an_empty_batch_and_a_row_without_answer_give_zero_and_finite_gradients():
    positions = jnp.array([-1, 2])
    loss = lambda logits, valid: losses.position_loss(logits, positions, valid)
    logits = jnp.ones((2, 5))
    for valid in (jnp.array([False, False]), jnp.array([True, False])):
        value, grad = jax.value_and_grad(loss)(logits, valid)
        assert float(value) == 0.0
        assert np.all(np.asarray(grad) == 0)


def test_share_and_joint_log_both_losses_and_train_their_weighted_sum():
    for architecture in ("share", "joint"):
        config = settings(architecture, loss={"weights": {"criteria": 0.5, "evidence": 2.0}})
        model = TASKS[architecture].build_model(config, nnx.Rngs(0))
        value, weight, parts = TASKS[architecture].loss(model, batch_of(architecture, config), config, None)
        assert set(parts) == {"criteria_loss", "evidence_loss"}
        assert float(value) == pytest.approx(0.5 * float(parts["criteria_loss"]) + 2 * float(parts["evidence_loss"]))
        assert float(weight) == 4


def test_masked_padding_takes_no_probability():
    config = settings("evidence", loss={"mask_padding": True})
    batch = batch_of("evidence", config)
    logits = {name: jnp.zeros(batch["input_ids"].shape) for name in ("start_logits", "end_logits")}
    visible = losses.text_tokens(batch)
    got = losses.combined(logits, batch, config.loss.weights, visible).value
    assert float(got) == pytest.approx(np.log(visible.sum(1)).mean(), rel=1e-6)


def test_smoothing_spreads_over_the_visible_tokens_only():
    logits, visible = jnp.array([[1.0, 2.0, 50.0]]), jnp.array([[True, True, False]])
    got = losses.row_cross_entropy(logits, jnp.array([0]), 0.2, visible=visible)
    log_p = np.array([1.0, 2.0]) - np.log(np.exp(1) + np.exp(2))
    assert float(got[0]) == pytest.approx(-(0.8 * log_p[0] + 0.2 * log_p.mean()), rel=1e-5)


def test_valid_decoding_keeps_order_length_and_visibility():
    start = jnp.array([[0.0, 5.0, 4.0, 0.0, 9.0]])
    end = jnp.array([[7.0, 0.0, 1.0, 3.0, 9.0]])
    visible = jnp.array([[True, True, True, True, False]])
    free = metrics.decode(start, end, Decode(), visible)
    assert [int(x[0]) for x in free] == [4, 4]
    best = metrics.decode(start, end, Decode(valid_only=True), visible)
    assert (int(best[0][0]), int(best[1][0])) == (1, 3)  # 5 + 3, inside the text
    short = metrics.decode(start.at[0, 0].set(-9.0), end, Decode(valid_only=True, max_tokens=2), visible)
    assert (int(short[0][0]), int(short[1][0])) == (2, 3)


def test_dropout_rates_are_numbers_not_code():
    """Trials that differ in a rate share one compiled step."""
    texts, task = [], TASKS["criteria"]
    for rate in (0.1, 0.3):
        config = settings("criteria", {"criteria": {"dropout": rate}, "encoder_dropout": rate})
        model = task.build_model(traced_hparams.marked(config, task.traced_hparams), nnx.Rngs(0))
        model_def = ModelDef.of(model, lambda key: True)
        parts, batch = model_def.split(model), batch_of("criteria", config)

        def loss(params, frozen, buffers, batch, key, numbers, config=config, model_def=model_def):
            with traced_hparams.in_force(numbers):
                return task.loss(model_def.merge(params, frozen, buffers), batch, config, Rngs(key)).value

        arguments = (*parts, batch, jax.random.key(0), traced_hparams.given(config, task.traced_hparams))
        lowered = jax.jit(loss).lower(*arguments)
        texts.append((lowered.as_text(), float(lowered.compile()(*arguments))))
    assert texts[0][0] == texts[1][0]
    assert texts[0][1] != texts[1][1]


def test_every_layer_can_be_recomputed_with_the_same_loss_and_gradient():
    config = settings("evidence", {"encoder": {**ENCODER, "kind": "deberta", "position_buckets": 8}})
    model = TASKS["evidence"].build_model(config, nnx.Rngs(0))
    model_def = ModelDef.of(model, lambda key: True)
    params, frozen, buffers = model_def.split(model)
    batch, counted = batch_of("evidence", config), []

    def loss(params, policy):
        with rematerialise(policy, {}, None) as scope:
            merged = model_def.merge(params, frozen, buffers)
            value = TASKS["evidence"].loss(merged, batch, config, Rngs(jax.random.key(1))).value
        counted.append(scope.blocks)
        return value

    plain, again = (jax.jit(jax.value_and_grad(lambda p, n=n: loss(p, n)))(params) for n in ("none", "full"))
    assert max(counted) == 2
    assert float(plain[0]) == pytest.approx(float(again[0]), rel=1e-6)
    for key, value in plain[1].items():
        np.testing.assert_allclose(again[1][key], value, rtol=1e-5, atol=1e-5, err_msg=key)


def trained(architecture: str, config) -> set[str]:
    model = nnx.eval_shape(lambda: TASKS[architecture].build_model(config, nnx.Rngs(0)))
    keys = ModelDef.of(model, lambda key: TASKS[architecture].trainable(key, config))
    return {key for key, kind in zip(keys.keys, keys.kinds, strict=True) if kind == "params"}


def test_a_pooler_that_nothing_reads_is_left_out_of_the_optimizer():
    assert not any("pooler" in key for key in trained("evidence", settings("evidence")))
    assert any("encoder.pooler" in key for key in trained("criteria", settings("criteria")))
    joint = trained("joint", settings("joint"))
    assert any(key.startswith("criteria_encoder.pooler") for key in joint)
    assert not any(key.startswith("evidence_encoder.pooler") for key in joint)
    mean = settings("criteria", {"family": "architectures", "criteria": {"pooling": "mean"}})
    assert not any("encoder.pooler" in key for key in trained("criteria", mean))


def test_frozen_layers_and_a_frozen_encoder_are_not_trained():
    some = trained("criteria", settings("criteria", {"freeze_layers": 1}))
    assert not any(".layer.0." in key or ".embeddings." in key for key in some)
    assert any(".layer.1." in key for key in some)
    none = trained("criteria", settings("criteria", {"freeze_encoder": True}))
    assert none == {"classifier.output_layer.weight", "classifier.output_layer.bias"}


def test_original_compat_reports_the_mean_of_batch_means():
    sums = {"batch_loss": 3.0, "batches": 2.0}
    rows = {"probabilities": np.array([[0.2, 0.8], [0.9, 0.1]]), "labels": np.array([1, 0])}
    assert metrics.compute(sums, rows, settings("criteria", compat="original"))["loss"] == 1.5
    assert "loss" not in metrics.compute({}, rows, settings("criteria"))


def test_original_compat_follows_the_originals_schedule():
    config = settings("criteria", compat="original", train={"steps": 8}, optim={"schedule": {"name": "linear"}})
    factor = TASKS["criteria"].schedule(config, None, 4)
    assert [factor(step) for step in range(8)] == pytest.approx([1 - (k + k // 4) / 8 for k in range(8)])
    assert TASKS["criteria"].schedule(settings("criteria"), "given", 4) == "given"


@pytest.mark.parametrize("case", table("misc_tables")["dataloader_kwargs"])
def test_dataloader_options_are_the_originals(case, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: case["cpu_count"])
    assert criteria_evidence.get_optimal_dataloader_kwargs(case["device"], **case["args"]) == case["result"]


@pytest.mark.parametrize(("arguments", "steps"), table("misc_tables")["compute_total_steps"])
def test_total_steps_are_the_originals(arguments, steps):
    assert torch_compat.compute_total_steps(*arguments) == steps


def test_the_facade_offers_the_originals_names():
    import jaxtrain.systems.criteria_evidence as system

    datasets = ("CriteriaDataset", "EvidenceDataset", "JointDataset", "ShareDataset")
    loading = ("get_device", "get_optimal_dataloader_kwargs", "random_split_indices", "set_seed")
    for name in (*datasets, *loading, "compute_total_steps", "criterion_text", "criterion_texts"):
        assert callable(getattr(system, name))
    with pytest.raises(AttributeError):
        system.no_such_name  # noqa: B018


@pytest.mark.parametrize("compat", ["correct", "original"])
def test_family_base_learns_whether_evidence_is_there(compat):
    config = settings("evidence", {"family": "base"}, compat=compat)
    task, batch = TASKS["evidence"], batch_of("evidence", config, 40)
    assert set(batch["labels"]) == {0, 1}
    assert "start_positions" not in batch
    lengths = batch["attention_mask"].sum(1)
    shorter = lengths[batch["labels"] == 1].max() < lengths[batch["labels"] == 0].min()
    assert shorter == (compat == "original")  # the original shows the evidence alone where there is some
    model = task.build_model(config, nnx.Rngs(0))
    value = task.loss(model, jax.tree.map(jnp.asarray, batch), config, None).value
    assert float(value) == pytest.approx(np.log(2), abs=0.3)
    rows = task.eval_statistics(task.outputs(model, batch), batch, config).rows
    assert {"accuracy", "f1_macro"} <= set(task.compute({}, rows, config))
