"""Offer the random keys of `jaxtrain.runtime.prng` under the first version's name."""

from jaxtrain.runtime.prng import Rngs, initial_rngs

__all__ = ["Rngs", "initial_rngs"]
