"""Count the shapes of batches, because each new shape is compiled."""

import logging
from typing import Any

TOLD = 8  # number of shapes at which a warning is logged
MANY, CALLS = 64, 70  # this many new shapes within this many calls: expect every further batch to have a new one

log = logging.getLogger(__name__)


class SeenShapes:
    """Count of the shapes of one step's batches. `endless`: nearly every call brings a new one."""

    def __init__(self) -> None:
        self._calls: dict[Any, int] = {}  # shapes -> the call that first brought them, in order
        self.endless = False

    def note(self, shapes: Any, call: int) -> None:
        """Note the shapes of call number `call`. Logs a warning at the eighth new shape."""
        if shapes in self._calls:
            return
        self._calls[shapes] = call
        if len(self._calls) == TOLD:
            log.warning(
                "batches have come in %d shapes, and each is compiled: pad them to a few in the collate function", TOLD
            )
        self.endless = len(self._calls) >= MANY and call - list(self._calls.values())[-MANY] < CALLS
