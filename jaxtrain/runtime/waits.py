"""Tell a user who waits for capture or compilation what is going on, and add up what it costs."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from jaxtrain.errors import UserError
from jaxtrain.runtime import launch

LONG_S = 5.0  # a wait is told from here on, and again each time it has doubled,
SILENT_S = 30.0  # but at least so often
PATIENCE_S, PATIENCE_STEPS = 60.0, 200  # of compiling: from here on it is compared with so many steps in torch

log = logging.getLogger(__name__)
_inside = threading.local()  # whether this thread is in a wait, which tells of what it waits for inside, too


class Waits:
    """Waits for one step or module. spent_s: seconds of all so far.

    line_of: returns the user's line that a stack of frames has come to, "" for none.
    """

    def __init__(self, name: str, line_of: Callable[[FrameType | None], str]):
        self.name, self.line_of = name, line_of
        self.spent_s = 0.0
        self._last: dict[str, float] = {}
        self._told = False

    @contextlib.contextmanager
    def during(self, what: str, purpose: str = "") -> Iterator[None]:
        """Log a line, and more as the wait goes on, if the code inside takes longer than LONG_S. what: it does, as in
        "is captured". purpose: what it is for; told at the end of the first long wait."""
        began, over = time.perf_counter(), threading.Event()
        outermost = not getattr(_inside, "active", False)
        watcher = threading.Thread(target=self._watch, args=(what, began, threading.get_ident(), over), daemon=True)
        if outermost:
            _inside.active = True
            watcher.start()
        try:
            yield
        finally:
            over.set()
            if outermost:
                _inside.active = False
                watcher.join()
            took = time.perf_counter() - began
            self._last[what] = took
            self.spent_s += took
        if took > LONG_S and outermost and purpose and not self._told and speaks():
            self._told = True
            log.warning("%s %s in %.0f s, once for %s", self.name, what, took, purpose)

    def cost_more(self, torch_s: float, steps: int) -> bool:
        """Return True if the waits have cost more than PATIENCE_STEPS steps in torch, plus one for each that has run
        compiled. torch_s: seconds of a step in torch. steps: that have run compiled."""
        return self.spent_s > torch_s * (PATIENCE_STEPS + steps)

    def _watch(self, what: str, began: float, thread: int, over: threading.Event) -> None:
        wait_s = LONG_S
        while speaks() and not over.wait(wait_s):
            waited_s = time.perf_counter() - began
            wait_s = min(waited_s, SILENT_S)
            line = self.line_of(sys._current_frames().get(thread))
            place = f", now at {line}" if line else ""
            last = f"; the last time took {self._last[what]:.0f} s" if what in self._last else ""
            log.warning("%s %s, %.0f s so far%s%s", self.name, what, waited_s, place, last)


def speaks() -> bool:
    """Return True on the first process of a launch: they all wait for the same."""
    try:
        return launch.detect().process == 0
    except UserError:  # of an environment that is told where processes are connected
        return True


def inputs_of(shapes: Sequence[tuple[int, ...]]) -> str:
    """Return what a program is compiled for, as `Waits.during` tells it."""
    more = f" and {len(shapes) - 4} more" if len(shapes) > 4 else ""
    return f"inputs of shapes {', '.join(map(str, shapes[:4])) or 'no arrays'}{more}"
