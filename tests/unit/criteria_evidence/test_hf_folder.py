"""Weights from Hugging Face folders, models exported as such, adapters as peft has them."""

import json
import types

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxtrain import config_io
from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import TASKS, hf_folder, synthetic
from jaxtrain.systems.criteria_evidence.encoder_config import to_hf
from jaxtrain.systems.criteria_evidence.encoders import build_encoder
from jaxtrain.systems.criteria_evidence.lora import Lora, add_lora, merge
from tests.unit.criteria_evidence.judge import encoder, hf_model, texts, transformers
from torch_bridge.state_dict import load_state_dict, state_dict


def settings(architecture: str, **model):
    return config_io.validate(config_io.schema(TASKS[architecture]), {"model": model})


def saved(kind: str, tmp_path, **save):
    judge = hf_model(encoder(kind))
    judge.save_pretrained(tmp_path, **save)
    return judge


def with_pretrained(architecture: str, config):
    model = TASKS[architecture].build_model(config, nnx.Rngs(0))
    load_state_dict(
        model, {k: np.asarray(v) for k, v in TASKS[architecture].initial_weights(config).items()}, strict=False
    )
    return model


@pytest.mark.parametrize("kind", ["bert", "roberta", "deberta_v3", "deberta_v2"])
def test_a_local_folder_gives_sizes_and_weights(kind, tmp_path):
    judge = saved(kind, tmp_path)
    config = settings("criteria", pretrained=str(tmp_path))
    assert config.model.encoder.hidden_size == encoder(kind).hidden_size
    model, given = with_pretrained("criteria", config), texts(encoder(kind))
    with torch.no_grad():
        want = judge(**{key: torch.from_numpy(value) for key, value in given.items()}).last_hidden_state.numpy()
    np.testing.assert_allclose(model.encoder(**given).hidden, want, atol=1e-5)


def test_a_sharded_folder_and_one_with_a_head_load_too(tmp_path):
    package = transformers()
    described = to_hf(encoder("bert"))
    torch.manual_seed(0)
    judge = package.BertForMaskedLM(package.AutoConfig.for_model(**described)).eval()
    judge.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model = with_pretrained("evidence", settings("evidence", pretrained=str(tmp_path)))
    given = texts(encoder("bert"))
    with torch.no_grad():
        want = judge.bert(**{key: torch.from_numpy(value) for key, value in given.items()}).last_hidden_state.numpy()
    np.testing.assert_allclose(model.encoder(**given).hidden, want, atol=1e-5)


def test_a_pytorch_bin_is_read_without_running_code(tmp_path):
    judge = saved("bert", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(judge.state_dict(), tmp_path / "pytorch_model.bin")
    model = with_pretrained("criteria", settings("criteria", pretrained=str(tmp_path)))
    want = judge.state_dict()["embeddings.word_embeddings.weight"].numpy()
    np.testing.assert_array_equal(state_dict(model)["encoder.embeddings.word_embeddings.weight"], want)


def test_a_saved_config_needs_the_folder_no_more(tmp_path):
    saved("bert", tmp_path / "hf")
    config = settings("criteria", pretrained=str(tmp_path / "hf"))
    again = config_io.validate(config_io.schema(TASKS["criteria"]), json.loads(config.model_dump_json()))
    (tmp_path / "hf" / "config.json").unlink()
    assert again.model.encoder == config.model.encoder


def test_a_folder_of_another_model_is_refused_by_name(tmp_path):
    saved("bert", tmp_path)
    with pytest.raises(UserError, match=r"word_embeddings\.weight is \[60, 16\], the model wants \[61, 16\]"):
        hf_folder.encoder_weights(str(tmp_path), encoder("bert").model_copy(update={"vocab_size": 61}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match="model_type 'gpt2' is unknown"):
        hf_folder.read_sizes(str(tmp_path))


def test_an_unreachable_hub_model_says_how_to_go_on_offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="Offline, download it elsewhere"):
        hf_folder.locate("nobody/nothing-here")


EXPORTS = [
    ("criteria", "bert", "AutoModelForSequenceClassification"),
    ("criteria", "roberta", "AutoModelForSequenceClassification"),
    ("evidence", "bert", "AutoModelForQuestionAnswering"),
    ("evidence", "roberta", "AutoModelForQuestionAnswering"),
]


@pytest.mark.parametrize(("architecture", "kind", "loader"), EXPORTS)
def test_an_export_gives_the_same_logits_in_transformers(architecture, kind, loader, tmp_path):
    config = settings(architecture, encoder=encoder(kind).model_dump())
    model, given = TASKS[architecture].build_model(config, nnx.Rngs(3)), texts(encoder(kind))
    hf_folder.save(architecture, config, state_dict(model), tmp_path)
    judge = getattr(transformers(), loader).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        want = judge(**{key: torch.from_numpy(value) for key, value in given.items()})
    for name, value in model(**given).items():
        np.testing.assert_allclose(value, getattr(want, name).numpy(), atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta", "deberta_v3"])
@pytest.mark.parametrize("architecture", ["criteria", "evidence", "share"])
def test_automodel_reads_the_exported_encoder(architecture, kind, tmp_path):
    options = {"family": "architectures"} if kind == "deberta_v3" else {}
    config = settings(architecture, encoder=encoder(kind).model_dump(), **options)
    model, given = TASKS[architecture].build_model(config, nnx.Rngs(3)), texts(encoder(kind))
    hf_folder.save(architecture, config, state_dict(model), tmp_path, synthetic.tokenizer())
    judge = transformers().AutoModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        want = judge(**{key: torch.from_numpy(value) for key, value in given.items()}).last_hidden_state.numpy()
    np.testing.assert_allclose(model.encoder(**given).hidden, want, atol=1e-5)


def test_an_exported_folder_is_a_starting_point_again(tmp_path):
    config = settings("criteria", encoder=encoder("bert").model_dump())
    model = TASKS["criteria"].build_model(config, nnx.Rngs(3))
    hf_folder.save("criteria", config, state_dict(model), tmp_path)
    again = with_pretrained("criteria", settings("criteria", pretrained=str(tmp_path)))
    for key, value in state_dict(model).items():
        if key.startswith("encoder."):
            np.testing.assert_array_equal(state_dict(again)[key], value)


def test_a_joint_model_has_no_folder():
    with pytest.raises(UserError, match="two encoders"):
        hf_folder.export("joint", settings("joint"), {})


# --- adapters -----------------------------------------------------------------------------------------------------


def adapted(kind: str) -> tuple[nnx.Module, Lora]:
    """An encoder with adapters that do something."""
    lora = Lora(enabled=True, r=3, alpha=6, dropout=0.0)
    model = add_lora(build_encoder(encoder(kind), rngs=nnx.Rngs(0)), lora, encoder(kind), rngs=nnx.Rngs(1))
    for key, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        if "lora_B" in key:
            variable[...] = 0.1 * jnp.ones(variable.shape)
    return model, lora


@pytest.mark.parametrize(
    ("kind", "targets"), [("bert", ["query", "value"]), ("deberta_v3", ["query_proj", "value_proj"])]
)
def test_adapters_carry_pefts_keys_and_numbers(kind, targets):
    transformers()
    import peft

    model, lora = adapted(kind)
    judge = peft.get_peft_model(
        hf_model(encoder(kind)), peft.LoraConfig(r=lora.r, lora_alpha=lora.alpha, target_modules=targets)
    )
    state = {key: torch.from_numpy(np.array(value)) for key, value in state_dict(model).items()}
    judge.load_state_dict(state, strict=True)
    given = texts(encoder(kind))
    with torch.no_grad():
        want = judge.eval()(**{key: torch.from_numpy(value) for key, value in given.items()}).last_hidden_state.numpy()
    np.testing.assert_allclose(model(**given).hidden, want, atol=1e-5)


def test_merged_adapters_do_the_same():
    model, lora = adapted("bert")
    plain = build_encoder(encoder("bert"), rngs=nnx.Rngs(5))
    merged = merge(state_dict(model), lora.alpha / lora.r)
    load_state_dict(plain, {key: np.asarray(value) for key, value in merged.items()}, strict=True)
    given = texts(encoder("bert"))
    np.testing.assert_allclose(plain(**given).hidden, model(**given).hidden, atol=2e-6)


@pytest.mark.parametrize("family", ["project", "base"])
def test_with_adapters_only_they_and_the_head_are_trained(family):
    values = {"family": family, "encoder": encoder("bert").model_dump(), "lora": {"enabled": True, "r": 2}}
    config = settings("criteria", **values)
    keys = list(state_dict(TASKS["criteria"].build_model(config, nnx.Rngs(0))))
    trained = [key for key in keys if TASKS["criteria"].trainable(key, config)]
    head = "classifier.output_layer." if family == "project" else "head.classifier.1."
    assert len(trained) == 2 * 2 * 2 + 2  # A and B of query and value in two layers, and the head
    assert all(".lora_" in key or key.startswith(head) for key in trained)


def test_an_unknown_adapter_target_is_named():
    with pytest.raises(UserError, match="no Linear layer of the encoder is called qkv"):
        add_lora(
            build_encoder(encoder("bert"), rngs=nnx.Rngs(0)),
            Lora(enabled=True, targets=("qkv",)),
            types.SimpleNamespace(kind="bert"),
            rngs=nnx.Rngs(0),
        )
