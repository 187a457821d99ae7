"""Leave the steps that a run has made in the user's own objects, however the run ends."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxtrain.errors import one_line


@contextlib.contextmanager
def written_back(program: Any, write_back: Callable[[], None]) -> Iterator[None]:
    """Around a run: have the user's module and optimizer hold what its last step left.

    An exception (a Ctrl-C, a callback that ends the run) finds the steps made so far in them, as in torch's own loop,
    for a script may save them then. Weights that are spread over several processes stay on the devices: only all
    processes together can fetch them.
    """
    begun = int(program.state.step)
    try:
        yield
    except BaseException as error:
        if _is_here(program) and int(program.state.step) != begun:
            try:
                write_back()
            except Exception as other:
                error.add_note(f"the module does not hold the run's last weights: {one_line(other)}")
        raise
    write_back()


def _is_here(program: Any) -> bool:
    """Tell whether this process can read all of the state: a step that failed has consumed it."""
    leaves = [leaf for leaf in jax.tree.leaves(program.state) if isinstance(leaf, jax.Array)]
    return all(not x.is_deleted() and (x.is_fully_addressable or x.is_fully_replicated) for x in leaves)
