"""Settings of the digits task."""

from typing import Literal

from pydantic import Field

from jaxtrain.config import MOST_LAYERS, DataConfig, Section


class Model(Section):
    patch_size: int = Field(default=2, ge=1)  # pixels; images are 8 x 8
    embed_dim: int = Field(default=64, ge=1)
    depth: int = Field(default=4, ge=1, le=MOST_LAYERS)
    num_heads: int = Field(default=4, ge=1)
    mlp_ratio: float = Field(default=2.0, gt=0)
    dropout: float = Field(default=0.3, ge=0, lt=1)


class Data(DataConfig):
    source: Literal["torch", "numpy", "auto"] = "auto"  # auto: a torch Dataset if torch is installed
    validation_ratio: float = Field(default=0.2, gt=0, lt=1)
