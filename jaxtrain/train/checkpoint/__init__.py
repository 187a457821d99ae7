"""Checkpoints of a run: atomic, verified, and readable by torch."""

from jaxtrain.lazy import lazy_attributes

__getattr__ = lazy_attributes(__name__, {"checkpoints": ("Checkpoints", "SaveError")})
