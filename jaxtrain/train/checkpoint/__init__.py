"""Checkpoints of a run: atomic, verified, and readable by torch."""

from jaxtrain.lazy import lazy_attributes
from jaxtrain.train.checkpoint import orbax_logs

orbax_logs.leave_root_alone()  # before orbax is imported
__getattr__ = lazy_attributes(__name__, {"checkpoints": ("Checkpoints", "SaveError")})
