"""Re-export `jaxtrain.runtime.prng` under its old module name."""

from jaxtrain.runtime.prng import Rngs, initial_rngs

__all__ = ["Rngs", "initial_rngs"]
