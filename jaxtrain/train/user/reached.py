"""Write a run's progress into the user's own objects, however the run ends."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxtrain.errors import one_line


@contextlib.contextmanager
def written_back(program: Any, write_back: Callable[[], None]) -> Iterator[None]:
    """Return the context of a run, at whose end the user's module and optimizer are written back.

    This also happens on an exception (a Ctrl-C, a callback that ends the run), as in torch's own loop: a script may
    save the objects then. Weights that are spread over several processes then stay on the devices, because only all
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
    """Return True if this process can read the whole state. After a failed step it cannot: its arrays were donated."""
    leaves = [leaf for leaf in jax.tree.leaves(program.state) if isinstance(leaf, jax.Array)]
    return all(not x.is_deleted() and (x.is_fully_addressable or x.is_fully_replicated) for x in leaves)
