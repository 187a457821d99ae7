"""Metrics of set completion: over all tokens, over whole sets, and over the hidden tokens."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

from jaxtrain.metrics import ratio
from jaxtrain.systems.set_completion.losses import multi_hot, shown
from jaxtrain.systems.set_completion.readers import Corpus
from jaxtrain.task import Statistics


def eval_statistics(outputs, batch, config) -> Statistics:
    """Return the sums that `compute` needs from logits [batch, token]; a token is predicted if its logit is >= 0."""
    logits, size = outputs["logits"], outputs["logits"].shape[1]
    target = multi_hot(shown({"inputs": batch["targets"]}, config.model.padding), size) > 0
    visible_ids = shown(batch, config.model.padding)
    visible = multi_hot(visible_ids, size) > 0
    counted = (batch["valid"] & (visible_ids >= 0).any(1))[:, None]
    return Statistics(sums=counts(logits, target, visible, counted))


def counts(logits, target, visible, counted) -> dict:
    """Return additive counts. logits: float, target, visible: bool, all [batch, token]; counted: bool [batch, 1]."""
    predicted = (logits >= 0) & counted
    target = target & counted
    hit = predicted & target
    union = (predicted | target).sum(1)
    hidden = target & ~visible
    number = hidden.sum(1)
    score = jnp.where(visible, -jnp.inf, logits)
    ranked = -jnp.sort(-score, axis=1)  # the first n are the guesses, n = number of hidden tokens
    worst = jnp.take_along_axis(ranked, jnp.maximum(number - 1, 0)[:, None], axis=1)
    hits = (hidden & (score >= worst)).sum(1)
    return {
        "hit": hit.sum().astype(jnp.float32),
        "predicted": predicted.sum().astype(jnp.float32),
        "target": target.sum().astype(jnp.float32),
        "wrong": ((predicted != target) & counted).sum().astype(jnp.float32),
        "cells": (counted.sum() * logits.shape[1]).astype(jnp.float32),
        "exact": (((predicted == target).all(1)) & counted[:, 0]).sum().astype(jnp.float32),
        "jaccard": jnp.where(counted[:, 0], hit.sum(1) / jnp.maximum(union, 1), 0.0).sum(),
        "found": hits.sum().astype(jnp.float32),
        "hidden": number.sum().astype(jnp.float32),
        "sets": counted.sum().astype(jnp.float32),
    }


def compute(sums, rows, config) -> dict[str, float]:
    """Return precision, recall, f1, hamming (share of wrong cells) over all tokens; exact_match, jaccard over sets.

    completion (R-precision): share of the n hidden tokens that are among the model's n best tokens not shown. A
    division by zero gives 0, like scikit-learn's zero_division=0.
    """
    return {
        "precision": ratio(sums["hit"], sums["predicted"]),
        "recall": ratio(sums["hit"], sums["target"]),
        "f1": ratio(2 * sums["hit"], sums["predicted"] + sums["target"]),
        "hamming": ratio(sums["wrong"], sums["cells"]),
        "exact_match": ratio(sums["exact"], sums["sets"]),
        "jaccard": ratio(sums["jaccard"], sums["sets"]),
        "completion": ratio(sums["found"], sums["hidden"]),
    }


def frequency_logits(train: Corpus, vocab_size: int, weapons: int) -> np.ndarray:
    """Return the frequency baseline, which ignores the visible tokens: log odds [weapon, token], add-one smoothed."""
    counts = np.zeros((weapons, vocab_size))
    rows, columns = np.nonzero(train.tokens >= 0)
    np.add.at(counts, (train.weapons[rows, 0], train.tokens[rows, columns]), 1)
    share = (counts + 1) / (np.bincount(train.weapons[:, 0], minlength=weapons)[:, None] + 2)
    return np.log(share / (1 - share)).astype(np.float32)


def baseline(train: Corpus, columns: dict, config) -> dict[str, float]:
    """Return the metrics of the frequency baseline on the columns of a split."""
    logits = frequency_logits(train, config.model.vocab_size, config.model.weapon_vocab_size)
    batch = {**columns, "valid": np.ones(len(columns["weapon"]), bool)}
    outputs = {"logits": jnp.asarray(logits[columns["weapon"][:, 0]])}
    sums = {name: np.asarray(value) for name, value in eval_statistics(outputs, batch, config).sums.items()}
    return compute(sums, {}, config)


Probability = Callable[[list[int], list[str], list[str]], np.ndarray]


def rule_probability(probabilities: Callable, vocabulary: dict[str, int]) -> Probability:
    """Return the function for `synthetic.rule_recovery`: the probability of a token given a weapon and a shown token.

    probabilities: (ids [rule, 1], weapons [rule, 1]) -> [rule, token].
    """

    def ask(weapons, seen, tokens):
        ids = np.array([[vocabulary[token]] for token in seen], np.int32)
        p = np.asarray(probabilities(ids, np.array(weapons, np.int32)[:, None]))
        return p[np.arange(len(tokens)), [vocabulary[token] for token in tokens]]

    return ask
