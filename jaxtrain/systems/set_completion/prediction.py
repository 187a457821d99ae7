"""Predict token probabilities, by token name, with a trained model."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.set_completion.losses import run_model
from jaxtrain.systems.set_completion.masking import PADDING

MULTIPLE = 8  # pad contexts to a multiple of it, and rows to a power of two, so that few shapes are compiled


class Predictor:
    """Predictor of token probabilities. vocab: token -> id; weapon_vocab: "weapon_id_40" -> id; results in id order."""

    def __init__(self, model, vocab: Mapping[str, int], weapon_vocab: Mapping[str, int]):
        self.vocab, self.weapon_vocab = dict(vocab), dict(weapon_vocab)
        self.tokens = sorted(vocab, key=vocab.get)
        self._run = jax.jit(lambda ids, weapon: jax.nn.sigmoid(run_model(model, ids, weapon)[1]))

    def probabilities(self, contexts: Sequence[Sequence[str]], weapons: Sequence[str]) -> np.ndarray:
        """Return float32 [context, token] for one weapon per context. Raises UserError for unknown names."""
        unknown = {t for context in contexts for t in context if t not in self.vocab}
        unknown |= {weapon for weapon in weapons if weapon not in self.weapon_vocab}
        if unknown:
            raise UserError(f"not in the vocabulary: {', '.join(sorted(unknown))}")
        width = -(-max(1, *map(len, contexts)) // MULTIPLE) * MULTIPLE
        rows = 1 << (len(contexts) - 1).bit_length()
        ids = np.full((rows, width), PADDING, np.int32)
        weapon_ids = np.zeros((rows, 1), np.int32)
        for row, (context, weapon) in enumerate(zip(contexts, weapons, strict=True)):
            ids[row, : len(context)] = [self.vocab[token] for token in context]
            weapon_ids[row] = self.weapon_vocab[weapon]
        return np.asarray(self._run(ids, weapon_ids))[: len(contexts)]

    def predict(self, context: Sequence[str], weapon: str) -> dict[str, float]:
        """Return {token: probability} for one context."""
        return dict(zip(self.tokens, self.probabilities([context], [weapon])[0].tolist(), strict=True))

    def for_weapon(self, weapon: str):
        """Return a function of contexts for the argument `predict` of `reconstruct`."""

        def predict(contexts):
            rows = self.probabilities(contexts, [weapon] * len(contexts))
            return [dict(zip(self.tokens, row.tolist(), strict=True)) for row in rows]

        return predict
