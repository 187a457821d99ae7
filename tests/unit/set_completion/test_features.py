import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.nn import Rngs
from jaxtrain.systems.set_completion import TASKS, features, steering
from jaxtrain.systems.set_completion.data import build_data
from jaxtrain.systems.set_completion.evals import report
from jaxtrain.systems.set_completion.sae import SparseAutoencoder
from jaxtrain.train.checkpoint import init_from
from tests.contract.tasks import tiny
from tests.parity import set_training as parity
from tests.unit.set_completion.golden import FOLDER, config, table
from torch_bridge import files

SETTINGS = config("splat_sae_tiny")
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def model():
    return features.build_model(SETTINGS, nnx.Rngs(0))


@pytest.fixture(scope="module")
def batches():
    source = build_data(SETTINGS, "train")
    rows = lambda i: np.arange(32 * i, 32 * (i + 1))
    return [{**source[rows(i)], "index": rows(i), "valid": np.ones(32, bool)} for i in range(4)]


def test_no_update_counts_until_the_buffer_holds_enough(batches):
    model = features.build_model(SETTINGS, nnx.Rngs(0))  # steps_before_train is 96, a batch has 32
    weight = nnx.jit(lambda model, b, key: features.loss(model, b, SETTINGS, Rngs(key)).weight)
    weights = [float(weight(model, b, jax.random.key(i))) for i, b in enumerate(batches)]
    assert weights == [0.0, 0.0, 64.0, 64.0]
    assert int(model.updates[...]) == 2


def test_padded_rows_never_reach_the_buffer(batches):
    model = features.build_model(SETTINGS, nnx.Rngs(0))
    features.loss(model, {**batches[0], "valid": np.arange(32) < 10}, SETTINGS, Rngs(jax.random.key(0)))
    assert int(model.buffer.count()) == 10


def test_a_step_that_may_be_skipped_does_not_copy_the_ring_buffer(tmp_path):
    """Keeping the old rows in case of NaN would read and write all of them at every step."""
    from jaxtrain.train.trainer import Trainer

    settings = config("splat_sae_tiny", "shard.devices=1", f"run.dir={tmp_path}", "sae.buffer_size=777")
    trainer = Trainer(config=settings, task=TASKS["sae"], abstract=True)
    text = str(jax.make_jaxpr(trainer.program.step())(*trainer.program.abstract_arguments()))
    assert "f32[777,16]" in text
    assert not re.search(r":f32\[777,16\] = select_n", text)
    assert re.search(r":f32\[64,16\] = select_n", text)  # as it is done for what a NaN would spoil


def test_dead_features_are_revived_at_the_listed_updates_only():
    model = features.build_model(SETTINGS, nnx.Rngs(0))
    model.sae.usage_ema[...] = jnp.full(64, 0.5).at[7].set(0.0)
    model.buffer.add(jax.random.normal(jax.random.key(0), (200, 16)))
    assert not features.after_update(model, jnp.int32(14), SETTINGS)["sae.encoder.bias"].any()
    stale = features.after_update(model, jnp.int32(15), SETTINGS)
    assert np.flatnonzero(stale["sae.encoder.bias"]).tolist() == [7]
    assert np.asarray(stale["sae.encoder.weight"]).all(1).nonzero()[0].tolist() == [7]
    np.testing.assert_allclose(jnp.linalg.norm(model.sae.encoder.weight[...][7]), 0.2, rtol=1e-5)


def test_only_the_autoencoder_is_trained_and_its_decoder_not_under_compat_original():
    original = config("splat_sae_tiny", "compat=original")
    keys = ["primary.output_layer.weight", "sae.encoder.weight", "sae.decoder.weight", "sae.decoder.bias"]
    assert [features.trainable(key, SETTINGS) for key in keys] == [False, True, True, False]
    assert [features.trainable(key, original) for key in keys] == [False, True, False, False]


def test_a_primary_of_other_sizes_is_refused_with_the_differences(tmp_path):
    from safetensors.numpy import save_file

    save_file({"output_layer.weight": np.zeros((140, 8), np.float32)}, tmp_path / "primary.safetensors")
    settings = config("splat_sae_tiny", f"sae.primary={tmp_path}/primary.safetensors")
    with pytest.raises(UserError, match=r"output_layer.weight is \[140, 8\], the model wants \[140, 16\]"):
        features.initial_weights(settings)


def _recorded():
    from safetensors.numpy import load_file

    case, tensors = table("sae_eval_hooks"), load_file(FOLDER / "sae_eval_hooks.safetensors")
    primary = parity.build_model(case["primary_config"], parity.group(tensors, "param/primary."))
    sae = parity.build_sae(case["sae_config"], parity.group(tensors, "param/sae."), 8)
    return case, primary, sae, [parity.group(tensors, f"in/b{i}.") for i in range(3)]


def test_evaluation_metrics_equal_the_originals():
    case, primary, sae, batches = _recorded()
    model = SETTINGS.model.model_copy(update={"vocab_size": 20, "weapon_vocab_size": 5, "hidden_dim": 8})
    settings = SETTINGS.model_copy(update={"compat": "original", "model": model})
    pair = nnx.Dict(primary=primary, sae=sae)
    sums_of = nnx.jit(lambda pair, batch: features.eval_statistics(features.outputs(pair, batch), batch, settings).sums)
    sums = {}
    for given in batches:
        targets = np.where(given["targets"] == 19, -1, given["targets"])
        batch = {"inputs": given["ability_tokens"], "weapon": given["weapon_token"], "targets": targets}
        batch["valid"] = np.ones(len(targets), bool)
        new = sums_of(pair, batch).items()
        sums = {name: np.asarray(value, np.float64) + sums.get(name, 0.0) for name, value in new}
    got = features.compute(sums, {}, settings)
    recorded = case["evaluate_sae_model(description='Test', dead_neuron_threshold=1e-6)"]
    names = {"test_mse_loss": "mse", "test_l1_loss": "l1", "test_l0_sparsity": "l0_sparsity"}
    names |= {"test_feature_magnitude": "feature_magnitude", "test_miracle_distance": "miracle_distance"}
    for name, ours in names.items():
        assert got[ours] == pytest.approx(recorded[name], rel=1e-5), name
    impact = case["evaluate_reconstruction_impact"]
    for name in impact.keys() & got.keys():
        assert got[name] == pytest.approx(impact[name], rel=1e-4), name
    assert len(impact.keys() & got.keys()) == 8


def test_steering_refuses_a_feature_that_is_not_there():
    _, primary, sae, batches = _recorded()
    with pytest.raises(UserError, match="features 0 to 31"):
        steering.steer(primary, sae, batches[0]["ability_tokens"], batches[0]["weapon_token"], feature=32, value=1.0)


def test_raising_a_feature_raises_the_tokens_that_its_direction_points_at():
    _, primary, sae, batches = _recorded()
    given = (primary, sae, batches[0]["ability_tokens"], batches[0]["weapon_token"])
    change = np.asarray(steering.change(*given, batches[0]["ability_tokens"] == 19, feature=3, value=6.0))
    influence = np.asarray(primary.output_layer.weight[...] @ sae.directions())[:, 3]
    rows = np.abs(change).max(1) > 1e-6
    assert rows.any()
    assert (np.sign(change[rows]) == np.sign(influence)).all()


def test_the_dashboard_is_one_well_formed_page_that_may_load_nothing(model, tmp_path):
    source = build_data(SETTINGS, "validation")
    files = report.feature_report(model, source, SETTINGS, tmp_path)
    page = next(path for path in files if path.suffix == ".html").read_text()
    root = ElementTree.fromstring(page.split("\n", 1)[1])  # well-formed: no tag left open, no bare ampersand
    assert "default-src 'none'" in page
    assert "<script" not in page
    assert re.findall(r'(?:src|href|action|srcset)="([^"]*)"|url\(|@import', page) == ["data:,"]
    assert len(root.findall(".//details")) >= 32


@pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine to open the page in")
def test_the_dashboard_opens_in_a_browser_without_errors_or_requests(model, tmp_path):
    source = build_data(SETTINGS, "validation")
    page = next(p for p in report.feature_report(model, source, SETTINGS, tmp_path) if p.suffix == ".html")
    options = "--headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom"
    command = [BROWSER, *options.split(), f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout.count("<details") >= 32
    assert "default-src 'none'" in page.read_text()  # every request would be refused, and said so on the console
    assert ":CONSOLE" not in shown.stderr


def test_an_autoencoder_that_ignores_its_input_is_reported_dead(tmp_path):
    model = features.build_model(SETTINGS, nnx.Rngs(0))
    model.sae.encoder.bias[...] = jnp.full(64, -1e6)
    source = build_data(SETTINGS, "validation")
    page = report.feature_report(model, source, SETTINGS, tmp_path)[0].read_text()
    assert '<td>features dead</td><td class="n">64</td>' in page


def test_a_new_dictionary_has_unit_columns():
    sae = SparseAutoencoder(16, 4, rngs=nnx.Rngs(3))
    np.testing.assert_allclose(jnp.linalg.norm(sae.decoder.weight[...], axis=0), 1.0, atol=1e-6)


def test_a_file_of_the_autoencoder_alone_starts_it_and_leaves_the_frozen_model(tmp_path):
    trainer = tiny("set_completion.sae", tmp_path)
    before = trainer.state_dict()
    own = {key.removeprefix("sae."): np.asarray(value) + 1 for key, value in before.items() if key.startswith("sae.")}
    pytest.importorskip("torch", reason="torch writes the file")
    files.save(own, tmp_path / "sae_model_final.pth")
    origin = init_from.apply(trainer.program, tmp_path / "sae_model_final.pth")
    assert "holds `sae` alone" in origin.lines[-1]
    for key, value in trainer.state_dict().items():
        wanted = own[key.removeprefix("sae.")] if key.startswith("sae.") else before[key]
        np.testing.assert_array_equal(value, wanted)
