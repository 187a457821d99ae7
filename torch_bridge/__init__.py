"""The crossing between PyTorch and JAX. `layouts`, `state_dict` and `optimizer_state` need no torch."""
