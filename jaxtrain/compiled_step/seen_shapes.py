"""The shapes in which batches come: each is compiled, once."""

import logging
from typing import Any

TOLD = 8  # shapes of which a line tells
MANY, CALLS = 64, 70  # as many new shapes in as few calls: further ones will be new, too

log = logging.getLogger(__name__)


class SeenShapes:
    """Counts the shapes of one step's batches. `endless`: nearly every call brings a new one."""

    def __init__(self) -> None:
        self._calls: dict[Any, int] = {}  # shapes -> the call that brought them, in this order
        self.endless = False

    def note(self, shapes: Any, call: int) -> None:
        """Take the shapes of a call, of which this is the number. Logs a warning for the eighth that are new."""
        if shapes in self._calls:
            return
        self._calls[shapes] = call
        if len(self._calls) == TOLD:
            log.warning(
                "batches have come in %d shapes, and each is compiled: pad them to a few in the collate function", TOLD
            )
        self.endless = len(self._calls) >= MANY and call - list(self._calls.values())[-MANY] < CALLS
