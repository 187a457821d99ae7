"""Load a torch state dict into a program, as the torch module that it trains would load it."""

from collections.abc import Mapping
from typing import Any

import jax

from torch_bridge import state_dict as bridge
from torch_bridge.layouts import named_variables


def load(
    program: Any, state: Mapping[str, Any], strict: bool = True, source: str = "the state dict"
) -> tuple[list[str], list[str]]:
    """Load weights, and the extra states of a user's torch module; return the missing and unexpected keys.

    state: torch key -> tensor, array or LazyArray. The module's own load hooks run on it first. Raises
    StateDictMismatch, which names `source`, if it does not fit.
    """
    module = torch_module(program)
    if module is None:
        return program.load_state_dict(state, strict, source)
    from torch_bridge.training import own_loading

    state = bridge.without_wrappers(state, dict(named_variables(shapes(program))))
    taken = own_loading.extra_keys(module)
    extra = {key: state[key] for key in taken if key in state}
    if own_loading.has_own_loading(module):
        now = program.state
        present = bridge.state_dict(program.model_def.merge(now.params, now.frozen, now.buffers))
        twin = program.task.twin.build(program.config)
        loaded, missing, unexpected = own_loading.as_loaded(twin, present, state, strict, source)
        program.load_state_dict(loaded, False, source)
    else:
        lacking = [key for key in taken if key not in state]
        if strict and lacking:
            raise bridge.StateDictMismatch(bridge.explain(lacking, [], [], source))
        tensors = bridge.with_versions(
            {key: value for key, value in state.items() if key not in extra}, bridge.versions(state)
        )
        missing, unexpected = program.load_state_dict(tensors, strict, source)
        missing = [*missing, *lacking]
    own_loading.set_extra_states(module, extra)
    return missing, unexpected


def with_extra_states(program: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with what a user's torch module has besides tensors: extra states and format versions."""
    module = torch_module(program)
    if module is None:
        return state
    from torch_bridge.training.own_loading import complete

    return complete(module, state)


def torch_module(program: Any) -> Any:
    """Return the user's torch module; None if there is none."""
    return None if program.task.twin is None else program.task.twin.module


def shapes(program: Any) -> Any:
    """Return the model without arrays: flax modules are reference cycles, which would keep old arrays alive."""
    state = program.state
    parts = jax.eval_shape(lambda: (state.params, state.frozen, state.buffers))
    return program.model_def.merge(*parts)
