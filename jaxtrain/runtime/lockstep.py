"""Keep the processes of one mesh in step: before all of them run a program, each checks what another is about to do.

A program over several processes never ends if one of them runs another, or none. So every process publishes a word on
what it does next, reads its neighbour's, and an error names where the two differ.
"""

import atexit
import contextlib
import json
import logging
import time
import zlib
from collections.abc import Mapping

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.runtime import launch

LONG_S = 60  # a wait is told from here on
PATIENCE_S = 1800  # as torch's process groups: a process may evaluate or save alone meanwhile
BLOCK = 128  # turns whose words are deleted together

NEXT = "what they do next"  # the first topic of every word

log = logging.getLogger(__name__)
_turns = 0  # count so far; all processes take them in the same order


def take_turn(word: Mapping[str, str]) -> None:
    """Wait until a neighbouring process is about to do the same. Does nothing for a single process.

    word: what this process does next, by topic, the one that explains others first. Raises UserError that names the
    first topic in which the two differ, or a process that is not heard of within PATIENCE_S.
    """
    global _turns
    if jax.process_count() == 1:
        return
    if _turns == 0:
        atexit.register(_end)
    turn, _turns = _turns, _turns + 1
    mine = jax.process_index()
    other = (mine - 1) % jax.process_count()
    store = launch.coordination()
    store.key_value_set(_key(mine, turn), json.dumps(dict(word)))
    if turn % BLOCK == 0 and turn >= 2 * BLOCK + jax.process_count():
        store.key_value_delete(f"jaxtrain/turns/{mine}/{turn // BLOCK - 2}/")
    theirs = json.loads(_heard(other, turn, word))
    topic = next((topic for topic in {**word, **theirs} if word.get(topic) != theirs.get(topic)), None)
    if topic is not None:
        said = [(mine, word.get(topic) or "nothing"), (other, theirs.get(topic) or "nothing")]
        raise UserError(
            f"the processes differ in {topic}, and one program runs over all: "
            + "; ".join(f"{what} on process {process}" for process, what in sorted(said))
            + ". Every process runs the same script, with as many rows in each batch, and calls the step, sync() and "
            "state_dict() as often"
        )


def digest(array: np.ndarray) -> str:
    """Return a number that differs for arrays of different contents, as text."""
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data):08x}"


def _heard(other: int, turn: int, word: Mapping[str, str]) -> str:
    """Return the word of another process for a turn. Raises UserError if it says nothing within PATIENCE_S."""
    store, began = launch.coordination(), time.monotonic()
    while (waited := time.monotonic() - began) < PATIENCE_S:
        try:
            return store.blocking_key_value_get(_key(other, turn), int(min(LONG_S, PATIENCE_S - waited) * 1000) + 1)
        except Exception as error:  # the client's class of errors differs between versions
            if "DEADLINE" not in str(error):
                raise
        log.warning(
            "process %d waits for process %d, which has not come so far for %.0f s (%s)",
            jax.process_index(), other, time.monotonic() - began, word[NEXT],
        )  # fmt: skip
    raise UserError(
        f"process {other} has not come so far within {PATIENCE_S} s: {word[NEXT]}. Every process calls "
        "the step, sync() and state_dict() as often"
    )


def _end() -> None:
    """Let the others know that this process does nothing more."""
    with contextlib.suppress(Exception):  # the service may have ended before
        launch.coordination().key_value_set(
            _key(jax.process_index(), _turns), json.dumps({NEXT: "the end of the script"})
        )


def _key(process: int, turn: int) -> str:
    return f"jaxtrain/turns/{process}/{turn // BLOCK}/{turn}"
