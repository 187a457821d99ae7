"""Write the files that `jaxtrain.evaluate` adds to the metrics: multiple-choice results and chapter usage."""

import json
import pathlib

import jax
import numpy as np
from flax import nnx

from jaxtrain.systems.memory_lm import losses
from jaxtrain.systems.memory_lm.banks import deployed
from jaxtrain.systems.memory_lm.data import tokenizer_of
from jaxtrain.systems.memory_lm.evals import multiple_choice
from torch_bridge.atomic_file import write_text

ROWS = 64  # number of rows of the split that the chapter report uses


def report(model: nnx.Module, source, config, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write multiple_choice.json for the files of data.multiple_choice, and chapters.json if there are chapters.

    Returns the paths of the written files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    if config.data.multiple_choice:
        tokenizer = tokenizer_of(config)
        results = {
            path: multiple_choice.evaluate(
                deployed(model), tokenizer, multiple_choice.read_questions(path), config.data.max_length
            )
            for path in config.data.multiple_choice
        }
        written.append(_write(folder / "multiple_choice.json", results))
    if config.memory.use_chapters and getattr(model, "bank_of", None):
        written.append(_write(folder / "chapters.json", chapters(model, source, config)))
    return written


def chapters(model: nnx.Module, source, config) -> dict[str, list[float]]:
    """Return by memory layer each chapter's share of the choices, over the first rows of a source."""
    rows = np.arange(min(ROWS, len(source)))
    batch = {**source[rows], "valid": np.ones(len(rows), bool)}
    chosen = jax.jit(lambda model, batch: losses.histograms(model, batch, config))(model, batch)
    share = {}
    for name, indices in chosen.items():
        indices = np.asarray(indices)[np.isfinite(indices)].astype(int)
        count = np.bincount(indices, minlength=config.memory.num_chapters)
        share[name.removeprefix("chapters/")] = (count / max(len(indices), 1)).round(6).tolist()
    return share


def _write(path: pathlib.Path, value) -> pathlib.Path:
    write_text(path, json.dumps(value, indent=1))
    return path
