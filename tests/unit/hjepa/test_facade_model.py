"""The original's model as a torch module."""

import copy
import json
import pathlib
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from jaxtrain.systems import hjepa

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hjepa"
NAMES = sorted(path.stem for path in GOLDEN.glob("model_*.json"))
SMALL = {"encoder_type": "vit_tiny_patch16_224", "img_size": 32, "embed_dim": 24, "predictor_depth": 1}
SMALL |= {"predictor_num_heads": 2, "vit": {"patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}}


def golden(name: str):
    case = json.loads((GOLDEN / f"{name}.json").read_text())
    tensors = load_file(GOLDEN / f"{name}.safetensors")
    vit = case.get("encoder", case)["vit_kwargs"]
    model = hjepa.HJEPA(**{"encoder_type": "vit_tiny_patch16_224", **case["hjepa_kwargs"]}, vit=vit)
    state = {key.removeprefix("param/"): x for key, x in tensors.items() if key.startswith("param/")}
    model.load_state_dict(state, strict=True)
    return case, tensors, model


@pytest.mark.parametrize("name", NAMES)
def test_forward_and_training_gradients_are_the_originals(name):
    case, tensors, model = golden(name)
    model.eval()
    images, mask = tensors["in/images"], tensors["in/mask"]
    with torch.no_grad():
        found = model(images, mask)
    assert set(found) == {"predictions", "targets", "masks_valid", "context_features", "target_features"}
    for key, value in tensors.items():
        group, _, rest = key.removeprefix("out/").partition("/")
        if key.startswith("out/") and group in ("predictions", "targets", "masks_valid"):
            np.testing.assert_allclose(found[group][int(rest)], value, rtol=1e-4, atol=1e-5, err_msg=key)
        elif key.startswith("out/extract_features"):
            encoder, level = rest.split("/")
            got = model.extract_features(images, int(level), use_target_encoder=encoder == "target")
            np.testing.assert_allclose(got, value, rtol=1e-4, atol=1e-5, err_msg=key)
    loss = hjepa.create_loss_from_config(
        {"loss": case["loss_config"], "model": {"num_hierarchies": model.num_hierarchies}}
    )
    if "in/sigreg_slices" in tensors:
        loss.sigreg_loss.slices = lambda width: tensors["in/sigreg_slices"]
    model.train()
    out = model(images, mask)
    loss(out["predictions"], out["targets"], context_features=out["context_features"])["loss"].backward()
    checked = 0
    for key, parameter in model.named_parameters():
        if f"grad/{key}" in tensors:
            wanted = tensors[f"grad/{key}"]
            np.testing.assert_allclose(parameter.grad, wanted, rtol=1e-3, atol=3e-6, err_msg=key)
            checked += 1
        elif parameter.grad is not None:
            assert not parameter.grad.any(), key
    assert checked > 20


def test_attributes_are_the_constructors_arguments():
    model = hjepa.HJEPA(**SMALL, use_fpn=True, fpn_feature_dim=8)
    assert (model.num_hierarchies, model.embed_dim, model.use_fpn, model.fpn_feature_dim) == (3, 24, True, 8)
    assert (model.ema_momentum, model.ema_momentum_end, model.ema_warmup_steps) == (0.996, 1.0, 1000)
    assert (model.get_num_patches(), model.get_patch_size()) == (16, 8)
    assert not any(parameter.requires_grad for parameter in model.target_encoder.parameters())
    for a, b in zip(model.context_encoder.parameters(), model.target_encoder.parameters(), strict=True):
        assert torch.equal(a, b)
    assert hjepa.HJEPA(**SMALL, use_target_encoder=False).target_encoder is None
    model = hjepa.HJEPA(**SMALL, use_layerscale=True, drop_path_rate=0.1, use_gradient_checkpointing=True)
    assert (model.predictor_depth, model.drop_path_rate, model.layerscale_init) == (1, 0.1, 1e-5)
    assert model.use_layerscale
    assert model.context_encoder.use_layerscale
    assert model.predictor.use_gradient_checkpointing


def test_a_deit_has_the_shapes_of_its_vit():
    encoders = [hjepa.ContextEncoder(f"{kind}_tiny_patch16_224", 32) for kind in ("deit", "vit")]
    deit, vit = ({key: x.shape for key, x in encoder.state_dict().items()} for encoder in encoders)
    assert deit == vit


def test_its_parts_are_the_public_classes():
    model = hjepa.HJEPA(**SMALL, ema_momentum=0.9)
    assert isinstance(model.context_encoder, hjepa.ContextEncoder)
    assert isinstance(model.target_encoder, hjepa.TargetEncoder)
    assert isinstance(model.predictor, hjepa.Predictor)
    for encoder in (model.context_encoder, model.target_encoder):
        assert (encoder.embed_dim, encoder.num_patches, encoder.patch_size) == (24, 16, 8)
    assert model.target_encoder.update_from_context_encoder(model.context_encoder, 0) == 0.9
    images = torch.randn(1, 3, 32, 32, requires_grad=True)
    assert not model.target_encoder(images).requires_grad
    assert model.context_encoder(images).requires_grad


def test_the_encoder_has_timms_attributes():
    vit = hjepa.HJEPA(**SMALL, drop_path_rate=0.1).context_encoder.vit
    embed, block = vit.patch_embed, vit.blocks[0]
    assert (embed.num_patches, embed.patch_size, embed.grid_size, embed.img_size) == (16, (8, 8), (4, 4), (32, 32))
    assert (vit.embed_dim, vit.num_features, vit.num_prefix_tokens) == (24, 24, 1)
    assert isinstance(vit.head, torch.nn.Identity)
    assert (block.attn.head_dim, block.attn.scale) == (12, 12**-0.5)
    assert all(hasattr(block, name) for name in ("drop_path1", "drop_path2", "ls1", "ls2"))
    assert vit.pos_drop.p == block.attn.proj_drop.p == 0
    images = torch.randn(1, 3, 32, 32)
    assert torch.equal(vit.eval().forward_features(images), vit(images))


def test_it_is_seeded_copied_and_pickled_as_a_torch_module():
    torch.manual_seed(3)
    model = hjepa.HJEPA(**SMALL)
    torch.manual_seed(3)
    again = hjepa.HJEPA(**SMALL)
    images, mask = torch.randn(2, 3, 32, 32), torch.zeros(2, 16, dtype=torch.bool)
    mask[:, 4:10] = True
    wanted = model.eval()(images, mask)["predictions"][2]
    for twin in (again, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin.eval()(images, mask)["predictions"][2], wanted)
    assert model.half().context_encoder.vit.cls_token.dtype is torch.float16


def test_one_level_without_projection():
    model = hjepa.HJEPA(**SMALL)
    mask = torch.zeros(2, 16)
    mask[0, :5] = mask[1, :3] = 1
    found = model(torch.randn(2, 3, 32, 32), mask, return_all_levels=False)
    assert [x.shape for x in found["predictions"]] == [(2, 5, 24)]
    assert found["mask_valid"].sum(1).tolist() == [5, 3]


def test_one_level_without_projection_takes_one_masked_patch():
    mask = torch.zeros(1, 16)
    mask[0, 7] = 1
    found = hjepa.HJEPA(**SMALL)(torch.randn(1, 3, 32, 32), mask, return_all_levels=False)
    assert found["predictions"][0].shape == (1, 1, 24)


def test_the_target_follows_with_the_momentum_of_the_step():
    model = hjepa.HJEPA(**SMALL, ema_momentum=0.5, ema_warmup_steps=10)
    with torch.no_grad():
        model.context_encoder.vit.cls_token.fill_(1.0)
        model.target_encoder.vit.cls_token.zero_()
    assert model.update_target_encoder(5) == pytest.approx(0.75)
    assert model.target_encoder.vit.cls_token.mean().item() == pytest.approx(0.25)
    assert model.update_target_encoder(50) == 1.0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: hjepa.HJEPA(**SMALL | {"num_hierarchies": 5}), "num_hierarchies: 5"),
        (lambda: hjepa.HJEPA(**SMALL | {"embed_dim": 32}), "not the encoder's width 24"),
        (lambda: hjepa.HJEPA(**SMALL, fpn_fusion_method="max"), "fusion_method"),
        (lambda: hjepa.HJEPA(**SMALL, projection_norm="rms"), "projection_norm"),
        (lambda: hjepa.HJEPA(encoder_type="resnet50"), "'resnet50' is unknown"),
        (lambda: hjepa.HJEPA(**SMALL).extract_features(torch.zeros(1, 3, 32, 32), level=3), "level=3 is outside"),
        (lambda: hjepa.HJEPA(**SMALL)(torch.zeros(1, 3, 32, 32), torch.zeros(1, 16)), "at most 0 patches"),
    ],
)
def test_mistakes_are_value_errors(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def test_encoders_alone():
    context, target = hjepa.create_encoder(
        "vit_tiny_patch16_224", 32, vit=SMALL["vit"], ema_momentum=0.9, ema_warmup_steps=10, use_rope=True
    )
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(context(images), target(images))
    assert not target(images).requires_grad
    assert target.update_from_context_encoder(context, 4) == pytest.approx(0.94)
    predictor = hjepa.create_predictor(24, depth=1, num_heads=2)
    assert predictor(context(images)[:, 1:], torch.arange(3).expand(2, 3)).shape == (2, 3, 24)


def test_the_factories_take_what_the_class_takes():
    config = {"model": {"encoder_type": "vit_tiny_patch16_224", "ema": {"momentum_warmup_epochs": 3}}}
    config |= {"data": {"image_size": 32}}
    model = hjepa.create_hjepa_from_config(config)
    assert (model.ema_warmup_steps, model.get_num_patches()) == (3000, 4)
    assert hjepa.create_hjepa("vit_tiny_patch16_224", 32, 192).img_size == 32


def test_a_model_from_a_config_reads_its_sizes_only():
    config = {"model": {"encoder_type": "vit_tiny_patch16_224", "vit": SMALL["vit"], "ema": {"momentum": 0.9}}}
    config |= {"data": {"image_size": 32, "dataset": "synthetic"}, "loss": {"type": "custom"}}
    config |= {"training": {"optimizer": "lion", "drop_path_rate": 0.2, "epochs": 0}}
    model = hjepa.create_hjepa_from_config(config)
    assert (model.img_size, model.embed_dim, model.ema_momentum) == (32, 24, 0.9)
    assert max(getattr(module, "drop_prob", 0.0) for module in model.modules()) == 0.2


@pytest.mark.parametrize("name", ["create_hjepa_from_config", "create_lewm"])
def test_factories_follow_torchs_seed(name):
    config = {"encoder_type": "vit_tiny_patch16_224", "vit": SMALL["vit"]}
    build = {
        "create_hjepa_from_config": lambda: hjepa.create_hjepa_from_config(
            {"model": config, "data": {"image_size": 32}}
        ),
        "create_lewm": lambda: hjepa.create_lewm(
            **config, img_size=32, embed_dim=None, predictor_depth=1, predictor_num_heads=2
        ),
    }[name]
    drawn = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        drawn.append(torch.cat([parameter.flatten() for parameter in build().parameters()]))
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_a_dataset_is_indexed_as_a_sequence(tmp_path):
    for name in ("train/a", "train/b"):
        (tmp_path / name).mkdir(parents=True)
        Image.new("RGB", (40, 36)).save(tmp_path / name / "0.png")
    data = hjepa.build_dataset("ImageNet", tmp_path, image_size=32)
    assert [label for _, label in data] == [0, 1]
    assert data[-1][1] == 1
    with pytest.raises(IndexError):
        data[2]


def test_a_folder_that_is_not_there_is_a_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="is no folder"):
        hjepa.build_dataset("imagenet", tmp_path / "none")
    (tmp_path / "train/a").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="val: no class folders"):
        hjepa.build_dataset("imagenet", tmp_path, split="val")


def test_a_dataset_names_its_classes(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.new("RGB", (40, 36)).save(tmp_path / "train" / name / "0.png")
    data = hjepa.build_dataset("imagenet", tmp_path, image_size=32)
    assert (data.classes, data.class_to_idx) == (["a", "b", "c"], {"a": 0, "b": 1, "c": 2})
    (tmp_path / "list.txt").write_text("c\nb\n")
    few = hjepa.build_dataset("imagenet100", tmp_path, image_size=32, class_list=tmp_path / "list.txt")
    assert few.class_to_idx == {"b": 0, "c": 1}
    assert hjepa.build_dataset("digits", "").classes[9] == "9"


def test_rotated_attention_around_timms_is_the_encoders():
    torch.manual_seed(0)
    encoder = hjepa.ContextEncoder("vit_tiny_patch16_224", 32, use_rope=True, vit=SMALL["vit"])
    block, tokens = encoder.vit.blocks[0], torch.randn(2, 1 + encoder.num_patches, encoder.embed_dim)
    plain = hjepa.ContextEncoder("vit_tiny_patch16_224", 32, vit=SMALL["vit"]).vit.blocks[0].attn
    wrapped = hjepa.RoPEAttentionWrapper(plain, encoder.rope)
    wrapped.load_state_dict(block.attn.state_dict())
    seen = []
    handle = block.attn.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    encoder(torch.randn(2, 3, 32, 32))
    handle.remove()
    torch.testing.assert_close(wrapped(seen[0][0]), seen[0][1])
    assert not torch.allclose(plain(seen[0][0]), seen[0][1])
    assert wrapped(tokens, is_causal=True).shape == tokens.shape


def test_the_blocks_are_those_of_the_predictors():
    block = hjepa.Predictor(8, 2, 2, dropout=0.1, drop_path_rate=0.2).blocks[1]
    assert isinstance(block, hjepa.PredictorBlock)
    assert (block.attn.dropout, block.mlp[2].p, block.drop_path.drop_prob) == (0.1, 0.1, 0.2)
    step = hjepa.AdaLNZeroBlock(8, 2, 4)
    x, action = torch.randn(2, 3, 8), torch.randn(2, 3, 4)
    assert torch.equal(step(x, action), x)  # zero gates
    with torch.no_grad():
        step.modulation.bias.normal_()
    later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    x2 = x.clone()
    x2[:, 2] = torch.randn(2, 8)
    torch.testing.assert_close(step(x, action, later)[:, :2], step(x2, action, later)[:, :2])
    assert not torch.allclose(step(x, action)[:, :2], step(x2, action)[:, :2])
