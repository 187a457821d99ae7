"""The original's mask generators, as torch tensors."""

import copy
import json
import pathlib
import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from jaxtrain.systems import hjepa

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hjepa"
CASES = json.loads((GOLDEN / "masks.json").read_text())["cases"]
RECORDED = load_file(GOLDEN / "masks.safetensors")


def leaves(prefix: str, value) -> dict[str, torch.Tensor]:
    if isinstance(value, dict):
        return {key: x for name, inner in value.items() for key, x in leaves(f"{prefix}/{name}", inner).items()}
    return {prefix: value}


@pytest.mark.parametrize("name", CASES)
def test_a_seed_of_numpy_gives_the_originals_masks(name):
    case = CASES[name]
    generator = getattr(hjepa, case["class"])(**case["kwargs"])
    np.random.seed(case["np_random_seed"])
    drawn = generator(batch_size=case["batch_size"], device="cpu")
    if isinstance(drawn, tuple):
        np.testing.assert_allclose(
            list(generator.get_mask_statistics(*drawn).values()), list(case["statistics"].values()), rtol=1e-5
        )
        drawn = dict(zip(("context", "targets"), drawn, strict=True))
    elif "statistics" in case:
        for level, found in generator.get_hierarchical_statistics(drawn).items():
            assert found == pytest.approx(case["statistics"][level], rel=1e-5, nan_ok=True)
    found = leaves(f"out/{name}", drawn)
    assert found.keys() == {key for key in RECORDED if key.startswith(f"out/{name}/")}
    for key, tensor in found.items():
        assert tensor.dtype is torch.bool
        np.testing.assert_array_equal(tensor.numpy(), RECORDED[key], err_msg=key)


def test_constructor_arguments_and_the_grid_are_attributes():
    generator = hjepa.HierarchicalMaskGenerator(input_size=(96, 64), patch_size=8, base_scale=[0.1, 0.2])
    assert (generator.num_patches_h, generator.num_patches_w, generator.num_patches) == (12, 8, 96)
    assert (generator.input_size, generator.base_scale, generator.scale_progression) == (
        (96, 64),
        (0.1, 0.2),
        "geometric",
    )
    assert [config["level"] for config in generator.level_configs] == [0, 1, 2]
    block = hjepa.MultiBlockMaskGenerator()
    assert (block.target_scale, block.context_scale, block.max_attempts) == ((0.15, 0.2), (0.85, 1.0), 10)
    assert block.sample_block((0.2, 0.2)).sum() > 0


def test_contexts_never_touch_targets():
    context, targets = hjepa.MultiBlockMaskGenerator(num_target_masks=3)(8)
    assert not (context[:, None] & targets).any()
    assert targets.shape == (8, 3, 196)


def test_generators_are_pickled_for_workers_and_an_empty_batch_has_its_axes():
    for generator in (
        hjepa.HierarchicalMaskGenerator(),
        hjepa.MultiCropMaskGenerator(),
        hjepa.MultiBlockMaskGenerator(),
    ):
        other = pickle.loads(pickle.dumps(copy.deepcopy(generator)))
        drawn = []
        for one in (generator, other):
            np.random.seed(1)
            drawn.append(torch.utils._pytree.tree_leaves(one(2)))
        assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
    context, targets = hjepa.MultiBlockMaskGenerator()(0)
    assert (context.shape, targets.shape) == ((0, 196), (0, 4, 196))


def test_no_targets_leave_the_context_whole():
    context, targets = hjepa.MultiBlockMaskGenerator(64, 16, num_target_masks=0)(2)
    assert (context.shape, targets.shape) == ((2, 16), (2, 0, 16))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_masks_for_a_gpu_that_is_not_there_are_on_the_cpu():
    assert hjepa.HierarchicalMaskGenerator(64)(2, device="cuda")["level_0"]["targets"].device.type == "cpu"


def test_crops_of_both_sizes():
    generator = hjepa.MultiCropMaskGenerator(masking_strategy="cross_crop_prediction", num_local_crops=4)
    masks = generator(batch_size=2, device="cpu")
    assert set(masks["global_masks"]) == {"crop_0", "crop_1"}
    assert masks["local_masks"]["crop_3"]["level_0"]["context"].all()
    assert masks["local_masks"]["crop_0"]["level_0"]["targets"].shape == (2, 4, 36)


def test_a_generator_of_crops_says_what_it_makes():
    info = hjepa.MultiCropMaskGenerator(64, 32, patch_size=8, base_scale=(0.1, 0.2)).get_crop_info()
    assert (info["global_num_patches"], info["local_num_patches"], info["masking_strategy"]) == (64, 16, "global_only")
    assert (info["num_global_crops"], info["num_local_crops"]) == (2, 6)


def test_masks_are_drawn_as_pictures(tmp_path):
    block = hjepa.MultiBlockMaskGenerator(64)
    figure = block.visualize_masks(*block(2), save_path=tmp_path / "blocks.png")
    assert [axes.get_title() for axes in figure.axes] == ["context", *(f"target {i}" for i in range(4))]
    assert (tmp_path / "blocks.png").stat().st_size > 0
    levels = hjepa.HierarchicalMaskGenerator(64, num_hierarchies=2)
    drawn = levels(2)
    combined = levels.visualize_combined_view(drawn, 1).axes[0].images[0].get_array()
    assert ((combined == 2).reshape(-1) == drawn["level_0"]["targets"][1].any(0).numpy()).all()
    assert len(levels.visualize_hierarchical_masks(drawn).axes) == 2
    crops = hjepa.MultiCropMaskGenerator(64, 32, masking_strategy="global_with_local_context")
    assert len(crops.visualize_multicrop_masks(crops(1)).axes) == 8


@pytest.mark.parametrize(
    "build",
    [
        lambda: hjepa.HierarchicalMaskGenerator(scale_progression="cubic"),
        lambda: hjepa.MultiCropMaskGenerator(masking_strategy="all"),
    ],
)
def test_unknown_words_are_value_errors(build):
    with pytest.raises(ValueError, match="is unknown"):
        build()
