"""What each routing strategy sees."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.systems.memory_lm import decoding
from jaxtrain.systems.memory_lm.banks import quantize_memory_for_deployment
from jaxtrain.systems.memory_lm.router import ChapterRouter, prefix_mean, rolling_mean, router_losses
from tests.unit.memory_lm.models import ids, logits, small, strategy


@pytest.mark.parametrize("name", ["token", "prefix"])
def test_a_later_token_changes_no_earlier_logit(name):
    model, tokens = small(**strategy(name)), ids()
    changed = tokens.at[:, -2:].set(1)
    np.testing.assert_allclose(logits(model, tokens)[:, :-2], logits(model, changed)[:, :-2], atol=1e-6)


def test_sequence_routing_looks_ahead_as_the_original_does():
    model, tokens = small(**strategy("sequence")), ids()
    before, after = logits(model, tokens), logits(model, tokens.at[:, -2:].set(1))
    assert float(jnp.abs(before - after)[:, :-2].max()) > 1e-3


@pytest.mark.parametrize("name", ["token", "prefix"])
def test_decoding_with_a_cache_equals_the_whole_sequence_at_once(name):
    model, tokens = small(**strategy(name)), np.asarray(ids(1, 6))
    trace = decoding.greedy_trace(model, tokens, np.ones((1, 6), bool), 5)
    whole = logits(model, jnp.asarray(np.concatenate([tokens, trace.tokens], axis=1)))
    for i, step in enumerate(trace.step_logits):
        np.testing.assert_allclose(step, whole[:, 6 + i], atol=1e-5)


@pytest.mark.parametrize("name", ["sequence", "sequence-rolling"])
def test_mask_aware_pooling_keeps_padding_out_of_the_logits(name):
    model, tokens = small(mask_aware_pooling=True, **strategy(name)), ids(1, 8)
    mask = jnp.asarray([[1] * 6 + [0] * 2])
    other = tokens.at[:, 6:].set(1)
    np.testing.assert_allclose(logits(model, tokens, mask)[:, :6], logits(model, other, mask)[:, :6], atol=1e-6)
    np.testing.assert_allclose(logits(model, tokens, mask)[:, :6], logits(model, tokens[:, :6]), atol=1e-5)


@pytest.mark.parametrize("name", ["sequence", "token", "prefix", "rolling"])
def test_a_left_padded_prompt_has_finite_logits_everywhere(name):
    mask = jnp.asarray([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    assert bool(jnp.isfinite(logits(small(**strategy(name)), ids(2, 6), mask)).all())


def test_the_original_gives_nan_for_a_left_padded_row():
    mask = jnp.asarray([[0, 0, 0, 1, 1, 1]])
    assert bool(jnp.isnan(logits(small(guard=False), ids(1, 6), mask)).any())


def test_one_chapter_is_read_alike_by_joint_and_independent_softmax():
    options = {"num_shared_chapters": 0, "top_k_chapters": 1}
    joint, apart = small(**options), small(chapter_softmax="independent", **options)
    np.testing.assert_allclose(logits(joint, ids()), logits(apart, ids()), atol=1e-5)


def test_an_independent_softmax_per_chapter_differs_from_a_joint_one():
    joint, apart = small(top_k_chapters=3), small(top_k_chapters=3, chapter_softmax="independent")
    assert float(jnp.abs(logits(joint, ids()) - logits(apart, ids())).max()) > 1e-3


def test_the_prefix_mean_restarts_with_every_document():
    hidden = jnp.arange(12, dtype=jnp.float32).reshape(1, 6, 2)
    starts = jnp.asarray([[0, 0, 0, 3, 3, 3]])
    means = prefix_mean(hidden, starts=starts)[0]
    np.testing.assert_allclose(means[0, 5], hidden[0, 3:].mean(0))
    np.testing.assert_allclose(means[0, 2], hidden[0, :3].mean(0))


@pytest.mark.parametrize("window", [1, 3, 20])
def test_the_rolling_mean_is_the_mean_of_window_means(window):
    hidden = np.random.default_rng(0).normal(size=(2, 7, 3)).astype(np.float32)
    wanted = np.mean([hidden[:, max(0, t - window + 1) : t + 1].mean(1) for t in range(7)], axis=0)
    np.testing.assert_allclose(rolling_mean(jnp.asarray(hidden), window), wanted, atol=1e-6)


def test_balance_terms_leave_out_rows_that_are_not_valid():
    router = ChapterRouter(8, 6, 2, rngs=nnx.Rngs(0))
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(4, 5, 8)), jnp.float32)
    some = router_losses(router(hidden), jnp.asarray([True, True, False, False]))
    alone = router_losses(router(hidden[:2]))
    for name, value in alone.items():
        np.testing.assert_allclose(some[name], value, rtol=1e-5, err_msg=name)


def test_balance_terms_of_no_row_are_zero():
    router = ChapterRouter(8, 6, 2, rngs=nnx.Rngs(0))
    terms = router_losses(router(jnp.ones((2, 3, 8))), jnp.zeros(2, bool))
    assert [float(value) for value in terms.values()] == [0.0] * 4


@pytest.mark.parametrize(("bits", "limit"), [(8, 0.02), (4, 0.2)])
def test_a_quantised_bank_changes_logits_by_little(bits, limit):
    model, tokens = small(**strategy("token")), ids()
    before = logits(model, tokens)
    after = logits(quantize_memory_for_deployment(model, bits), tokens)
    assert 0 < float(jnp.linalg.norm(after - before)) < limit * float(jnp.linalg.norm(before))


def test_a_bank_of_only_shared_chapters_is_read():
    model = small(num_shared_chapters=6, **strategy("token"))
    assert bool(jnp.isfinite(logits(model, ids())).all())
