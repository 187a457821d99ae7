"""Write the files that `jaxtrain.evaluate` adds to the metrics: comparisons, dashboards, the original's own files."""

import dataclasses
import json
import pathlib

import jax
import numpy as np

from jaxtrain.systems.set_completion import metrics, synthetic
from jaxtrain.systems.set_completion.data import corpus_of, vocabulary_of
from jaxtrain.systems.set_completion.evals.dashboard import write_dashboard
from jaxtrain.systems.set_completion.evals.feature_report import measure
from jaxtrain.systems.set_completion.losses import run_model
from torch_bridge.atomic_file import write_text


def completion_report(model, source, config, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write completion.json and model_params.json; return their paths.

    completion.json: metrics of the frequency baseline; on the synthetic corpus also the share of planted rules
    recovered. model_params.json: arguments of the original's `SetCompletionModel(**params)`.
    """
    result = {"baseline": metrics.baseline(corpus_of(config, "train"), source.columns, config)}
    if config.data.path is None:
        result |= rule_report(model, config)
    arguments = config.model.arguments()
    return [_write(folder / "completion.json", result), _write(folder / "model_params.json", arguments)]


def rule_report(model, config) -> dict[str, float]:
    """Return the share of the synthetic corpus' planted rules recovered by the model and by the frequency baseline."""
    made, vocabulary = config.data.synthetic, vocabulary_of(config)
    planted = synthetic.archetypes(made.weapons, made.archetypes, made.seed)
    train = corpus_of(config, "train")
    frequencies = metrics.frequency_logits(train, config.model.vocab_size, config.model.weapon_vocab_size)
    run = jax.jit(lambda ids, weapons: jax.nn.sigmoid(run_model(model, ids, weapons)[1]))
    always = lambda ids, weapons: 1 / (1 + np.exp(-frequencies[weapons[:, 0]]))
    return {
        "rule_recovery": synthetic.rule_recovery(metrics.rule_probability(run, vocabulary), planted),
        "baseline_rule_recovery": synthetic.rule_recovery(metrics.rule_probability(always, vocabulary), planted),
    }


def feature_report(model, source, config, folder: pathlib.Path) -> list[pathlib.Path]:
    """Write features.html (dashboard), features.json (its numbers), sae_run_config.json (for the original's tools)."""
    report = measure(model, source, config)
    title = f"Features of {config.sae.primary or 'a random model'} ({config.run.name or 'sae'})"
    run = {"sae_input_dim": config.model.hidden_dim, "sae_hidden_dim": model.sae.hidden_dim, **config.sae.model_dump()}
    return [
        write_dashboard(report, folder / "features.html", title),
        _write(folder / "features.json", dataclasses.asdict(report)),
        _write(folder / "sae_run_config.json", run),
    ]


def _write(path: pathlib.Path, value) -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=1))
    return path
