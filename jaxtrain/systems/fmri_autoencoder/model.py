"""Builds the model of a config; the class of its options decides the generation."""

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.config import HeadOptions
from jaxtrain.systems.fmri_autoencoder.gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.head import MultimodalAutoencoder


def build_model(config, rngs):
    """Return the autoencoder with newly drawn weights.

    Raises UserError if model.batch_norm_groups does not divide the micro-batch.
    """
    options = config.model
    micro_batch = config.data.batch_size // config.train.accumulate_steps
    if micro_batch % options.batch_norm_groups:
        raise UserError(
            f"model.batch_norm_groups: {options.batch_norm_groups} does not divide the {micro_batch} samples of a "
            "micro-batch; 1 normalises over all of them"
        )
    if isinstance(options, HeadOptions):
        return MultimodalAutoencoder(options, statistics_twice=config.compat == "original", rngs=rngs)
    return SherlockAutoencoder(options, rngs=rngs)
