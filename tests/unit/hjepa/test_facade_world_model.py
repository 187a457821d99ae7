"""The original's world model, planner and rotary positions in torch."""

import json
import pathlib

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from jaxtrain.systems import hjepa

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hjepa"


@pytest.fixture(scope="module")
def golden():
    case = json.loads((GOLDEN / "lewm_world_model.json").read_text())
    tensors = load_file(GOLDEN / "lewm_world_model.safetensors")
    model = hjepa.create_lewm(**case["lewm_kwargs"], vit=case["vit_kwargs"])
    state = {key.removeprefix("param/"): x for key, x in tensors.items() if key.startswith("param/")}
    model.load_state_dict(state, strict=True)
    return model.eval(), tensors


def test_outputs_and_rollouts_are_the_originals(golden):
    model, tensors = golden
    with torch.no_grad():
        found = model(tensors["in/frames"], tensors["in/actions"])
        planner = hjepa.CEMPlanner(model.frame_encoder, model.action_predictor, action_dim=3)
        rolled = planner.rollout(tensors["out/plan_z_init"], tensors["in/plan_actions"])
    for key, value in found.items():
        np.testing.assert_allclose(value, tensors[f"out/{key}"], rtol=1e-4, atol=1e-5, err_msg=key)
    np.testing.assert_allclose(rolled, tensors["out/plan_rollout"], rtol=1e-4, atol=1e-5)
    cost = planner.cost_fn(rolled, tensors["out/plan_z_goal"])
    np.testing.assert_allclose(cost, tensors["out/plan_cost"], rtol=1e-4)


def test_a_predictors_mistakes_are_value_errors():
    predictor = hjepa.ActionPredictor(8, 2, depth=1, num_heads=2, max_seq_len=4)
    for embeddings, actions in (((2, 3, 8), (2, 4, 2)), ((3, 8), (3, 2)), ((2, 5, 8), (2, 5, 2))):
        with pytest.raises(ValueError, match="wanted|more than"):
            predictor(torch.zeros(embeddings), torch.zeros(actions))


def test_planning_beats_no_plan_and_leaves_the_modes(golden):
    model, tensors = golden
    model.train()
    torch.manual_seed(0)
    planner = hjepa.CEMPlanner(model.frame_encoder, model.action_predictor, 3, 4, 64, 8, 6)
    first, last = tensors["in/frames"][0, 0], tensors["in/frames"][0, -1]
    plan = planner.plan(first, last, return_full_sequence=True)
    assert model.frame_encoder.training
    model.eval()
    start, goal = tensors["out/plan_z_init"], tensors["out/plan_z_goal"]
    with torch.no_grad():
        costs = planner.cost_fn(planner.rollout(start, torch.stack([plan, torch.zeros_like(plan)])), goal)
    assert costs[0] < costs[1]


@pytest.mark.parametrize(
    ("frames", "actions", "words"),
    [
        ((2, 3, 16, 16), (2, 5, 3), "axes"),
        ((2, 5, 3, 16, 16), (2, 4, 3), "wanted equal"),
        ((1, 9, 3, 16, 16), (1, 9, 3), "predictor_max_seq_len=8"),
    ],
)
def test_shapes_that_do_not_fit_are_value_errors(frames, actions, words, golden):
    with pytest.raises(ValueError, match=words):
        golden[0](torch.zeros(frames), torch.zeros(actions))


def test_rotary_positions_are_the_originals():
    tensors = load_file(GOLDEN / "encoder_rope.safetensors")
    rope = hjepa.VisionRoPE2D(8, 8, 4, 10000.0)
    q, k = rope(tensors["in/rope_q"], tensors["in/rope_k"])
    other, _ = rope(tensors["in/rope_q_3x5"], tensors["in/rope_q_3x5"], num_patches_h=3, num_patches_w=5)
    for name, value in {"q": q, "k": k, "q_3x5": other, "freqs_h": rope.freqs_h, "freqs_w": rope.freqs_w}.items():
        np.testing.assert_allclose(value, tensors[f"out/rope_{name}"], rtol=1e-5, atol=1e-6, err_msg=name)
    assert not rope.state_dict()
    with pytest.raises(ValueError, match="multiple of 4"):
        hjepa.VisionRoPE2D(6)


def test_a_frame_encoder_is_made_by_name_and_plans_for_a_batch_of_one():
    small = {"patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2}
    encoder = hjepa.FrameEncoder(encoder_type="vit_tiny_patch16_224", img_size=16, embed_dim=8, vit=small)
    assert encoder.encoder.vit.cls_token.shape == (1, 1, 8)
    predictor = hjepa.ActionPredictor(embed_dim=8, action_dim=2, depth=1, num_heads=2)
    planner = hjepa.CEMPlanner(encoder, predictor, 2, 3, 8, 3, 2)
    assert planner.plan(torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16)).shape == (2,)
    with pytest.raises(ValueError, match="embed_dim=9"):
        hjepa.FrameEncoder("vit_tiny_patch16_224", embed_dim=9)
