"""Check that the processes of a run read streams that fit together."""

import hashlib
import pickle
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxtrain.data.stream_shards import differing, shapes_of_rows
from jaxtrain.errors import UserError
from jaxtrain.runtime import launch


def refuse_different(number: int, batch: dict[str, Any]) -> None:
    """Raise UserError if the first batches of the processes' streams differ; each process would drop most of its rows.

    number: the loader's number, part of the key under which the processes compare.
    """
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


def same_rows(number: int, batches: Iterator[tuple[int, dict, Any]]) -> Iterator[tuple[int, dict, Any]]:
    """Yield the batches of a stream in shards. Raises UserError if their rows differ in shape from those of the first
    batch, or from those of another process. number: the loader's number."""
    first = None
    for step, batch, place in batches:
        shapes = shapes_of_rows(batch)
        if first is None and jax.process_count() > 1 and not launch.agree(f"rows/{number}", str(shapes)):
            raise UserError(
                f"data.stream_shards: the processes read rows of different shapes; this one reads {shapes}. Pad every "
                "sample to the same length in the Dataset or its collate function (padding='max_length')"
            )
        first = first or shapes
        if shapes != first:
            raise differing(step, first, shapes)
        yield step, batch, place
