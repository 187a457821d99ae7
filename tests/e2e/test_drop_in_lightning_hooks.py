"""Callbacks and hooks around a compiled Lightning step: they see what Lightning shows them, and when."""

import pytest
import torch

from jaxtrain import UserError
from tests.e2e import test_drop_in_lightning as base
from tests.e2e.test_drop_in_lightning import Classifier, F, assert_same, callbacks, lightning, loader

pytestmark = pytest.mark.slow

seen: list = []


def both(make, folder, *make_callbacks, **options) -> list[list]:
    """Train under both; what `seen` has got from each."""
    found, modules = [], []
    for name in base.ENGINES:
        seen.clear()
        modules.append(make())
        made = base.trainer(name, folder / name, *(one() for one in make_callbacks), **options)
        made.fit(modules[-1], loader(16), loader(32))
        found.append(list(seen))
    assert_same(*modules)
    return found


class BeforeZeroGrad(Classifier):
    """Averages its weights where gradients are cleared, as momentum encoders do."""

    def __init__(self):
        super().__init__()
        self.slow = torch.nn.Linear(16, 3).requires_grad_(False)

    def on_before_zero_grad(self, optimizer):
        seen.append(self.global_step)
        for slow, own in zip(self.slow.parameters(), self.head.parameters(), strict=True):
            slow.data.lerp_(own.data, 0.1)

    def training_step(self, batch, batch_idx):
        target = self.slow(self.body(batch[0])).detach()
        return super().training_step(batch, batch_idx) + F.mse_loss(self(batch[0]), target)


def test_on_before_zero_grad_is_called_between_forward_and_update(tmp_path):
    theirs, mine = both(BeforeZeroGrad, tmp_path)
    assert mine == theirs == list(range(12))


def test_a_checkpoint_counts_the_cleared_gradients_as_lightnings(tmp_path):
    both(Classifier, tmp_path, accumulate_grad_batches=2)
    counts = []
    for name in base.ENGINES:
        newest = max((tmp_path / name / "kept").iterdir(), key=lambda path: path.stat().st_mtime)
        loops = torch.load(newest, weights_only=False)["loops"]["fit_loop"]
        counts.append(loops["epoch_loop.automatic_optimization.optim_progress"])
    assert counts[0] == counts[1]


class Gradients(callbacks.Callback):
    def on_train_batch_end(self, trainer, module, *more):
        self.keep(module)

    def keep(self, module):
        seen.append(float(module.head.weight.grad.norm()))


def test_a_hook_between_steps_that_reads_gradients_sees_lightnings(tmp_path):
    theirs, mine = both(Classifier, tmp_path, Gradients)
    assert mine == pytest.approx(theirs, rel=1e-4)


def reads_weights():
    return callbacks.LambdaCallback(
        on_train_batch_end=lambda trainer, module, *_: seen.append(float(module.head.weight.sum()))
    )


def test_a_function_of_a_lambda_callback_sees_the_newest_weights(tmp_path):
    theirs, mine = both(Classifier, tmp_path, reads_weights)
    assert mine == pytest.approx(theirs, rel=1e-4)


def test_lightnings_own_average_follows_every_step(tmp_path):
    both(Classifier, tmp_path, lambda: callbacks.EMAWeightAveraging(decay=0.8))


class RefusedHalfway(Classifier):
    """Branches on a value in the second half of an update."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if batch_idx == 3 and loss > 0 else loss


def test_gradients_that_wait_are_kept_where_a_later_step_is_no_program(tmp_path):
    both(RefusedHalfway, tmp_path, accumulate_grad_batches=2)


def test_a_second_fit_goes_on_where_the_first_ended(tmp_path):
    modules = []
    for name in base.ENGINES:
        module, made = Classifier(), base.trainer(name, tmp_path / name, max_epochs=1)
        made.fit(module, loader(16), loader(32))
        made.fit_loop.max_epochs = 3
        made.fit(module, loader(16), loader(32))
        assert made.global_step == 12
        modules.append(module)
    assert_same(*modules)


class NewOptimizer(Classifier):
    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), 0.1)]


def test_an_optimizer_that_a_hook_puts_in_is_the_one_that_moves(tmp_path):
    both(NewOptimizer, tmp_path)


def test_a_module_that_torch_compile_has_wrapped_is_compiled_by_xla(tmp_path):
    plain, wrapped = Classifier(), Classifier()
    base.trainer("lightning", tmp_path / "a").fit(plain, loader(16), loader(32))
    made = base.trainer("jaxtrain", tmp_path / "b")
    made.fit(torch.compile(wrapped, backend="eager"), loader(16), loader(32))
    assert_same(plain, wrapped)
    assert made.fit_loop.epoch_loop.automatic_optimization.step is not None


def test_a_learning_rate_finder_finds_lightnings_and_leaves_the_weights(tmp_path):
    modules, found = [], []
    for name in base.ENGINES:
        module, made = Classifier(), base.trainer(name, tmp_path / name, max_epochs=2)
        finder = lightning.pytorch.tuner.Tuner(made).lr_find(module, loader(16), num_training=12, min_lr=1e-4)
        made.fit(module, loader(16))
        modules.append(module)
        found.append(finder.results["loss"])
    assert_same(*modules)
    assert found[1] == pytest.approx(found[0], rel=1e-4)


def test_a_module_of_the_other_lightning_package_is_refused_in_one_sentence(tmp_path):
    other = pytest.importorskip("pytorch_lightning")
    kind = type("Module", (other.LightningModule,), {"training_step": lambda *_: None})
    with pytest.raises(UserError, match="Module is of the package pytorch_lightning"):
        base.trainer("jaxtrain", tmp_path).fit(kind(), loader(8))


class Descends(Classifier):
    """Moves by its gradients' size, which AdamW does not."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Clips(callbacks.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        trainer.gradient_clip_val = [0.2, None, 0.05 / (1 + batch_idx)][trainer.current_epoch]


def test_a_limit_of_gradients_that_a_callback_sets_counts(tmp_path):
    both(Descends, tmp_path, Clips)


def test_accumulation_that_a_callback_schedules_counts(tmp_path):
    both(Descends, tmp_path, lambda: callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4}))


class BringsCallback(Classifier):
    def configure_callbacks(self):
        return [BeforeStep()]


class BeforeStep(callbacks.Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        seen.append(float(module.head.weight.grad.norm()))


def test_a_modules_own_callback_that_reads_gradients_sees_lightnings(tmp_path):
    theirs, mine = both(BringsCallback, tmp_path)
    assert mine == pytest.approx(theirs, rel=1e-4)


class ClipsByValue(callbacks.Callback):
    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            trainer.gradient_clip_val, trainer.gradient_clip_algorithm = 0.01, "value"


def test_clipping_by_value_from_the_second_epoch_on_counts(tmp_path):
    both(Descends, tmp_path, ClipsByValue)
