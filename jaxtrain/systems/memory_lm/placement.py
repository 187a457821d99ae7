"""Which layers read memory, and from which bank."""

from jaxtrain.errors import UserError


def get_memory_layer_indices(memory, num_layers: int) -> list[int]:
    """Indices of the layers that read memory, ascending.

    memory: the `memory` section. Raises UserError for a placement that cannot be built.
    """
    if memory.vanilla_mode or not memory.use_memory_adapter:
        return []
    placement = memory.memory_layer_placement
    if placement == "all":
        return list(range(num_layers))
    if placement == "none":
        return []
    if placement == "first_k":
        return list(range(max(0, min(memory.memory_layer_k, num_layers))))
    if placement == "last_k":
        return list(range(num_layers - max(0, min(memory.memory_layer_k, num_layers)), num_layers))
    if placement == "every_n":
        if memory.memory_layer_n <= 0:
            raise UserError(f"memory.memory_layer_n: {memory.memory_layer_n}, wanted 1 or more for every_n")
        return list(range(0, num_layers, memory.memory_layer_n))
    if placement == "custom":
        if memory.memory_layer_indices is None:
            raise UserError("memory.memory_layer_indices: missing; placement custom needs it, as in [2, 6, 10, 14]")
        return sorted(i for i in memory.memory_layer_indices if 0 <= i < num_layers)
    raise UserError(f"memory.memory_layer_placement: {placement!r} is unknown")


def get_memory_bank_assignments(memory, layers: list[int]) -> dict[int, int]:
    """Memory layer -> number of its bank."""
    if memory.memory_sharing == "shared":
        return dict.fromkeys(layers, 0)
    if memory.memory_sharing == "per_layer":
        return {layer: i for i, layer in enumerate(layers)}
    if memory.memory_sharing == "every_k_layers":
        if memory.memory_sharing_k <= 0:
            raise UserError(f"memory.memory_sharing_k: {memory.memory_sharing_k}, wanted 1 or more")
        return {layer: i // memory.memory_sharing_k for i, layer in enumerate(layers)}
    raise UserError(f"memory.memory_sharing: {memory.memory_sharing!r} is unknown")
