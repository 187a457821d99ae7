"""Find the modes around torch code that see or change every operation in it, of which a compiled one has none."""

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def watching() -> str:
    """Name the TorchFunctionModes and TorchDispatchModes that are on, such as FlopCounterMode, and hooks on saved
    tensors; "" for none. torch's default device is none of them."""
    found = [type(mode).__name__ for mode in _get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    found += [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        found.append("saved_tensors_hooks")
    return ", ".join(found)
