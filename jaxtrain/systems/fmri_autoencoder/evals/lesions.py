"""Simulation of lesions: silence or scale bottleneck units or voxels, and decode again.

A lesion of the bottleneck changes the reconstructed film, sound and text and the predicted voxels. A lesion of voxels
asks which bottleneck the damaged brain would have had: the ridge solution that explains the changed voxels through the
model's own last layers. Everything is decoded from that bottleneck.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxtrain.errors import UserError


@dataclasses.dataclass(frozen=True)
class Lesion:
    """Lesion that multiplies the chosen places by `factor` (0 silences them). at: `bottleneck` units or `voxels`."""

    at: str
    places: Sequence[int]
    factor: float = 0.0

    def apply(self, values):
        """Return values [batch, width] with the lesion. Raises UserError for a place outside the width."""
        width = values.shape[1]
        wrong = [column for column in self.places if not -width <= column < width]
        if wrong:
            raise UserError(f"lesion: {self.at} {wrong[:4]} lie outside the {width} there are")
        return values.at[:, jnp.asarray(self.places, jnp.int32)].multiply(self.factor)


def decode(model, bottleneck) -> dict[str, jax.Array]:
    """Return video, audio, text and voxels [batch, ...] of a bottleneck, in evaluation mode."""
    video, audio, text = model.decode_only(bottleneck)
    return {"video": video, "audio": audio, "text": text, "fmri": model.encoder.bottleneck_to_voxels(bottleneck)}


def simulate(model, batch, lesion: Lesion, ridge: float = 1.0, steps: int = 20) -> dict[str, dict[str, jax.Array]]:
    """Return `intact` and `lesioned`, each with the bottleneck and what is decoded from it.

    batch: `video`, `audio`, `text` as the model takes them. For a lesion of voxels: ridge is how strongly the
    bottleneck is held near the intact one, steps how many Gauss-Newton steps fit it to the changed voxels.
    """
    bottleneck, voxels = model.encode_only(batch["video"], batch["audio"], batch["text"], return_voxels=True)
    if lesion.at == "bottleneck":
        changed = lesion.apply(bottleneck)
    elif lesion.at == "voxels":
        changed = explain(model, bottleneck, lesion.apply(voxels), ridge, steps)
    else:
        raise UserError(f"lesion: at is {lesion.at!r}, wanted bottleneck or voxels")
    return {name: {"bottleneck": b, **decode(model, b)} for name, b in (("intact", bottleneck), ("lesioned", changed))}


def explain(model, bottleneck, voxels, ridge: float = 1.0, steps: int = 20):
    """Return the bottleneck near the given one whose predicted voxels come closest to `voxels`.

    Minimises, per sample, |predict(b) - voxels|^2 + ridge |b - b0|^2 by conjugate-gradient Gauss-Newton steps, and
    keeps the best.
    """
    predict = model.encoder.bottleneck_to_voxels

    def one(start, target):
        function = lambda b: predict(b[None])[0]
        cost = lambda b: jnp.square(function(b) - target).sum() + ridge * jnp.square(b - start).sum()

        def step(carry, _):
            b, best, least = carry
            value, push = jax.linearize(function, b)
            pull = jax.linear_transpose(push, b)
            normal = lambda v: pull(push(v))[0] + ridge * v
            gradient = pull(value - target)[0] + ridge * (b - start)
            b = b - jax.scipy.sparse.linalg.cg(normal, gradient, maxiter=50)[0]
            now = cost(b)
            better = now < least
            return (b, jnp.where(better, b, best), jnp.where(better, now, least)), None

        (_, best, _), _ = jax.lax.scan(step, (start, start, cost(start)), length=steps)
        return best

    return jax.lax.map(lambda pair: one(*pair), (bottleneck, voxels))


def effects(intact: dict, lesioned: dict) -> dict[str, np.ndarray]:
    """Return how far each modality moved, per sample: root mean square difference, float32 [batch]."""
    moved = lambda a, b: np.sqrt(np.square(np.asarray(a) - np.asarray(b)).reshape(len(a), -1).mean(1))
    return {name: moved(intact[name], lesioned[name]) for name in ("video", "audio", "text", "fmri")}
