"""Record the value checks of torch.distributions: if torch would refuse a value, the distribution becomes NaN.

A step whose results are not finite is left to torch, which raises its own error.
"""

import traceback
from collections.abc import Callable

import torch
from torch.distributions import Distribution, constraints

from torch_bridge.lowering.errors import source_line

_SUM = 1e-5  # tolerance of probabilities; torch's 1e-6 may be exceeded by another order of summation
_NO_AXES = torch.Size()
_begin = Distribution.__init__


def checked(lines: list[str]) -> tuple[Callable, Callable]:
    """Return replacements of Distribution.__init__ and _validate_sample. lines: receives the first one's callers."""

    def begin(self, batch_shape=_NO_AXES, event_shape=_NO_AXES, validate_args=None):
        _begin(self, batch_shape, event_shape, validate_args=False)
        self._validate_args = validate_args is not False
        if self._validate_args:
            lines.append(source_line("".join(traceback.format_stack()), own=True))
            for name, constraint in _constraints(self).items():
                if isinstance(vars(self).get(name), torch.Tensor):
                    _spoil_unless(_holds(constraint, vars(self)[name]), self)

    def look_at_sample(self, value):
        if not isinstance(value, torch.Tensor):
            raise ValueError("The value argument to log_prob must be a Tensor")
        try:
            support = self.support
        except NotImplementedError:  # torch warns, and goes on
            return
        _spoil_unless(_holds(support, value), self)

    return begin, look_at_sample


def _constraints(distribution: Distribution) -> dict:
    try:
        return distribution.arg_constraints
    except NotImplementedError:
        return {}


def _holds(constraint: constraints.Constraint, value: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor that is True if all numbers satisfy a constraint. Return None for constraints of matrices, which
    operators that may raise check, and for those that only NaN violates."""
    if constraints.is_dependent(constraint) or constraint is constraints.real or constraint.event_dim > 1:
        return None
    if constraint is constraints.simplex:
        return ((value >= 0).all(-1) & ((value.sum(-1) - 1).abs() < _SUM)).all()
    return constraint.check(value).all()


def _spoil_unless(holds: torch.Tensor | None, distribution: Distribution) -> None:
    if holds is None:
        return
    names = _constraints(distribution)
    for name, value in list(vars(distribution).items()):
        if isinstance(value, Distribution):
            _spoil_unless(holds, value)
        elif name in names and isinstance(value, torch.Tensor) and value.is_floating_point():
            setattr(distribution, name, torch.where(holds, value, torch.nan))
