"""Leave the process's random generators as the user's own code would."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Inside the context, torch's, numpy's and Python's global generators may be drawn from and seeded; at its end they
    are as before.

    For whatever runs on the product's own account: recording, trying longer padding, comparing two forms of a batch.
    The order of the next epoch, dropout and augmentation of the user's come from these generators.
    """
    python, numpy, torchs = random.getstate(), np.random.get_state(), torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(torchs)
        if on_gpus:
            torch.cuda.set_rng_state_all(on_gpus)
