"""Token probabilities of a trained model, by name."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.systems.set_completion.losses import run_model
from jaxtrain.systems.set_completion.masking import PADDING

MULTIPLE = 8  # contexts are padded to a multiple of it, rows to a power of two: few shapes, few compilations


class Predictor:
    """model, vocab (token -> id) and weapon_vocab ("weapon_id_40" -> id) -> probabilities by token, in id order."""

    def __init__(self, model, vocab: Mapping[str, int], weapon_vocab: Mapping[str, int]):
        self.vocab, self.weapon_vocab = dict(vocab), dict(weapon_vocab)
        self.tokens = sorted(vocab, key=vocab.get)
        self._run = jax.jit(lambda ids, weapon: jax.nn.sigmoid(run_model(model, ids, weapon)[1]))

    def probabilities(self, contexts: Sequence[Sequence[str]], weapons: Sequence[str]) -> np.ndarray:
        """float32 [context, token]: one weapon per context. Raises UserError for names that are not in the files."""
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
        """{token: probability} of one context."""
        return dict(zip(self.tokens, self.probabilities([context], [weapon])[0].tolist(), strict=True))

    def for_weapon(self, weapon: str):
        """The `predict` that `reconstruct` takes."""

        def predict(contexts):
            rows = self.probabilities(contexts, [weapon] * len(contexts))
            return [dict(zip(self.tokens, row.tolist(), strict=True)) for row in rows]

        return predict
