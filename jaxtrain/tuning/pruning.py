"""Decide which runs of one program to end early, from their metrics at the same evaluation."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.tuning.space import Pruner


class Pruning:
    """Ends runs after an evaluation. Takes the settings of a study's pruner (`study.pruner` of a search space).

    asha: successive halving. After `min_evaluations` evaluations, and then at `reduction_factor` times the evaluations
    before, the best 1 in `reduction_factor` goes on. median: after `warmup_evaluations`, a run goes on if its best
    value so far is at least the median of the runs' values at this evaluation. Source: Jamieson and Talwalkar 2016;
    Golovin et al. 2017.
    """

    def __init__(self, settings: Pruner, metric: str, mode: str):
        if settings.name == "hyperband":
            raise UserError("pruner: hyperband is for trials one after another; runs in one program have asha, median")
        self.settings, self.metric, self.sign = settings, metric, 1.0 if mode == "max" else -1.0
        self._values: dict[int, list[float]] = {}  # of every run, higher is better

    def __call__(self, step: int, metrics: Mapping[int, Mapping[str, float]]) -> Iterable[int]:
        """Return the runs to end. metrics: of the runs that still train, by number."""
        for run, found in metrics.items():
            value = self.sign * found[self.metric]
            self._values.setdefault(run, []).append(value if math.isfinite(value) else -math.inf)
        if not metrics or self.settings.name == "none":
            return []
        count = len(self._values[next(iter(metrics))])
        return self._by_halving(metrics, count) if self.settings.name == "asha" else self._by_median(metrics, count)

    def _by_halving(self, training: Mapping[int, object], count: int) -> list[int]:
        rung = self.settings.min_evaluations
        while rung < count:
            rung *= self.settings.reduction_factor
        if rung != count:
            return []
        ranked = sorted(training, key=lambda run: max(self._values[run]), reverse=True)
        return ranked[-(-len(ranked) // self.settings.reduction_factor) :]

    def _by_median(self, training: Mapping[int, object], count: int) -> list[int]:
        if count <= self.settings.warmup_evaluations or len(self._values) <= self.settings.startup_trials:
            return []
        reached = [max(values[:count]) for values in self._values.values() if len(values) >= count]
        middle = float(np.median(reached))
        return [run for run in training if max(self._values[run]) < middle]
