"""Reject JAX settings (from code or environment) under which torch code cannot compute as in torch."""

import jax

from jaxtrain.errors import UserError

_WANTED = {
    "jax_disable_jit": ((False,), "a step is one compiled program"),
    "jax_numpy_rank_promotion": (("allow",), "torch's operators broadcast"),
    "jax_numpy_dtype_promotion": (("standard",), "torch's operators mix dtypes"),
    "jax_transfer_guard": ((None, "allow", "log", "log_explicit"), "every batch goes to the device"),
    "jax_transfer_guard_host_to_device": ((None, "allow", "log", "log_explicit"), "every batch goes to the device"),
    "jax_transfer_guard_device_to_host": ((None, "allow", "log", "log_explicit"), "losses and weights are read"),
}


def check() -> None:
    """Raise UserError for a JAX setting that training does not support."""
    for name, (wanted, reason) in _WANTED.items():
        value = getattr(jax.config, name)
        if value not in wanted:
            raise UserError(f"{name.upper()} is {value!r}, and {reason}: unset it ({name} too), or set {wanted[0]!r}")
