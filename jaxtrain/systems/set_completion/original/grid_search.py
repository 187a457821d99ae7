"""The original's grid_search: train and score a model for every combination of values, one after the other."""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxtrain.errors import UserError
from jaxtrain.systems.set_completion.original.training import TrainingConfig, test_model, train_model, validate

SELECTIONS = ("validation", "test")


class GridSearch(NamedTuple):
    """Result of a grid search. model: the best one, trained. params: its values. results: params, history, validation
    and test scores of every combination, in the grid's order."""

    model: Any
    params: dict[str, Any]
    results: list[dict[str, Any]]


def grid_search(
    model_class: Callable[..., Any],
    train_dl: Iterable,
    val_dl: Iterable,
    test_dl: Iterable,
    config: TrainingConfig,
    vocab: Mapping[str, int],
    param_grid: Mapping[str, Sequence],
    fixed_params: Mapping[str, Any] | None = None,
    *,
    pad_token: str = "<PAD>",
    verbose: bool = False,
    select_by: str = "validation",
) -> GridSearch:
    """Train model_class(**fixed_params, **values) for every combination of param_grid; return the one with the best F1.

    Names of `TrainingConfig`'s fields change the config, all others go to model_class. select_by: the split whose F1
    decides; "test" is the original's choice, but then the test split is not unseen any more. Raises UserError for
    another split or an empty grid list. `python -m jaxtrain.tune` searches with pruning.
    """
    import torch

    if select_by not in SELECTIONS:
        raise UserError(f"select_by: got {select_by!r}, wanted one of {', '.join(SELECTIONS)}")
    trained_by = {field.name for field in dataclasses.fields(TrainingConfig)}
    best: GridSearch | None = None
    results: list[dict[str, Any]] = []
    for values in itertools.product(*param_grid.values()):
        params = dict(zip(param_grid, values, strict=True))
        trial = dataclasses.replace(config, **{name: value for name, value in params.items() if name in trained_by})
        sizes = {name: value for name, value in params.items() if name not in trained_by}
        model = model_class(**{**(fixed_params or {}), **sizes})
        history, model = train_model(model, train_dl, val_dl, trial, vocab, pad_token, verbose)
        criterion = torch.nn.BCEWithLogitsLoss()
        scores = {
            "validation": validate(model, val_dl, criterion, trial, vocab, pad_token, verbose),
            "test": test_model(model, test_dl, trial, vocab, pad_token, verbose),
        }
        results.append({"params": params, "history": history, **copy.deepcopy(scores)})
        if best is None or scores[select_by]["f1"] > max(one[select_by]["f1"] for one in results[:-1]):
            best = GridSearch(model, params, results)
    if best is None:
        raise UserError("param_grid: one of its lists is empty, so there is nothing to train")
    return best
