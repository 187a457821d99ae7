"""Refuse a gradient that reaches an operator, or an argument, of which torch has no derivative, as torch does; JAX's
formula would give one."""

import functools
from collections.abc import Callable

from torch_bridge.lowering.operators.derivatives import underived

_OPERATORS = (
    "floor_divide.default",
    "floor_divide.Scalar",
    "remainder.Scalar_Tensor",
    "scatter.reduce",
    "scatter.value_reduce",
)
_ARGUMENTS = {  # position of the argument
    "igamma.default": 0,
    "igammac.default": 0,
    "special_zeta.default": 0,
    "nll_loss_forward.default": 2,
    "nll_loss2d_forward.default": 2,
    "nll_loss.default": 2,
    "nll_loss_nd.default": 2,
    "nll_loss2d.default": 2,
    "binary_cross_entropy.default": 2,
    "soft_margin_loss.default": 1,
}


def refuse(table: dict[str, Callable]) -> None:
    """Make the lowerings of these operators refuse the gradient."""
    for name in _OPERATORS:
        table[f"aten.{name}"] = _of_result(table[f"aten.{name}"], f"aten.{name}")
    for name, place in _ARGUMENTS.items():
        table[f"aten.{name}"] = _of_argument(table[f"aten.{name}"], f"aten.{name}", place)


def _reason(name: str, what: str) -> str:
    return f"torch has no derivative of {name}{what}, and a gradient reaches it: detach() it"


def _of_result(lower: Callable, name: str) -> Callable:
    @functools.wraps(lower)
    def lowered(call, *args, **kwargs):
        return underived(lower(call, *args, **kwargs), _reason(name, ""), *args, *kwargs.values())

    return lowered


def _of_argument(lower: Callable, name: str, place: int) -> Callable:
    @functools.wraps(lower)
    def lowered(call, *args, **kwargs):
        if len(args) > place and hasattr(args[place], "dtype"):
            fixed = underived(args[place], _reason(name, f" by its argument {place}"), args[place])
            args = (*args[:place], fixed, *args[place + 1 :])
        return lower(call, *args, **kwargs)

    return lowered
