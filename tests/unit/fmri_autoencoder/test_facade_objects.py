"""A user's session with the original's model, losses and metrics, as torch has them."""

import copy
import io
import pathlib
import pickle

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch.nn import functional

from jaxtrain.systems import fmri_autoencoder as giblet
from jaxtrain.systems.fmri_autoencoder import torch_gen1
from jaxtrain.systems.fmri_autoencoder.original import first_generation

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "fmri_autoencoder"

GEN1 = {"video_height": 18, "video_width": 32, "audio_mels": 8, "text_dim": 6, "n_voxels": 7, "bottleneck_dim": 12}
GEN1 |= {"video_features": 6, "audio_features": 5, "text_features": 4, "decoder_hidden_dim": 8}
GEN1 |= {"widths": {16384: 16, 4096: 12, 512: 8}, "channel_widths": {32: 2, 64: 2, 128: 3, 256: 3}}
HEAD = {
    "video_height": 3,
    "video_width": 4,
    "text_dim": 6,
    "n_voxels": 7,
    "use_encodec": True,
    "audio_frames_per_tr": 3,
}
HEAD |= {"video_frames_per_tr": 2, "video_features": 9, "audio_features": 10, "text_features": 11}
HEAD |= {"widths": {16384: 40, 8000: 36, 4096: 32, 2048: 28, 1536: 24, 1024: 20, 512: 16}}
OUTPUTS = ["bottleneck", "predicted_fmri", "video_recon", "audio_recon", "text_recon"]
LOSSES = ["video_loss", "audio_loss", "text_loss", "reconstruction_loss", "fmri_loss", "total_loss"]


def batch(generation: str, rows: int = 4) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    rand = lambda *shape: torch.rand(rows, *shape, generator=draw)
    if generation == "gen1":
        return {"video": rand(3, 18, 32), "audio": rand(8), "text": rand(6), "fmri": rand(7)}
    codes = torch.randint(0, 1024, (rows, 24), generator=draw)
    return {"video": rand(72), "audio": codes, "text": rand(6), "fmri": rand(7)}


def inputs(generation: str) -> list[torch.Tensor]:
    return [batch(generation)[name] for name in ("video", "audio", "text")]


@pytest.fixture(params=["gen1", "head"])
def generation(request) -> str:
    return request.param


@pytest.fixture
def model(generation) -> torch.nn.Module:
    torch.manual_seed(0)
    return giblet.create_autoencoder(**(GEN1 if generation == "gen1" else HEAD))


def test_the_readmes_model_is_counted_without_being_allocated():
    with torch.device("meta"):
        model = giblet.create_autoencoder()
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_974_067_762
    count = model.get_parameter_count()
    assert (count["total"], count["encoder"]["total"]) == (1_974_067_762, 1_595_910_386)
    assert (model.n_voxels, model.bottleneck_dim, model.training) == (85810, 8000, True)


def test_the_model_is_a_torch_module(model, generation):
    assert isinstance(model, torch.nn.Module)
    out = model(*inputs(generation), batch(generation)["fmri"])
    assert list(out) == OUTPUTS + LOSSES
    out["total_loss"].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert out["predicted_fmri"].shape == (4, 7)
    parts = out["video_loss"] + out["audio_loss"] + out["text_loss"] + out["fmri_loss"]
    torch.testing.assert_close(out["total_loss"], parts)


def test_evaluation_gives_the_outputs_alone_and_the_parts_agree(model, generation):
    model.eval()
    with torch.no_grad():
        out = model(*inputs(generation))
        bottleneck, voxels = model.encode_only(*inputs(generation), return_voxels=True)
        video, audio, text = model.decode_only(bottleneck)
    assert list(out) == OUTPUTS
    for name, value in zip(OUTPUTS, (bottleneck, voxels, video, audio, text), strict=True):
        torch.testing.assert_close(out[name], value)
    assert model.encode_only(*inputs(generation))[1] is None


def test_the_decoders_layers_come_in_the_originals_order_and_the_video_as_its_layer_gives_it(model, generation):
    decoder, bottleneck = model.decoder.eval(), torch.rand(2, 12 if generation == "gen1" else 28)
    layers = decoder.get_layer_outputs(bottleneck)
    trunk = decoder.trunk_layers
    branches = [f"layer{trunk[-1] + 1}_{kind}" for kind in ("video", "audio", "text")]
    assert list(layers) == [*(f"layer{n}" for n in trunk), *branches, "video", "audio", "text"]
    torch.testing.assert_close(layers["video"], decoder.decode_video_only(bottleneck))


def test_copies_and_pickles_compute_the_same(model, generation):
    model.eval()
    again = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), again):
        torch.testing.assert_close(
            other(*inputs(generation))["predicted_fmri"], model(*inputs(generation))["predicted_fmri"]
        )
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True), strict=True)


def test_the_same_seed_draws_the_same_weights(generation):
    options = GEN1 if generation == "gen1" else HEAD
    states = []
    for _ in range(2):
        torch.manual_seed(3)
        states.append(giblet.create_autoencoder(**options).state_dict())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_wrong_audio_raises_as_in_the_original():
    model = giblet.create_autoencoder(**HEAD)
    with pytest.raises(ValueError, match=r"wanted \[batch, 24\]"):
        model(torch.rand(2, 72), torch.rand(2, 23), torch.rand(2, 6))


def test_the_parts_are_modules_of_their_own():
    video = giblet.VideoEncoder(2 * 3 * 4 * 3, 9, widths={4096: 32, 2048: 28}).eval()
    assert video(torch.rand(2, 72)).shape == video(torch.rand(2, 2, 3, 12)).shape == (2, 9)
    audio = giblet.AudioEncoder(output_features=5, frames_per_tr=3, use_encodec=True).eval()
    assert audio(torch.randint(0, 1024, (2, 24))).shape == (2, 5)
    assert giblet.TextEncoder(6, 4).eval()(torch.rand(2, 6)).shape == (2, 4)
    decoder = giblet.SherlockDecoder(12, video_dim=30, audio_dim=8, text_dim=6, hidden_dim=8)
    assert [tuple(part.shape) for part in decoder(torch.rand(2, 12))] == [(2, 30), (2, 8), (2, 6)]
    assert decoder.count_parameters()["total"] == sum(parameter.numel() for parameter in decoder.parameters())


PARTS = {
    "VideoEncoder": {"input_dim": 72, "output_features": 9, "gradient_checkpointing": True},
    "AudioEncoder": {"input_mels": 5, "output_features": 9, "frames_per_tr": 3, "use_encodec": True},
    "TextEncoder": {"input_dim": 6, "output_features": 4},
    "MultimodalEncoder": {name: HEAD[name] for name in ("video_height", "n_voxels", "use_encodec", "widths")},
    "SherlockEncoder": {name: GEN1[name] for name in ("video_height", "video_width", "bottleneck_dim", "widths")},
    "MultimodalDecoder": {"video_dim": 30, "dropout": 0.1, "audio_frames_per_tr": 1, "widths": HEAD["widths"]},
    "SherlockDecoder": {"bottleneck_dim": 20, "video_dim": 30, "audio_dim": 5, "hidden_dim": 12, "dropout": 0.1},
}


@pytest.mark.parametrize("name", PARTS)
def test_a_parts_arguments_are_its_attributes(name):
    with torch.device("meta"):
        part = getattr(giblet, name)(**PARTS[name])
    assert {key: getattr(part, key) for key in PARTS[name]} == PARTS[name]


def test_the_readmes_generation_has_encoders_and_a_decoder_under_the_originals_names():
    video = torch_gen1.VideoEncoder(3, 18, 32, 6, channel_widths=GEN1["channel_widths"]).eval()
    assert video(torch.rand(2, 3, 18, 32)).shape == (2, 6)
    audio = torch_gen1.AudioEncoder(input_mels=8, output_features=5).eval()
    assert audio(torch.rand(2, 8)).shape == (2, 5)
    assert torch_gen1.MultimodalDecoder is giblet.SherlockDecoder


def test_the_seconds_per_volume_choose_the_second_generation_and_its_frames():
    with torch.device("meta"):
        assert giblet.create_autoencoder(tr=2.0).video_frames_per_tr == 25


def test_sizes_may_be_given_by_place():
    with torch.device("meta"):
        model = giblet.create_autoencoder(18, 32, 8, 6, 7)
    assert (model.video_height, model.video_width, model.audio_mels, model.text_dim, model.n_voxels) == (
        18,
        32,
        8,
        6,
        7,
    )


def test_losses_are_torchs_with_gradients():
    draw = [torch.rand(4, width, requires_grad=not i % 2) for i, width in enumerate((6, 6, 5, 5, 3, 3))]
    loss, parts = giblet.ReconstructionLoss(video_weight=2.0, audio_weight=0.5)(*draw)
    video, audio, text = (functional.mse_loss(draw[i], draw[i + 1]) for i in (0, 2, 4))
    torch.testing.assert_close(loss, 2 * video + 0.5 * audio + text)
    assert torch.allclose(parts["audio_loss"], audio)
    loss.backward()
    assert all(x.grad is not None for x in draw[::2])


@pytest.mark.parametrize("shape", [(4, 6), (4, 3, 2, 5)])
def test_video_of_one_shape_is_compared_as_it_is(shape):
    video, target, rest = torch.rand(shape), torch.rand(shape), torch.rand(4, 2)
    for convert in (lambda x: x, lambda x: x.numpy()):
        _, parts = giblet.ReconstructionLoss()(*map(convert, (video, target, rest, rest, rest, rest)))
        assert float(parts["video_loss"]) == pytest.approx(float(functional.mse_loss(video, target)), rel=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_voxel_losses_equal_torchs_functions(reduction):
    prediction, target = torch.rand(4, 7, requires_grad=True), torch.rand(4, 7)
    loss = lambda kind: giblet.FMRIMatchingLoss(loss_type=kind, reduction=reduction)(prediction, target)
    torch.testing.assert_close(loss("mse"), functional.mse_loss(prediction, target, reduction=reduction))
    torch.testing.assert_close(loss("mae"), functional.l1_loss(prediction, target, reduction=reduction))
    cosine = 1 - functional.cosine_similarity(prediction, target)
    torch.testing.assert_close(loss("correlation"), cosine if reduction == "none" else getattr(cosine, reduction)())
    with pytest.raises(ValueError, match="wanted one of mse, mae, correlation"):
        loss("spearman")


def test_the_combined_loss_of_a_models_outputs(model, generation):
    data = batch(generation)
    outputs = model(*inputs(generation))
    kinds = (giblet.CombinedAutoEncoderLoss, giblet.NormalizedCombinedAutoEncoderLoss)
    for kind in kinds:
        criterion = kind(reconstruction_weight=2.0, fmri_weight=0.5)
        loss, parts = criterion(outputs, data["video"], data["audio"], data["text"], data["fmri"])
        torch.testing.assert_close(loss, 2 * parts["reconstruction_loss"] + 0.5 * parts["fmri_loss"])
        alone, without = criterion(outputs, data["video"], data["audio"], data["text"])
        torch.testing.assert_close(alone, 2 * without["reconstruction_loss"])
        assert "fmri_loss" not in without
    loss.backward()
    assert parts["fmri_std"] == data["fmri"].std() + 1e-8


def test_numpy_arrays_go_to_the_same_losses_in_jax():
    arrays = [torch.rand(4, 3).numpy() for _ in range(6)]
    loss, _ = giblet.ReconstructionLoss()(*arrays)
    same, _ = giblet.ReconstructionLoss()(*map(torch.from_numpy, arrays))
    assert float(loss) == pytest.approx(float(same), rel=1e-6)
    assert not isinstance(loss, torch.Tensor)


def test_metrics_are_torchs():
    prediction, target = torch.rand(5, 9), torch.rand(5, 9)
    correlation = giblet.compute_correlation_metric(prediction, target)
    pearson = [torch.corrcoef(torch.stack(pair))[0, 1] for pair in zip(prediction, target, strict=True)]
    torch.testing.assert_close(correlation, torch.stack(pearson), atol=1e-5, rtol=1e-5)
    assert torch.equal(giblet.compute_r2_score(target, target), torch.ones(5))
    assert giblet.compute_correlation_metric(torch.ones(5, 9), target).abs().max() == 0


def test_the_metrics_call_their_argument_as_the_original_does():
    prediction, target = torch.rand(5, 9), torch.rand(5, 9)
    found = giblet.compute_correlation_metric(predicted=prediction, target=target, dim=1)
    assert torch.equal(found, giblet.compute_correlation_metric(prediction, target))


def test_a_checkpoint_in_half_precision_makes_a_float32_model(model, generation, tmp_path):
    model.bfloat16().save_checkpoint(tmp_path / "m.pt", epoch=0)
    rest = model.options.model_dump(exclude=set(model.SAVED))
    again, _ = type(model).load_checkpoint(tmp_path / "m.pt", **rest)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}


def test_dropout_is_switched_off_through_its_modules(model, generation):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    first, second = (model(*inputs(generation))["predicted_fmri"] for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("make", [giblet.SherlockAutoencoder, giblet.MultimodalEncoder, giblet.create_autoencoder])
def test_an_unknown_keyword_is_a_type_error(make):
    with pytest.raises(TypeError, match="nonsense: unknown key"):
        make(nonsense=1)


def test_the_perceptual_loss_is_refused_as_in_the_original():
    with pytest.raises(NotImplementedError, match="PerceptualLoss"):
        giblet.PerceptualLoss()


def test_the_responses_functions_are_the_originals():
    tensors = load_file(GOLDEN / "data_pipeline.safetensors")
    np.testing.assert_allclose(giblet.get_canonical_hrf(2.0), tensors["hrf/kernel_tr2.0"], atol=1e-7)
    kernel = giblet.get_canonical_hrf(1.5)
    assert (len(kernel), round(kernel.sum(), 3), giblet.get_hrf_peak_latency(1.5)) == (21, 1.803, 6.0)
    impulse = np.zeros((60, 1), np.float32)
    impulse[30] = 1
    assert giblet.convolve_with_padding(impulse).argmax() == 24
    assert giblet.apply_hrf(impulse, mode="causal").argmax() == 34
    for name in ("x1", "x2", "x3", "xi"):
        given = tensors[f"hrf/in/{name}"]
        for kind, found in (
            ("padded", giblet.convolve_with_padding(given)),
            ("same", giblet.apply_hrf(given)),
            ("full", giblet.apply_hrf(given, mode="full")),
        ):
            np.testing.assert_allclose(found, tensors[f"hrf/out/{kind}_{name}"], rtol=1e-5, atol=1e-6, err_msg=kind)
    with pytest.raises(ValueError, match="wanted same, full or causal"):
        giblet.apply_hrf(impulse, mode="valid")


@pytest.mark.parametrize("responds", [False, True])
def test_aligned_arrays_are_the_originals(responds):
    tensors = load_file(GOLDEN / "data_pipeline.safetensors")
    given = [tensors[f"align/in/{name}"] for name in ("video", "audio_codes2d", "text", "fmri")]
    found = giblet.align_all_modalities(*given, apply_hrf_conv=responds)
    for name in ("video", "audio", "text", "fmri"):
        wanted = tensors[f"align/codes2d/hrf{responds:d}/{name}"]
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-6, err_msg=name)
    assert found["n_trs"] == len(found["fmri"])
    assert giblet.get_alignment_info(found)["video"]["shape"] == found["video"].shape


def test_a_models_summary_counts_its_parameters(tmp_path):
    text = giblet.create_model_summary(torch.nn.Linear(3, 2), tmp_path / "summary.txt")
    assert text.splitlines()[-1] == "parameters: 8, of which 8 are trained"
    assert (tmp_path / "summary.txt").read_text() == text + "\n"


def test_each_generation_reads_its_own_positions():
    with torch.device("meta"):
        first = first_generation.create_autoencoder(18, 32, 8, 6, 7, 5, 0.5, 0.25)
        second = giblet.create_autoencoder(18, 32, 8, 6, 7, 5, 0.5, 0.25, True, 65)
        assert type(first_generation.create_encoder()) is giblet.SherlockEncoder
        assert type(giblet.create_encoder()) is giblet.MultimodalEncoder
    assert (first.reconstruction_weight, first.fmri_weight, first.bottleneck_dim) == (0.5, 0.25, 5)
    assert (second.reconstruction_weight, second.fmri_weight, second.use_encodec) == (0.5, 0.25, True)
    audio = giblet.AudioEncoder(8, 4, 3, 5, True).eval()
    assert audio(torch.rand(2, 12)).shape == (2, 5)
