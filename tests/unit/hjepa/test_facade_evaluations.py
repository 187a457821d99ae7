"""The original's evaluators: recorded numbers of probes and feature quality, and what fine-tuning and few-shot do."""

import json
import pathlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.utils.data import DataLoader, TensorDataset

from jaxtrain.systems import hjepa
from tests.unit.hjepa.test_facade_model import SMALL

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hjepa"
CASES = json.loads((GOLDEN / "evaluation.json").read_text())["cases"]


class Identity(torch.nn.Module):
    """A model whose features are its images, as in the recording."""

    embed_dim = 8
    num_hierarchies = 1

    def extract_features(self, images, level=0):
        return images


@pytest.fixture(scope="module")
def tensors():
    return load_file(GOLDEN / "evaluation.safetensors")


def loader(tensors, split, batch_size=8):
    return DataLoader(TensorDataset(tensors[f"in/{split}_features"], tensors[f"in/{split}_labels"]), batch_size)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("probe_")])
def test_a_probes_training_is_the_originals(name, tensors):
    case, prefix = CASES[name], f"param/{name}."
    evaluator = hjepa.LinearProbeEvaluator(Identity(), 4, 8, **case["probe_kwargs"])
    evaluator.probe.load_state_dict({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
    train, test = loader(tensors, "train"), loader(tensors, "test")
    history = evaluator.train_probe(train, test, verbose=False, **case["train_kwargs"])
    assert set(history) == set(case["history"])
    for key, values in case["history"].items():
        assert history[key] == pytest.approx(values, rel=1e-5), key
    for key, value in evaluator.probe.state_dict().items():
        torch.testing.assert_close(value, tensors[f"out/{name}/after.{key}"], rtol=1e-5, atol=1e-6)
    found, wanted = evaluator.evaluate(test, True, 2, False), dict(case["metrics"])
    assert found.pop("confusion_matrix").tolist() == wanted.pop("confusion_matrix")
    assert found == pytest.approx(wanted, rel=1e-5)


def test_feature_quality_is_the_originals(tensors, capsys):
    analyzer = hjepa.FeatureQualityAnalyzer(Identity())
    train, wanted = loader(tensors, "train"), CASES["fq_train_mean"]
    found = analyzer.compute_all_metrics(train)
    for group, values in wanted.items():
        assert found[group] == pytest.approx(values, rel=1e-5), group
    features, _ = analyzer.extract_features(train)
    assert analyzer.compute_effective_rank(features) == pytest.approx(wanted["rank"]["effective_rank"], rel=1e-5)
    assert analyzer.compute_rank_analysis(features, 0.5)["n_components_50"] == 2
    assert analyzer.detect_collapse(features) == wanted["collapse"]
    assert analyzer.detect_collapse(features, 0.9)["rank_collapse"]
    assert hjepa.compare_hierarchy_levels(Identity(), train) == {"level_0": found}
    hjepa.print_quality_report(found, verbose=False)
    assert "effective_rank: 6.98" in capsys.readouterr().out
    scores, share = analyzer.compute_pca(features)
    assert scores.shape == (40, 8)
    assert share.sum() == pytest.approx(1)


def test_a_sweep_of_neighbours_gives_the_single_evaluations(tensors):
    train, test = loader(tensors, "train"), loader(tensors, "test")
    found = hjepa.sweep_knn_params(Identity(), train, test, 4, k_values=(3, 5, 500), temperatures=(0.07, 0.3))
    assert [one["accuracy"] for one in found] == sorted((one["accuracy"] for one in found), reverse=True)
    assert len(found) == 8
    one = next(o for o in found if (o["k"], o["temperature"], o["distance_metric"]) == (3, 0.3, "euclidean"))
    assert one["accuracy"] == pytest.approx(CASES["knn_euclidean"]["metrics"]["accuracy"])


def bright_and_dark():
    torch.manual_seed(0)
    labels = torch.arange(24) % 2
    return TensorDataset(torch.randn(24, 3, 16, 16) * 0.1 + labels[:, None, None, None], labels)


@pytest.mark.parametrize("frozen", [True, False])
def test_fine_tuning_trains_what_it_says(frozen):
    torch.manual_seed(0)
    model = hjepa.HJEPA(**SMALL)
    size = model.img_size
    images = torch.nn.functional.interpolate(bright_and_dark().tensors[0], (size, size))
    data = DataLoader(TensorDataset(images, bright_and_dark().tensors[1]), 8)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = hjepa.fine_tune_eval(model, data, data, 2, freeze_encoder=frozen, epochs=6, lr=1e-2, verbose=False)
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert found["accuracy"] == 100
    assert changed == set() if frozen else any(key.startswith("target_encoder") for key in changed)
    assert not any(key.startswith("context_encoder") for key in changed)


def test_few_shots_suffice_for_images_that_differ():
    class Channels(Identity):
        def extract_features(self, images, level=0):
            return torch.stack([images.mean((1, 2, 3)), 1 - images.mean((1, 2, 3))], 1)[:, None]

    np.random.seed(0)
    found = hjepa.few_shot_eval(
        Channels(), bright_and_dark(), 2, n_way=2, k_shot_list=(1, 3), n_episodes=5, verbose=False
    )
    assert {name: one["mean_accuracy"] for name, one in found.items()} == {"1_shot": 100.0, "3_shot": 100.0}
    evaluator = hjepa.FewShotEvaluator(Channels(), 2)
    with pytest.raises(ValueError, match="n_way=3 needs as many"):
        evaluator.evaluate_few_shot(bright_and_dark(), n_way=3)


def test_a_transfer_head_has_its_hidden_layers():
    head = hjepa.TransferHead(8, 3, [6, 5], dropout=0.1, pooling="max")
    assert [tuple(p.shape) for p in head.parameters()] == [(6, 8), (6,), (5, 6), (5,), (3, 5), (3,)]
    tokens = torch.randn(2, 4, 8)
    assert torch.equal(head.eval()(tokens), head(tokens.amax(1)))


def test_folds_score_every_row_once():
    evaluator = hjepa.LinearProbeEvaluator(Identity(), 2, 8)
    labels = torch.arange(20) % 2
    rows = 0.1 * torch.randn(20, 1, 8) + (2.0 * labels - 1)[:, None, None]
    found = evaluator.k_fold_cross_validation(TensorDataset(rows, labels), 4, 3, 5, num_workers=0, verbose=False)
    assert found["accuracy_mean"] == pytest.approx(np.mean(found["fold_accuracies"]))
    assert len(found["fold_accuracies"]) == 4
    assert found["accuracy_mean"] == 100
