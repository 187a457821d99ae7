"""The original's names, for scripts that change only their imports. Training itself runs in JAX."""

import os
from typing import Any

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.original.legacy_config import HEAD_ONLY
from jaxtrain.systems.fmri_autoencoder.torch_blocks import Autoencoder
from jaxtrain.systems.fmri_autoencoder.torch_gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.torch_head import MultimodalAutoencoder
from jaxtrain.systems.fmri_autoencoder.video import frames_per_volume


def create_autoencoder(*sizes: int, generation: str | None = None, **options: Any) -> Autoencoder:
    """Return the original's model as a torch.nn.Module; without options, the README's 1,974,067,762 parameters.

    sizes: video_height, video_width, ..., in the order of the model's arguments. generation: `gen1` or `head`; if left
    out, any option that only the second generation has (use_encodec, frame_skip, ...) selects it. frame_skip, fps and
    tr determine video_frames_per_tr. Under `with torch.device("meta")` it can be counted without being allocated, and a
    Trainer draws its weights on the devices.
    """
    generation = generation or ("head" if HEAD_ONLY & set(options) else "gen1")
    if generation == "head":
        skip, fps, tr = options.pop("frame_skip", 2), options.pop("fps", 25.0), options.pop("tr", 1.5)
        options.setdefault("video_frames_per_tr", frames_per_volume(fps, tr, skip))
        return MultimodalAutoencoder(*sizes, **options)
    if generation != "gen1":
        raise UserError(f"create_autoencoder: generation is {generation!r}, wanted gen1 or head")
    return SherlockAutoencoder(*sizes, **options)


def prepare_for_distributed(model, device_ids=None, output_device=None, find_unused_parameters=False):
    """Return the model unchanged: Trainer spreads it over the devices."""
    return model


def setup_distributed(rank: int | None = None, world_size: int | None = None, backend: str = "nccl") -> None:
    """Join the other processes: the launcher's, else the `world_size` of this machine, of which this one is `rank`.

    MASTER_ADDR and MASTER_PORT default to localhost and 12355, as in the original. backend: not used.
    """
    from jaxtrain.runtime import launch

    found = launch.detect()
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    if found.processes == 1 and world_size is not None and world_size > 1:
        given = {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
        given |= {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        found = launch.detect({**os.environ, **given})
    launch.setup_distributed(found)


def cleanup_distributed() -> None:
    from jaxtrain.runtime import launch

    launch.cleanup_distributed()
