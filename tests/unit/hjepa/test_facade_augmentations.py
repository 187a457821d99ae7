"""The original's DeiT-III augmentations and its exports of features."""

import importlib.util

import numpy as np
import pytest
import torch
from PIL import Image

from jaxtrain.systems import hjepa

SMALL = {"encoder_type": "vit_tiny_patch16_224", "img_size": 16, "embed_dim": 8, "num_hierarchies": 2}
SMALL |= {"vit": {"patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2}}


def picture(size: int = 40) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return hjepa.create_hjepa(**SMALL, predictor_depth=1, predictor_num_heads=2)


def test_randaugment_has_torchvisions_operations():
    transforms = pytest.importorskip("torchvision.transforms")
    ours, image = hjepa.RandAugment(magnitude=9), picture()
    sizes = transforms.RandAugment(magnitude=9)._augmentation_space(31, image.size[::-1])
    assert sorted(ours.augment_ops) == sorted(sizes)
    bilinear = transforms.InterpolationMode.BILINEAR
    for name, (magnitudes, _signed) in sizes.items():
        amount = float(magnitudes[9].item()) if magnitudes.ndim else 0.0
        theirs = transforms.autoaugment._apply_op(image, name, amount, interpolation=bilinear, fill=None)
        gap = np.abs(np.asarray(ours.apply(image, name), float) - np.asarray(theirs, float))
        assert gap.max() <= 1, name


def test_a_magnitude_outside_the_bins_is_refused():
    with pytest.raises(ValueError, match=r"magnitude=31 is outside \[0, 31\)"):
        hjepa.RandAugment(magnitude=31)


@pytest.mark.parametrize("value", [0, (0.1, 0.2, 0.3), "random"])
def test_a_box_is_erased_as_torchvision_does(value):
    transforms = pytest.importorskip("torchvision.transforms")
    image = torch.rand(3, 24, 20)
    for seed in range(10):
        torch.manual_seed(seed)
        ours = hjepa.RandomErasing(0.7, value=value)(image)
        torch.manual_seed(seed)
        assert torch.equal(ours, transforms.RandomErasing(0.7, value=value)(image))


def test_a_mixed_batch_has_labels_in_its_shares():
    torch.manual_seed(0)
    images, labels = torch.rand(6, 3, 8, 8), torch.arange(6)
    for kind in (hjepa.Mixup, hjepa.CutMix):
        mixed, rows = kind(num_classes=6)(images, labels)
        assert torch.allclose(rows.sum(1), torch.ones(6))
        first = rows[0].argsort(descending=True)[:2]
        if kind is hjepa.Mixup:
            share = rows[0, 0]
            other = first[first != 0][0] if rows[0, 0] < 1 else 0
            assert torch.allclose(mixed[0], share * images[0] + (1 - share) * images[other])
        else:
            same = (mixed[0] == images[0]).all(0).float().mean()
            assert rows[0, 0] == pytest.approx(float(same), abs=1e-6) or rows[0, 0] == 1


def test_no_batch_is_mixed_with_probability_0():
    images = torch.rand(2, 3, 4, 4)
    mixed, rows = hjepa.MixupCutmix(num_classes=3, prob=0.0)(images, torch.tensor([2, 0]))
    assert mixed is images
    assert rows.tolist() == [[0, 0, 1], [1, 0, 0]]


def test_deit3_gives_images_of_its_size_and_follows_torchs_seed():
    transform = hjepa.build_deit3_transform(config={"image_size": 32, "num_classes": 5})
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        drawn.append(transform.get_image_transform()(picture()))
    assert drawn[0].shape == (3, 32, 32)
    assert torch.equal(*drawn)
    assert transform.get_batch_transform().mixup.num_classes == 5
    plain = hjepa.build_deit3_transform(False, {"image_size": 32, "num_classes": 5})
    assert torch.equal(plain(picture()), hjepa.JEPAEvalTransform(32)(picture()))


def test_traced_features_are_the_models_for_any_number_of_images(model, tmp_path):
    images = torch.randn(3, 3, 16, 16)
    for level in (0, 1):
        program = hjepa.export_to_torchscript(model, tmp_path / "new/features.pt", hierarchy_level=level)
        read = torch.jit.load(tmp_path / "new/features.pt")
        expected = hjepa.OptimizedHJEPA(model, level).eval()(images)
        torch.testing.assert_close(read(images), expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(program(images), expected, atol=1e-6, rtol=0)


def test_int8_features_are_close(model, tmp_path):
    images = torch.randn(3, 3, 16, 16)
    hjepa.quantize_model(model, tmp_path / "int8.pt")
    expected = hjepa.OptimizedHJEPA(model).eval()(images)
    gap = (torch.jit.load(tmp_path / "int8.pt")(images) - expected).norm() / expected.norm()
    assert 0 < gap < 0.05
    with pytest.raises(ValueError, match="known is dynamic"):
        hjepa.quantize_model(model, tmp_path / "static.pt", quantization_type="static")
    assert not (tmp_path / "static.pt").exists()


def test_onnx_features_are_the_models(model, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    images = torch.randn(3, 3, 16, 16)
    hjepa.export_to_onnx(model, tmp_path / "features.onnx", hierarchy_level=1)
    (read,) = onnxruntime.InferenceSession(tmp_path / "features.onnx").run(None, {"images": images.numpy()})
    np.testing.assert_allclose(read, hjepa.OptimizedHJEPA(model, 1).eval()(images), atol=1e-6)


def test_onnx_says_what_it_needs(model, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install onnx"):
        hjepa.export_to_onnx(model, tmp_path / "features.onnx")
