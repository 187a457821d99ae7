"""Does the exported file do in torch what the model does in JAX?"""

import pathlib
from typing import Any

import jax
import numpy as np
import torch

from jaxtrain.data.collate import collate as default_collate
from jaxtrain.data.index_stream import IndexStream
from jaxtrain.data.loader import Loader
from jaxtrain.data.sources import as_source
from jaxtrain.train import evaluation, runs
from torch_bridge import files
from torch_bridge.datasets import to_numpy, to_torch


def compare_with_twin(folder: pathlib.Path, weights: pathlib.Path, dataset: Any) -> str:
    """One line: the metrics on both sides over the whole dataset, and the largest difference of the outputs.

    Loads `weights` into the task's torch twin with strict=True.
    """
    task, config, model, step = runs.load_model(
        folder, "best" if runs.open_run(folder)[2].best() is not None else "last"
    )
    twin = task.twin.build(config).eval()
    twin.load_state_dict({key: to_torch(value) for key, value in files.load(weights).items()}, strict=True)
    source = as_source(dataset)
    size = config.data.eval_batch_size or config.data.batch_size
    stream = IndexStream(len(source), size, shuffle=False)
    loader = Loader(source, stream, lambda b: b[0], np.arange(size), task.collate or default_collate)
    outputs = jax.jit(task.outputs)
    sides: dict[str, list] = {"jax": [], "torch": []}
    largest = 0.0
    for step_ in range(stream.steps_per_epoch):
        batch = loader.host_batch(step_)
        ours = jax.device_get(outputs(model, batch))
        with torch.no_grad():
            theirs = to_numpy(task.twin.call(twin, jax.tree.map(to_torch, batch)))
        valid = batch["valid"]
        for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            largest = max(largest, float(np.abs(a[valid] - b[valid]).max()))
        for side, value in (("jax", ours), ("torch", theirs)):
            if task.statistics is not None:
                given = task.statistics(value, batch, config)
                sums = {f"sum/{key}": value for key, value in given.sums.items()}
                rows = {**given.rows, "valid": valid} if given.rows else {}
                sides[side].append(evaluation.Statistics(sums, rows))
    words = []
    for side, collected in sides.items():
        metrics = evaluation.finish(task, config, *evaluation.collect(collected)) if collected else {}
        words.append(f"{side} " + " ".join(f"{name} {value:.6f}" for name, value in metrics.items()))
    return (
        f"step {step} on {len(source)} validation samples: {', '.join(words)}; largest output difference {largest:.1e}"
    )
