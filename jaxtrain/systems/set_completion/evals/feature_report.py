"""Measure every feature of an autoencoder over a whole split; the dashboard shows the results."""

import dataclasses
from collections.abc import Iterator

import jax
import numpy as np

from jaxtrain.data.sources import ArraySource
from jaxtrain.systems.set_completion import features
from jaxtrain.systems.set_completion.data import vocabulary_of, weapons_of
from jaxtrain.systems.set_completion.losses import shown
from jaxtrain.systems.set_completion.sae import token_influence
from jaxtrain.systems.set_completion.vocabulary import PAD

CHUNK = 1024
BINS = 24


@dataclasses.dataclass(frozen=True)
class Feature:
    """Measurements of one feature. density: share of sets that activate it. histogram: counts of its positive values in
    BINS steps up to peak. examples: (value, weapon, tokens shown) of the sets that activate it most. raises, lowers:
    (token, change of its logit per unit)."""

    number: int
    density: float
    mean: float
    peak: float
    usage: float
    histogram: tuple[int, ...]
    examples: list[tuple[float, str, list[str]]]
    raises: list[tuple[str, float]]
    lowers: list[tuple[str, float]]


@dataclasses.dataclass(frozen=True)
class FeatureReport:
    metrics: dict[str, float]
    sets: int
    alive: int
    dead: int
    features: list[Feature]  # by descending density, without dead ones


def measure(model, source: ArraySource, config, examples: int = 8, tokens: int = 8, most: int = 400) -> FeatureReport:
    """Run the model over every sample of `source` and describe its `most` densest features."""
    values, sums = [], {}
    step = jax.jit(lambda batch: _measure_batch(model, batch, config))
    for batch, count in _batches(source):
        h, outputs = jax.device_get(step(batch))
        values.append(h[:count])
        sums = {name: sums.get(name, 0) + np.asarray(value, np.float64) for name, value in outputs.items()}
    h = np.concatenate(values)
    influence = np.asarray(token_influence(model.primary.output_layer.weight[...], model.sae))
    shown_ids = np.asarray(shown(source.columns, config.model.padding))
    names = _Names(config, shown_ids, source.columns["weapon"][:, 0])
    density = (h > 0).mean(0)
    order = np.argsort(-density, kind="stable")[: min(most, int((density > 0).sum()))]
    usage = np.asarray(model.sae.usage_ema[...])
    described = [_describe(int(i), h[:, i], usage[i], influence[:, i], names, examples, tokens) for i in order]
    alive = int((density > 0).sum())
    return FeatureReport(features.compute(sums, {}, config), len(h), alive, len(density) - alive, described)


def _measure_batch(model, batch, config):
    outputs = features.outputs(model, batch)
    return outputs["features"], dict(features.eval_statistics(outputs, batch, config).sums)


def _batches(source: ArraySource) -> Iterator[tuple[dict, int]]:
    for start in range(0, len(source), CHUNK):
        rows = np.minimum(np.arange(start, start + CHUNK), len(source) - 1)
        count = min(CHUNK, len(source) - start)
        yield {**source[rows], "valid": np.arange(CHUNK) < count, "index": rows.astype(np.int32)}, count


class _Names:
    def __init__(self, config, ids: np.ndarray, weapons: np.ndarray):
        self.tokens = _by_number(vocabulary_of(config))
        self.weapon_names = _by_number(weapons_of(config))
        self.ids, self.weapons = ids, weapons

    def example(self, row: int) -> tuple[str, list[str]]:
        shown_tokens = [self.tokens[i] for i in self.ids[row] if i >= 0]
        return self.weapon_names.get(int(self.weapons[row]), str(self.weapons[row])), shown_tokens


def _by_number(vocabulary: dict[str, int]) -> dict[int, str]:
    return {number: name for name, number in vocabulary.items()}


def _describe(number, h, usage, influence, names: _Names, examples: int, tokens: int) -> Feature:
    active = h[h > 0]
    peak = float(active.max())
    rows = [row for row in np.argsort(-h, kind="stable")[:examples] if h[row] > 0]
    effects = [
        (names.tokens[i], float(influence[i])) for i in np.argsort(-influence) if names.tokens.get(i, PAD) != PAD
    ]
    return Feature(
        number=number,
        density=len(active) / len(h),
        mean=float(active.mean()),
        peak=peak,
        usage=float(usage),
        histogram=tuple(int(n) for n in np.histogram(active, BINS, (0.0, peak))[0]),
        examples=[(float(h[row]), *names.example(row)) for row in rows],
        raises=effects[:tokens],
        lowers=effects[::-1][:tokens],
    )
