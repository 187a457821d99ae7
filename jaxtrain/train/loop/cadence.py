"""Decide when a run evaluates, saves and logs, and how many steps one compiled call runs."""

import math
from collections.abc import Iterator

from jaxtrain.config import TrainingConfig
from jaxtrain.optim.groups import boundaries

MOST_PROGRAMS = 4  # most different numbers of steps per call; each is compiled


class Cadence:
    """Steps, counted from 1, after which an evaluation, a checkpoint or a log line is due.

    evaluate_every, save_every: in steps; the last step counts too. None: never due, but the last step is always saved.
    """

    def __init__(self, config: TrainingConfig, steps_per_epoch: int, total_steps: int, has_validation: bool):
        evaluation, saving = config.evaluation, config.checkpoint
        self.config, self.total, self.has_validation = config, total_steps, has_validation
        self.steps_per_epoch = steps_per_epoch
        self.evaluate_every = _in_steps(evaluation.every_steps, evaluation.every_epochs, steps_per_epoch)
        self.save_every = _in_steps(saving.every_steps, saving.every_epochs, steps_per_epoch)

    def evaluation_due(self, step: int) -> bool:
        return self.has_validation and self._due(step, self.evaluate_every)

    def save_due(self, step: int) -> bool:
        return step == self.total or self._due(step, self.save_every)

    def log_due(self, step: int) -> bool:
        return self._due(step, self.config.train.log_every_steps)

    def calls(self, start: int, epochs_apart: bool = False) -> Iterator[tuple[int, int]]:
        """Yield (first step, count) of every call from step `start` on. A call has up to `steps_per_call` steps and
        ends where something is due: in equal parts if one count fits, else with a shorter rest, unless that would need
        too many different programs. epochs_apart: calls also end at the end of an epoch."""
        every = [self.evaluate_every, self.save_every, self.config.tracking.histograms_every_steps]
        every += [self.steps_per_epoch] if epochs_apart or boundaries(self.config.optim) else []
        step, most = start, _even(self.config.train.steps_per_call, [n for n in (*every, start, self.total) if n])
        sizes = {most}
        while step < self.total:
            boundary = min([self.total, *((step // n + 1) * n for n in every if n)])
            count = min(most, boundary - step)
            if count not in sizes and len(sizes) >= MOST_PROGRAMS:
                count = 1
            sizes.add(count)
            yield step, count
            step += count

    def _due(self, step: int, every: int | None) -> bool:
        return every is not None and (step % every == 0 or step == self.total)


def _even(most: int, boundaries: list[int]) -> int:
    """Return the largest number of steps up to `most` that divides all boundaries, if above `most` / 2; else `most`."""
    common = math.gcd(*boundaries)
    divisors = [n for n in range(most // 2 + 1, most + 1) if common % n == 0]
    return max(divisors, default=most)


def _in_steps(every_steps: int | None, every_epochs: int | None, steps_per_epoch: int) -> int | None:
    return every_steps or (every_epochs * steps_per_epoch if every_epochs else None)
