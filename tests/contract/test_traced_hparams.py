"""What a search varies most enters the compiled step as arrays."""

import jax
import numpy as np

from jaxtrain.runtime import traced_hparams
from jaxtrain.train.compilation.compile_key import code_of
from tests.contract.tasks import TASKS, each, tiny


@each(TASKS)
def test_runs_that_differ_in_numbers_have_one_code_and_one_program(name, tmp_path):
    first = tiny(name, tmp_path / "first", abstract=True)
    numbers = traced_hparams.given(first.config, first.task.traced_hparams)
    other = [f"{key}={value + 1 if key == 'seed' else value / 2:.6g}" for key, value in numbers.items()]
    rates = ["optim.lr=0.000321", "optim.weight_decay=0.0321"]
    second = tiny(name, tmp_path / "second", *rates, *other, abstract=True)
    assert code_of(first.program.resolved, first.task) == code_of(second.program.resolved, second.task)
    for one, another in zip(
        jax.tree.leaves(numbers), jax.tree.leaves(traced_hparams.given(second.config, numbers)), strict=True
    ):
        assert one != another
    texts = [t.program.train_step().jitted.lower(*t.program.abstract_arguments()).as_text() for t in (first, second)]
    assert texts[0] == texts[1]


def test_another_width_or_an_absent_dropout_is_other_code(tmp_path):
    codes = [
        code_of(made.program.resolved, made.task)
        for made in (
            tiny("digits.classify", tmp_path, *settings, abstract=True)
            for settings in (
                [],
                ["model.embed_dim=32"],
                ["model.dropout=0"],
                ["data.batch_size=48"],
                ["optim.clip_norm=null"],
            )
        )
    ]
    assert len(set(codes)) == len(codes)


def test_a_dropout_rate_that_is_an_array_drops_as_the_same_number_does():
    from jaxtrain import nn

    x = np.ones((64, 64), np.float32)
    drop = lambda rate: nn.Dropout(rate)(x, nn.Rngs(jax.random.key(3)))

    @jax.jit
    def dropped(rate):
        with traced_hparams.in_force({"model.dropout": rate}):
            return drop(traced_hparams.TracedFloat(0.9, "model.dropout"))

    for rate in (0.1, 0.5):
        np.testing.assert_allclose(dropped(np.float32(rate)), jax.jit(lambda rate=rate: drop(rate))(), rtol=1e-6)
