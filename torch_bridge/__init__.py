"""Bridge between PyTorch and JAX. `layouts`, `state_dict` and `optimizer_state` need no torch."""

import importlib


def __getattr__(name: str):
    if name == "from_torch":  # `torch_bridge.from_torch(module, inputs)`: imports torch only on first use
        return importlib.import_module("torch_bridge.from_torch")
    raise AttributeError(f"module 'torch_bridge' has no attribute {name!r}")
