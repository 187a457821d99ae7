"""Base classes of both generations: a decoder's trunk and heads, an autoencoder's forward pass and methods."""

from typing import Any

import jax
from flax import nnx

from jaxtrain.systems.fmri_autoencoder.config import ModelOptions
from jaxtrain.systems.fmri_autoencoder.losses import internal_losses

KINDS = ("video", "audio", "text")


class Decoder(nnx.Module):
    """Decoder with a trunk of layers `layer<n>`, and for each kind `layer<n + 1>_<kind>` and `layer<n + 2>_<kind>`.

    trunk_layers: the numbers of the trunk's layers.
    """

    trunk_layers: tuple[int, ...] = ()

    def __call__(self, bottleneck, rngs=None, valid=None):
        """Return (video [batch, H*W*3], audio, text [batch, text_dim])."""
        x = self.trunk(bottleneck, rngs, valid)
        return self.head("video", x, rngs, valid), self.audio_head(x, rngs, valid), self.head("text", x, rngs, valid)

    def trunk(self, x, rngs=None, valid=None):
        for number in self.trunk_layers:
            x = getattr(self, f"layer{number}")(x, rngs, valid)
        return x

    def branch(self, kind: str, x, rngs=None, valid=None):
        return getattr(self, f"layer{self.trunk_layers[-1] + 1}_{kind}")(x, rngs, valid)

    def last(self, kind: str):
        return getattr(self, f"layer{self.trunk_layers[-1] + 2}_{kind}")

    def head(self, kind: str, x, rngs=None, valid=None):
        return self.last(kind)(self.branch(kind, x, rngs, valid))

    def audio_head(self, x, rngs=None, valid=None):
        return self.head("audio", x, rngs, valid)


class Autoencoder(nnx.Module):
    """Autoencoder: an `encoder` of (video, audio, text) to bottleneck and voxels, a `decoder` back, and `options`."""

    encoder: Any
    decoder: Any
    options: ModelOptions

    def __call__(self, video, audio, text, fmri_target=None, *, rngs=None, valid=None) -> dict[str, jax.Array]:
        bottleneck, voxels = self.encoder(video, audio, text, rngs, valid)
        recon = self.decoder(bottleneck, rngs, valid)
        outputs = {"bottleneck": bottleneck, "predicted_fmri": voxels}
        outputs |= dict(zip((f"{kind}_recon" for kind in KINDS), recon, strict=True))
        if rngs is not None:
            outputs |= internal_losses(outputs, video, audio, text, fmri_target, valid, self.options)
        return outputs

    def encode_only(self, video, audio, text, return_voxels: bool = False):
        """Return (bottleneck, voxels or None) in evaluation mode."""
        bottleneck, voxels = self.encoder(video, audio, text)
        return bottleneck, voxels if return_voxels else None

    def decode_only(self, bottleneck):
        """Return (video, audio, text) in evaluation mode."""
        return self.decoder(bottleneck)
