"""The original's transforms, features and linear probe in torch."""

import numpy as np
import pytest
import torch
from PIL import Image

from jaxtrain.systems import hjepa
from tests.unit.hjepa.test_facade_model import SMALL


def test_training_images_follow_torchs_seed_and_evaluations_are_the_same():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8))
    train, evaluation = hjepa.JEPATransform(32, color_jitter=0.4), hjepa.JEPAEvalTransform(32)
    torch.manual_seed(0)
    first, second = train(image), train(image)
    torch.manual_seed(0)
    assert torch.equal(train(image), first)
    assert not torch.equal(second, first)
    assert evaluation(image).shape == first.shape == (3, 32, 32)
    assert torch.equal(evaluation(image), evaluation(image))
    whole = hjepa.JEPATransform(32, (1.0, 1.0), horizontal_flip=False)
    assert (whole.transform.crop_scale, whole.transform.horizontal_flip) == ((1.0, 1.0), 0.0)
    for wrong in ({"interpolation": "nearest"}, {"mean": (0, 0, 0)}):
        with pytest.raises(ValueError, match="interpolation|mean, std"):
            hjepa.JEPAEvalTransform(32, **wrong)


def test_features_of_a_loader_are_the_models():
    model = hjepa.HJEPA(**SMALL)
    images, labels = torch.randn(6, 3, 32, 32), torch.arange(6)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 4)
    features, found = hjepa.extract_features(model, loader, 1, pool=True, max_samples=5)
    np.testing.assert_allclose(features, model.extract_features(images[:5], 1).mean(1), atol=1e-6)
    assert found.tolist() == [0, 1, 2, 3, 4]
    assert model.training


@pytest.mark.parametrize("pooling", ["mean", "max", "attention", "cls"])
def test_a_probe_takes_tokens_and_rows(pooling):
    probe = hjepa.LinearProbe(8, 3, pooling=pooling, normalize=True)
    assert probe(torch.randn(2, 5, 8)).shape == probe(torch.randn(2, 8)).shape == (2, 3)


def test_a_class_token_that_is_not_there_is_warned_about():
    probe, tokens = hjepa.LinearProbe(8, 3, pooling="cls"), torch.randn(2, 5, 8)
    with pytest.warns(UserWarning, match="mean"):
        found = probe(tokens)
    assert torch.equal(found, probe(tokens.mean(1)))


def test_an_archive_that_is_not_unpacked_is_torchvisions_runtime_error(tmp_path):
    for name in ("cifar10", "cifar100", "stl10"):
        with pytest.raises(RuntimeError, match="unpack the archive"):
            hjepa.build_dataset(name, tmp_path, "train", download=False)


def test_the_model_for_inference_gives_the_models_features():
    model = hjepa.HJEPA(**SMALL).eval()
    images = torch.randn(2, 3, 32, 32)
    for level in range(model.num_hierarchies):
        small = hjepa.OptimizedHJEPA(model, level).eval()
        torch.testing.assert_close(small(images), model.extract_features(images, level))
    assert {key.split(".")[0] for key in small.state_dict()} == {"encoder", "hierarchy_projection"}
    with pytest.raises(ValueError, match="has a pyramid"):
        hjepa.OptimizedHJEPA(hjepa.HJEPA(**SMALL, use_fpn=True))
