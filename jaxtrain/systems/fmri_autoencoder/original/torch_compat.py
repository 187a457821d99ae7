"""The original's names, for scripts that change only their imports. Training itself runs in JAX."""

import os
import pathlib
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.fmri_autoencoder.original.legacy_config import HEAD_ONLY
from jaxtrain.systems.fmri_autoencoder.torch_blocks import Autoencoder
from jaxtrain.systems.fmri_autoencoder.torch_gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.torch_head import MultimodalAutoencoder, MultimodalEncoder
from jaxtrain.systems.fmri_autoencoder.video import frames_per_volume


def create_autoencoder(
    video_height: int = 90,
    video_width: int = 160,
    audio_mels: int | None = None,
    text_dim: int = 1024,
    n_voxels: int = 85810,
    bottleneck_dim: int | None = None,
    reconstruction_weight: float = 1.0,
    fmri_weight: float = 1.0,
    use_encodec: bool | None = None,
    audio_frames_per_tr: int | None = None,
    gradient_checkpointing: bool | None = None,
    frame_skip: int | None = None,
    fps: float | None = None,
    tr: float | None = None,
    *,
    generation: str | None = None,
    **options: Any,
) -> Autoencoder:
    """Return the original's model as a torch.nn.Module; without options, the README's 1,974,067,762 parameters.

    generation: `gen1` or `head`; if left out, any of use_encodec .. tr, which only the second generation has, selects
    it. What is left out takes the generation's default: audio_mels 128 or 2048, bottleneck_dim 8000 or 2048,
    use_encodec False, audio_frames_per_tr 65, gradient_checkpointing False, frame_skip 2, fps 25, tr 1.5. frame_skip,
    fps and tr determine video_frames_per_tr. options: further ones of the model. Under `with torch.device("meta")` it
    can be counted without being allocated, and a Trainer draws its weights on the devices.
    """
    later = {
        "use_encodec": use_encodec,
        "audio_frames_per_tr": audio_frames_per_tr,
        "gradient_checkpointing": gradient_checkpointing,
        "frame_skip": frame_skip,
        "fps": fps,
        "tr": tr,
    }
    later = {name: value for name, value in later.items() if value is not None}
    generation = generation or ("head" if later or HEAD_ONLY & set(options) else "gen1")
    if generation not in ("gen1", "head"):
        raise UserError(f"create_autoencoder: generation is {generation!r}, wanted gen1 or head")
    sizes = {"audio_mels": audio_mels, "bottleneck_dim": bottleneck_dim}
    options |= {name: value for name, value in sizes.items() if value is not None}
    options |= {"video_height": video_height, "video_width": video_width, "text_dim": text_dim, "n_voxels": n_voxels}
    options |= {"reconstruction_weight": reconstruction_weight, "fmri_weight": fmri_weight}
    if generation == "gen1":
        return SherlockAutoencoder(**options, **later)
    clock = [later.pop(name, default) for name, default in (("fps", 25.0), ("tr", 1.5), ("frame_skip", 2))]
    options.setdefault("video_frames_per_tr", frames_per_volume(*clock))
    return MultimodalAutoencoder(**options, **later)


def create_encoder(
    video_height: int = 90,
    video_width: int = 160,
    audio_mels: int = 2048,
    text_dim: int = 1024,
    n_voxels: int = 85810,
    bottleneck_dim: int = 2048,
) -> MultimodalEncoder:
    """Return the second generation's encoder. That of the first is SherlockEncoder, with the same parameters."""
    return MultimodalEncoder(
        video_height,
        video_width,
        audio_mels,
        text_dim=text_dim,
        n_voxels=n_voxels,
        bottleneck_dim=bottleneck_dim,
    )


def create_model_summary(model: torch.nn.Module, output_path: str | pathlib.Path | None = None) -> str:
    """Return a line per parameter with its name, shape and size, and the totals; write it to output_path too."""
    named = list(model.named_parameters())
    trained = sum(p.numel() for _, p in named if p.requires_grad)
    width = max((len(name) for name, _ in named), default=0)
    lines = [f"{name:<{width}}  {tuple(p.shape)!s:<20} {p.numel():>14,}" for name, p in named]
    total = sum(p.numel() for _, p in named)
    text = "\n".join([*lines, f"parameters: {total:,}, of which {trained:,} are trained"])
    if output_path is not None:
        pathlib.Path(output_path).write_text(text + "\n")
    return text


def prepare_for_distributed(model, device_ids=None, output_device=None, find_unused_parameters=False):
    """Return the model unchanged: Trainer spreads it over the devices."""
    return model


def setup_distributed(rank: int | None = None, world_size: int | None = None, backend: str = "nccl") -> None:
    """Join the other processes: the launcher's, else the `world_size` of this machine, of which this one is `rank`.

    MASTER_ADDR and MASTER_PORT default to localhost and 12355, as in the original. backend: not used.
    """
    from jaxtrain.runtime import launch

    launched = launch.detect()
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "12355")
    if launched.processes == 1 and world_size is not None and world_size > 1:
        variables = {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
        variables |= {name: str(world_size) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        launched = launch.detect({**os.environ, **variables})
    launch.setup_distributed(launched)


def cleanup_distributed() -> None:
    from jaxtrain.runtime import launch

    launch.cleanup_distributed()
