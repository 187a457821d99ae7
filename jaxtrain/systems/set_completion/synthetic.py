"""Synthetic corpus of legal builds with planted rules, so that it is known what a model should learn.

Every weapon has a few archetypes. An archetype is a main-only ability (its signature), a standard ability on the two
other mains (20 points), a partner ability on four subs (12 points), and five random subs. Therefore

    weapon, signature  ->  <main ability>_15 and <partner>_12, always

and another signature of the same weapon implies other tokens. A model that only knows token frequencies per weapon
cannot tell the archetypes apart; see `rule_recovery`.
"""

from typing import NamedTuple

import numpy as np

from jaxtrain.systems.set_completion.readers import Corpus, make_corpus
from jaxtrain.systems.set_completion.vocabulary import MAIN_AP, MAIN_ONLY, STANDARD, SUB_AP, tokenize_build

MAIN_SLOTS_OF_ABILITY, SUBS_OF_PARTNER, RANDOM_SUBS = 2, 4, 5


class Archetype(NamedTuple):
    weapon: int
    signature: str
    main: str
    partner: str

    @property
    def implied(self) -> tuple[str, str]:
        return f"{self.main}_15", f"{self.partner}_12"


class Rule(NamedTuple):
    """Planted rule: if a build of `weapon` has the token `seen`, it has `token` (holds) or does not (not holds)."""

    weapon: int
    seen: str
    token: str
    holds: bool


def archetypes(weapons: int, per_weapon: int, seed: int) -> list[Archetype]:
    """Return the archetypes; those of a weapon have different signatures, mains and partners."""
    result = []
    for weapon in range(weapons):
        generator = np.random.default_rng([seed, weapon])
        signatures = generator.permutation(MAIN_ONLY)[:per_weapon]
        families = generator.permutation(STANDARD)
        for i, signature in enumerate(signatures):
            main, partner = families[(2 * i) % len(families)], families[(2 * i + 1) % len(families)]
            result.append(Archetype(weapon, str(signature), str(main), str(partner)))
    return result


def planted_rules(planted: list[Archetype]) -> list[Rule]:
    """Return the rules: a signature implies its archetype's tokens and excludes those of the weapon's other ones."""
    rules = []
    for one in planted:
        for other in planted:
            if one.weapon == other.weapon:
                rules += [Rule(one.weapon, one.signature, t, t in one.implied) for t in other.implied]
    return rules


def generate(
    sets: int, weapons: int, per_weapon: int, seed: int, vocabulary: dict[str, int]
) -> tuple[Corpus, list[Archetype]]:
    """Return a corpus of legal 57-point builds, and the archetypes from which it was made."""
    planted = archetypes(weapons, per_weapon, seed)
    generator = np.random.default_rng([seed, weapons, sets])
    rows, ids = [], []
    for _ in range(sets):
        archetype = planted[generator.integers(len(planted))]
        points = {archetype.signature: MAIN_AP, archetype.main: MAIN_SLOTS_OF_ABILITY * MAIN_AP}
        subs = [archetype.partner] * SUBS_OF_PARTNER + list(generator.choice(STANDARD, RANDOM_SUBS))
        for ability in subs:
            points[str(ability)] = points.get(str(ability), 0) + SUB_AP
        rows.append(sorted(vocabulary[token] for token in tokenize_build(points)))
        ids.append(archetype.weapon)
    return make_corpus(rows, ids), planted


def rule_recovery(probability, planted: list[Archetype]) -> float:
    """Return the balanced accuracy of a model on the planted rules; ignoring the signature gives 0.5.

    It is the mean of the share of implied tokens with a probability of at least 0.5 and the share of excluded tokens
    below it. probability: (weapons [rule], seen tokens [rule], asked tokens [rule]) -> float [rule].
    """
    rules = planted_rules(planted)
    p = np.asarray(probability([r.weapon for r in rules], [r.seen for r in rules], [r.token for r in rules]))
    holds = np.array([rule.holds for rule in rules])
    implied = (p[holds] >= 0.5).mean()
    return float((implied + (p[~holds] < 0.5).mean()) / 2) if (~holds).any() else float(implied)
