"""The original's models through the facade: torch modules with the recorded outputs, and heads by themselves."""

import copy

import pytest
import torch
from torch import nn

from tests.unit.criteria_evidence.facade import case_of, folder_of, original, params_of
from tests.unit.criteria_evidence.golden import FOLDER

INPUTS = ("input_ids", "attention_mask", "token_type_ids")
PROJECT = sorted(path.stem for path in FOLDER.glob("proj_*.json"))
DEEP = sorted(path.stem for path in FOLDER.glob("arch_*.json"))


def encoder_folders(case, tmp_path) -> list[str]:
    shared = case.get("encoder") or case.get("criteria_encoder")
    if case["architecture"] != "joint":
        return [folder_of(tmp_path / "encoder", shared)]
    second = case.get("evidence_encoder") or shared
    return [folder_of(tmp_path / "criteria", shared), folder_of(tmp_path / "evidence", second)]


def given(tensors) -> dict[str, torch.Tensor]:
    return {k.removeprefix("in/"): v for k, v in tensors.items() if k.startswith("in/") and k.endswith(INPUTS)}


def assert_outputs(found: dict, tensors) -> None:
    assert found
    for name, value in found.items():
        torch.testing.assert_close(value, tensors[f"out/{name}"], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PROJECT)
def test_project_models_give_the_recorded_outputs(name, tmp_path):
    case, tensors = case_of(name)
    kind = getattr(original("project"), case["architecture"].capitalize())
    model = kind(*encoder_folders(case, tmp_path), **case["head"]).eval()
    assert isinstance(model, nn.Module)
    model.load_state_dict(params_of(tensors), strict=True)
    out = model(**given(tensors))
    names = {"criteria": ("logits",), "evidence": ("start_logits", "end_logits")}
    names = names.get(case["architecture"], ("logits", "start_logits", "end_logits"))
    assert_outputs(dict(zip(names, out if isinstance(out, tuple) else (out,), strict=True)), tensors)


@pytest.mark.parametrize("name", DEEP)
def test_architectures_give_the_recorded_outputs(name, tmp_path):
    case, tensors = case_of(name)
    folders = encoder_folders(case, tmp_path)
    task = dict(case["task_cfg"])
    if len(folders) > 1:
        task |= dict(zip(("criteria_model_name", "evidence_model_name"), folders, strict=True))
    kind = getattr(original("architectures"), case["architecture"].capitalize())
    model = kind(folders[0], head_cfg=case["head_cfg"], task_cfg=task, **case["ctor"]).eval()
    model.load_state_dict(params_of(tensors), strict=True)
    assert_outputs(dict(model(**given(tensors))), tensors)
    assert isinstance(model(given(tensors), return_dict=False), tuple)
    with pytest.raises(TypeError, match="by name"):
        model(tensors[next(key for key in tensors if key.endswith("input_ids"))])


def test_the_base_family_gives_the_recorded_logits(tmp_path):
    case, tensors = case_of("base_criteria_cls_bert")
    models = original("encoder_models")
    encoder = models.TransformerEncoder(folder_of(tmp_path, case["encoder"]))
    model = models.CriteriaModel(encoder, num_classes=case["num_classes"]).eval()
    model.load_state_dict(params_of(tensors), strict=True)
    ids, mask = tensors["in/input_ids"], tensors["in/attention_mask"]
    torch.testing.assert_close(model(ids, mask), tensors["out/logits"], atol=1e-5, rtol=1e-5)
    assert torch.equal(model.predict(ids, mask), tensors["out/logits"].argmax(-1))


HEADS = [
    ("project", "ClassificationHead", {"input_dim": 8, "num_labels": 3, "layer_num": 2, "hidden_dims": [4]}),
    ("project", "SpanPredictionHead", {"hidden_size": 8}),
    ("architectures", "SequencePooler", {"hidden_size": 8, "pooling": "attn"}),
    ("architectures", "ClassificationHead", {"input_dim": 8, "num_labels": 3, "activation": "relu"}),
    ("architectures", "SpanPredictionHead", {"input_dim": 8, "activation": "silu"}),
]


@pytest.mark.parametrize(("family", "name", "arguments"), HEADS)
def test_a_heads_arguments_are_its_attributes(family, name, arguments):
    head = getattr(original(family), name)(**arguments)
    assert {key: getattr(head, key) for key in arguments} == arguments


def test_a_models_gradients_copies_and_freezing_are_torchs(tmp_path):
    folder = folder_of(tmp_path)
    model = original("project").Criteria(
        folder, head_cfg={"layers": 2, "hidden": 6, "dropout": 0.2}, task_cfg={"num_labels": 3}
    )
    assert [type(part) for part in model.classifier.hidden_layers] == [nn.Linear, nn.GELU, nn.Dropout]
    ids = torch.randint(5, 60, (4, 7))
    nn.functional.cross_entropy(model(ids), torch.tensor([0, 1, 2, 0])).backward()
    assert model.encoder.embeddings.word_embeddings.weight.grad.abs().sum() > 0
    twin = copy.deepcopy(model)
    assert torch.equal(twin.eval()(ids), model.eval()(ids))
    encoder = original("encoder_models").TransformerEncoder
    frozen = encoder(folder, freeze_encoder=True)
    assert not any(p.requires_grad for p in frozen.parameters())
    with pytest.raises(ValueError, match="Unknown pooling strategy"):
        encoder(folder, pooling_strategy="sum")


def test_heads_and_poolers_give_the_recorded_numbers_and_errors():
    case, tensors = case_of("heads_edge")
    project, architectures = original("project"), original("architectures")
    hidden, mask = tensors["in/hidden_states"], tensors["in/attention_mask"]
    for pooling in ("mean", "max", "attn"):
        pooler = architectures.SequencePooler(12, pooling)
        pooler.load_state_dict(params_of(tensors, f"param/pooler_{pooling}."))
        torch.testing.assert_close(pooler(hidden, mask), tensors[f"out/{pooling}"])
        torch.testing.assert_close(pooler(hidden), tensors[f"out/{pooling}_nomask"])
    pooler = architectures.SequencePooler(12)
    assert torch.equal(pooler(hidden, mask, tensors["in/pooler_output"]), tensors["out/cls_with_pooler"])
    for number, options in case["head_cfgs"].items():
        head = architectures.ClassificationHead(12, 3, **options).eval()
        head.load_state_dict(params_of(tensors, f"param/cls{number}."))
        torch.testing.assert_close(head(tensors["in/pooler_output"]), tensors[f"out/cls{number}"])
        head = architectures.SpanPredictionHead(12, **options).eval()
        head.load_state_dict(params_of(tensors, f"param/span{number}."))
        torch.testing.assert_close(head(hidden)[1], tensors[f"out/span{number}_end"])
    wrong = {"layers0": (0, None, "gelu"), "hidden_len_mismatch": (3, [4], "gelu"), "bad_activation": (2, 4, "tanh")}
    for name, (layers, widths, activation) in wrong.items():
        with pytest.raises(ValueError, match=case["errors"][name].removeprefix("ValueError: ")):
            architectures.ClassificationHead(12, 3, layers, widths, activation)
    with pytest.raises(ValueError, match="Unsupported pooling 'sum'"):
        architectures.SequencePooler(12, "sum")
    for layers, widths in ((0, None), (2, [])):
        with pytest.raises(ValueError, match="layer_num"):
            project.ClassificationHead(12, 2, 0.1, layers, widths)
