"""Compare the streams that the processes of a run read."""

import hashlib
import pickle
from typing import Any

import jax
import numpy as np

from jaxtrain.errors import UserError
from jaxtrain.runtime import launch


def refuse_different(number: int, batch: dict[str, Any]) -> None:
    """Raise UserError where the processes read different streams, of which each would drop most rows. number: of the
    loader."""
    if jax.process_count() == 1:
        return
    whole = hashlib.sha256(pickle.dumps(jax.tree.map(np.asarray, batch))).hexdigest()
    if not launch.agree(f"stream/{number}", whole):
        raise UserError(
            "the IterableDataset gives other samples in every process: does it shard itself by rank, or draw from "
            "an unseeded generator of its own? Every process must read the same samples, and trains on its rows of "
            "each batch. Leave the sharding out (split_by_node, split_dataset_by_node), or set "
            "data.num_workers=1: a worker process sees RANK=0 and WORLD_SIZE=1"
        )
