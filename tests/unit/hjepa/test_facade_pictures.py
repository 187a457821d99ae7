"""The original's pictures: what they draw, and the attention that they show."""

import numpy as np
import pytest
import torch
from torch.nn import functional

pytest.importorskip("matplotlib")

from jaxtrain.systems import hjepa
from jaxtrain.systems.hjepa.original.attention_pictures import rollout

SMALL = {"encoder_type": "vit_tiny_patch16_224", "img_size": 32, "embed_dim": 8, "num_hierarchies": 2}
SMALL |= {"vit": {"patch_size": 8, "embed_dim": 8, "depth": 2, "num_heads": 2}}
MASK = torch.arange(16) % 3 == 0  # of 4 x 4 patches


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return hjepa.create_hjepa(**SMALL, predictor_depth=1, predictor_num_heads=2)


@pytest.fixture(scope="module")
def image():
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("rope", [False, True])
def test_attention_maps_are_those_of_the_forward(rope, image):
    torch.manual_seed(0)
    encoder = hjepa.ContextEncoder("vit_tiny_patch16_224", 32, use_rope=rope, vit=SMALL["vit"])
    maps = hjepa.extract_attention_maps(encoder, image)
    assert sorted(maps) == [0, 1]
    block, (tokens,) = encoder.vit.blocks[0], _inputs(encoder, image)
    value = block.attn.qkv(block.norm1(tokens)).chunk(3, -1)[2].unflatten(-1, (2, 4)).transpose(1, 2)
    ours = block.attn.proj((maps[0] @ value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours, _outputs(encoder, image)[0], atol=1e-6, rtol=0)
    assert list(hjepa.extract_attention_maps(encoder, image, [-1])) == [1]
    assert encoder.training


def _inputs(encoder, image):
    seen = []
    hook = encoder.vit.blocks[0].register_forward_pre_hook(lambda block, arguments: seen.append(arguments[0]))
    encoder(image)
    hook.remove()
    return seen


def _outputs(encoder, image):
    seen = []
    hook = encoder.vit.blocks[0].attn.register_forward_hook(lambda attention, arguments, output: seen.append(output))
    encoder(image)
    hook.remove()
    return seen


def test_rollout_multiplies_the_layers(model, image):
    maps = hjepa.extract_attention_maps(model, image)
    mixed = [(maps[layer].mean(1) + torch.eye(17)) / 2 for layer in (0, 1)]
    torch.testing.assert_close(rollout(maps), (mixed[1] @ mixed[0])[:, 0, 1:])
    torch.testing.assert_close(rollout(maps, 1), mixed[1][:, 0, 1:])
    with pytest.raises(ValueError, match="start_layer=2: the encoder has 2 layers"):
        rollout(maps, 2)


PICTURES = {
    "visualize_attention_maps": (lambda m, x: [hjepa.extract_attention_maps(m, x), x], 4),
    "visualize_multihead_attention": (lambda m, x: [m, x], 2),
    "visualize_patch_to_patch_attention": (lambda m, x: [m, x, 5], 3),
    "visualize_attention_rollout": (lambda m, x: [m, x], 3),
    "visualize_hierarchical_attention": (lambda m, x: [m, x], 2),
    "visualize_predictions": (lambda m, x: [m, x, MASK], 4),
    "visualize_hierarchical_predictions": (lambda m, x: [m, x, MASK[None]], 2),
    "visualize_reconstruction": (lambda m, x: [torch.rand(6, 4), torch.rand(6, 4), MASK, x], 3),
    "visualize_masking_strategy": (lambda m, x: [MASK, x, 8], 3),
    "visualize_masked_image": (lambda m, x: [x, MASK, 8], 3),
    "visualize_context_target_regions": (lambda m, x: [MASK, [(0, 1, 2, 2), MASK], x, 8], 2),
    "compare_masking_strategies": (lambda m, x: [[MASK, ~MASK], ["one", "other"], x], 2),
    "plot_masking_statistics": (lambda m, x: [torch.stack([MASK, ~MASK])], 3),
    "visualize_multi_block_masking": (lambda m, x: [3], 3),
    "plot_training_curves": (lambda m, x: [{"loss": range(20), "rate": [1.0, 2.0]}], 2),
    "plot_hierarchical_losses": (lambda m, x: [{"level 0": [2.0, 1.0], "level 1": [3.0, 2.0]}], 1),
    "plot_ema_momentum": (lambda m, x: [[0.9, 0.99]], 1),
    "plot_collapse_metrics": (lambda m, x: [m.extract_features(x, 0)[0]], 3),
    "visualize_embedding_distribution": (lambda m, x: [torch.rand(5, 2, 3)], 3),
    "visualize_feature_space": (lambda m, x: [torch.rand(8, 3), torch.arange(8) % 2], 2),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_has_its_panels_and_is_written(name, model, image, tmp_path):
    arguments, panels = PICTURES[name]
    path = tmp_path / "picture.png"
    figure = getattr(hjepa, name)(*arguments(model, image), save_path=path)
    assert len(figure.axes) == panels
    assert path.read_bytes().startswith(b"\x89PNG")


def test_what_is_drawn_is_the_mask_and_the_cosine(model, image):
    (grid, _, visible) = hjepa.visualize_masking_strategy(MASK, image, 8).axes
    assert np.array_equal(grid.images[0].get_array(), MASK.reshape(4, 4))
    drawn = visible.images[0].get_array().reshape(4, 8, 4, 8, 3)
    assert np.all(drawn[0, :, 0] == 0.5)
    assert not np.any(np.all(drawn[0, :, 1] == 0.5, -1))
    cosines = hjepa.visualize_predictions(model, image, MASK).axes[2].images[0].get_array()
    outputs = model.eval()(image, MASK[None])
    expected = functional.cosine_similarity(outputs["predictions"][0][0], outputs["targets"][0][0], dim=-1)
    np.testing.assert_allclose(np.ma.filled(cosines, np.nan)[MASK.reshape(4, 4)], expected.detach(), atol=1e-6)


def test_masks_are_shown_one_after_the_other(image, tmp_path):
    moving = hjepa.animate_masking_process([MASK, ~MASK], image, 8, tmp_path / "masks.gif")
    from PIL import Image

    with Image.open(tmp_path / "masks.gif") as picture:
        assert picture.n_frames == 2
    assert moving is not None


def test_gradients_are_drawn_by_name():
    module = torch.nn.Linear(3, 2)
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        hjepa.visualize_gradient_flow(module)
    module(torch.ones(1, 3)).sum().backward()
    (axis,) = hjepa.visualize_gradient_flow(module).axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["weight", "bias"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda m, x: hjepa.extract_attention_maps(m, x, [2]), "the encoder has 2 layers"),
        (lambda m, x: hjepa.visualize_patch_to_patch_attention(m, x, 16), "patch_idx=16 is outside"),
        (lambda m, x: hjepa.visualize_masked_image(x, MASK, 16), "wants an image of"),
        (lambda m, x: hjepa.visualize_masking_strategy(torch.ones(15)), "expected \\[patch\\] of a square grid"),
        (lambda m, x: hjepa.visualize_feature_space(torch.rand(4, 3), method="lda"), "method='lda' is unknown"),
    ],
)
def test_a_mistake_is_a_value_error(call, text, model, image):
    with pytest.raises(ValueError, match=text):
        call(model, image)
