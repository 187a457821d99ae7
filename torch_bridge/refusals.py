"""Calls that cannot be captured, and whether the next one is tried: what a first call sets up, later ones find."""

from torch_bridge.lowering.errors import stays_in_torch

MOST = 8  # calls of one step or module that torch runs alone


class Refusals:
    """Count of refused calls.

    A call that cannot be captured may be one that sets something up: a mask of its size, weights or cluster centers
    from its batch, a list of parts. Torch runs it alone, and the next call is captured anew. If that cannot be
    captured either, or after `MOST` such calls, torch runs all later ones.
    """

    def __init__(self) -> None:
        self._count, self._last = 0, False

    def recorded(self) -> None:
        """Note that a call has run compiled."""
        self._last = False

    def again(self, error: BaseException | None) -> bool:
        """Count a refused call; return True if torch shall run it alone. error: the reason; None for changes."""
        again = not self._last and self._count < MOST and not stays_in_torch(error)
        self._count, self._last = self._count + 1, True
        return again
