"""Checkpoint files: what torch and safetensors write is read, what is read runs no code, what is damaged says so."""

import json
import os
import pickle
import random

import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import torch

from jaxtrain import UserError
from jaxtrain.train.checkpoint import init_from
from tests.contract.tasks import tiny
from torch_bridge import files
from torch_bridge.datasets import to_torch
from torch_bridge.files import checkpoint

TENSORS = {
    "half": torch.randn(3).bfloat16(),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "part": torch.arange(10)[3:7],
    "empty": torch.zeros(0, 3),
    "number": torch.tensor(3),
    "truth": torch.tensor([True, False]),
    "small": torch.ones(2, dtype=torch.float16),
    "bytes": torch.arange(5, dtype=torch.uint8),
}


def assert_equal(arrays, tensors=TENSORS) -> None:
    assert list(arrays) == list(tensors)
    for key, tensor in tensors.items():
        assert torch.equal(to_torch(arrays[key]), tensor), key
        assert to_torch(arrays[key]).dtype == tensor.dtype


@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files_of_both_formats_are_read_exactly(zipped, tmp_path):
    torch.save(TENSORS, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    assert_equal(files.load(tmp_path / "a.pt"))


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bit_floats_of_a_torch_file_are_read_exactly(kind, tmp_path):
    tensor = torch.arange(6.0).reshape(2, 3).to(kind).t()
    torch.save({"a": tensor}, tmp_path / "a.pt")
    np.testing.assert_array_equal(files.load(tmp_path / "a.pt")["a"].astype(np.float32), tensor.float().numpy())


def test_safetensors_of_the_package_are_read_exactly(tmp_path):
    safetensors.torch.save_file({key: t.contiguous() for key, t in TENSORS.items()}, tmp_path / "a.safetensors")
    arrays = files.load(tmp_path / "a.safetensors")
    assert_equal({key: arrays[key] for key in TENSORS})


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
def test_what_is_written_the_other_side_reads(name, tmp_path):
    torch.save(TENSORS, tmp_path / "source.pt")
    path = files.save(files.load(tmp_path / "source.pt"), tmp_path / name)
    load = safetensors.torch.load_file if name.endswith("safetensors") else torch.load
    for key, tensor in load(path).items():
        assert torch.equal(tensor, TENSORS[key])
        assert tensor.dtype == TENSORS[key].dtype


def test_trees_keep_plain_values_and_tied_tensors(tmp_path):
    weight = np.ones((2, 2), np.float32)
    tree = {"a": weight, "b": weight, "deep": [1, "text", None, {"x": np.arange(3)}], "flag": True}
    back = torch.load(files.save(tree, tmp_path / "a.pt"), weights_only=True)
    assert back["a"].data_ptr() == back["b"].data_ptr()
    assert back["deep"][:3] == [1, "text", None]
    assert torch.equal(back["deep"][3]["x"], torch.arange(3))


def test_a_tree_of_torch_tensors_is_written_with_their_values(tmp_path):
    tree = {"weights": torch.nn.Linear(2, 3).state_dict(), "deep": [torch.arange(3), 1.5]}
    back = torch.load(files.save(tree, tmp_path / "a.pt"), weights_only=True)
    assert torch.equal(back["weights"]["weight"], tree["weights"]["weight"])
    assert torch.equal(back["deep"][0], tree["deep"][0])


def test_sharded_hugging_face_folders_are_read_and_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 100)
    state = {f"layer.{i}.weight": np.full((4, 5), i, np.float32) for i in range(4)}
    folder = files.save_folder(state, {"model_type": "bert"}, tmp_path / "hf")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 4
    assert index["metadata"]["total_size"] == 320
    for key, array in files.load(folder).items():
        np.testing.assert_array_equal(array, state[key])
    (folder / index["weight_map"]["layer.2.weight"]).unlink()
    with pytest.raises(UserError, match="1 of 4 shards are missing: model-00003-of-00004.safetensors"):
        files.load(folder)


@pytest.mark.parametrize("key", ["model_state_dict", "state_dict", "model"])
def test_the_dicts_that_training_loops_save_are_understood(key, tmp_path):
    content = {key: TENSORS, "epoch": 3, "global_step": 40, "best_metric": np.float64(0.5), "history": [{"loss": 1.0}]}
    torch.save(content, tmp_path / "a.pt")
    assert_equal(files.load(tmp_path / "a.pt"))
    assert checkpoint.open_checkpoint(tmp_path / "a.pt").step == 40


# --- unsafe --------------------------------------------------------------------------------------------------------


class Malicious:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("kind", ["zip", "legacy", "pickle", "bin folder", "optimizer"])
def test_a_malicious_pickle_is_refused_and_does_not_run(kind, tmp_path):
    mark, path = tmp_path / "it_ran", tmp_path / "evil.pt"
    evil = {"model": {"weight": torch.ones(2)}, "x": Malicious(mark)}
    if kind == "pickle":
        path.write_bytes(pickle.dumps(evil))
    elif kind == "bin folder":
        path = tmp_path / "hf"
        path.mkdir()
        torch.save(evil, path / "pytorch_model.bin")
    elif kind == "optimizer":
        torch.save({"model": {"weight": torch.ones(2)}, "optimizer": {"state": {0: Malicious(mark)}}}, path)
    else:
        torch.save(evil, path, _use_new_zipfile_serialization=kind == "zip")
    for read in (files.load, checkpoint.open_checkpoint):
        with pytest.raises(UserError):
            read(path)
    assert not mark.exists()


def test_a_pickled_module_is_refused_with_the_reason_and_the_remedy(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(UserError, match="refused.*torch.nn.modules.linear.Linear.*save its state dict alone"):
        files.load(tmp_path / "a.pt")


def test_an_index_may_not_lead_out_of_its_folder(tmp_path):
    index = {"weight_map": {"a": "../../etc/passwd"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="leads out of the folder"):
        files.load(tmp_path)


# --- damaged -------------------------------------------------------------------------------------------------------


def mutate(state: dict, kind: str, draw: random.Random) -> dict:
    key = draw.choice([key for key, value in state.items() if value.ndim])
    value = state[key]
    if kind == "renamed":
        return {(f"{k}_" if k == key else k): v for k, v in state.items()}
    if kind == "missing":
        return {k: v for k, v in state.items() if k != key}
    if kind == "extra":
        return {**state, "surplus.weight": np.ones(3, np.float32)}
    changed = {
        "shape": lambda: np.concatenate([value, value[:1]]),
        "axis": lambda: value[None],
        "integer": lambda: value.astype(np.int64),
        "truth": lambda: value > 0,
        "nan": lambda: np.where(
            np.arange(value.size).reshape(value.shape) == draw.randrange(value.size), np.nan, value
        ),
        "infinity": lambda: np.full_like(value, np.inf),
    }[kind]()
    return {**state, key: changed}


KINDS = ("renamed", "missing", "extra", "shape", "axis", "integer", "truth", "nan", "infinity", "cut", "flipped")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return tiny("digits.classify", tmp_path_factory.mktemp("mutations"), "model.embed_dim=8")


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_200_mutated_files_give_one_clear_error_each(suffix, trainer, tmp_path):
    """101 here of each format. A flipped byte in the numbers alone is no error that anyone could see."""
    before = trainer.state_dict()
    whole = tmp_path / f"whole{suffix}"
    files.save(before, whole)
    data, draw, path = whole.read_bytes(), random.Random(0), tmp_path / f"mutated{suffix}"
    header = len(data) - sum(value.nbytes for value in before.values())
    for number in range(101):
        kind = KINDS[number % len(KINDS)]
        if kind == "cut":
            path.write_bytes(data[: draw.randrange(len(data))])
        elif kind == "flipped":
            spoiled = bytearray(data)
            ends = range(len(data) - header // 2, len(data)) if suffix == ".pt" else range(header)
            for place in draw.sample(ends, 24):
                spoiled[place] ^= 0xFF
            path.write_bytes(spoiled)
        else:
            files.save(mutate(before, kind, draw), path)
        with pytest.raises(UserError) as caught:
            init_from.apply(trainer.program, path)
        message = str(caught.value)
        assert str(path) in message, (kind, message)
        assert len(message.splitlines()) == 1, (kind, message)
    for key, value in trainer.state_dict().items():
        np.testing.assert_array_equal(value, before[key])


def test_weights_under_the_one_prefix_of_a_lightning_module_are_taken(trainer, tmp_path):
    state, path = trainer.state_dict(), tmp_path / "lightning.pt"
    files.save({"state_dict": {f"model.{key}": value + 1 for key, value in state.items()}}, path)
    lines = init_from.apply(trainer.program, path).lines
    files.save(state, path)
    init_from.apply(trainer.program, path)
    assert "the file holds the model as `model`" in lines


def test_a_missing_file_says_what_was_wanted(tmp_path):
    with pytest.raises(UserError, match="no such file; wanted a .pt, a .safetensors"):
        files.load(tmp_path / "absent.pt")
    with pytest.raises(UserError, match="holds no weights; wanted one of model.pt"):
        files.load(tmp_path)


def test_casting_touches_floating_numbers_only():
    state = files.cast({"a": np.ones(2, np.float32), "n": np.arange(2)}, "bf16")
    assert state["a"].dtype == ml_dtypes.bfloat16
    assert state["n"].dtype == np.int64


def test_torch_tensors_are_saved_as_safetensors(tmp_path):
    assert_equal(files.load(files.save(TENSORS, tmp_path / "a.safetensors")))


def test_what_safetensors_cannot_hold_is_named(tmp_path):
    with pytest.raises(UserError, match=r"a.safetensors: count is int, wanted tensors of a kind that safetensors has"):
        files.save({**TENSORS, "count": 3}, tmp_path / "a.safetensors")


def test_a_file_that_a_link_leads_to_is_written_and_the_link_stays(tmp_path):
    (tmp_path / "link.pt").symlink_to(tmp_path / "file.pt")
    files.save(TENSORS, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert_equal(files.load(tmp_path / "file.pt"))


def test_quantised_tensors_are_named(tmp_path):
    torch.save({"a": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"a.pt: holds quantised tensors, .*value.dequantize\(\)"):
        files.load(tmp_path / "a.pt")


def test_a_torchscript_archive_is_named(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / "a.pt"))
    with pytest.raises(UserError, match=r"a.pt: a TorchScript archive, .*torch.jit.load\(FILE\).state_dict\(\)"):
        files.load(tmp_path / "a.pt")


def test_versions_of_a_state_dict_are_kept(tmp_path):
    state = torch.nn.BatchNorm1d(2).state_dict()
    torch.save({"model": state}, tmp_path / "a.pt")
    again = files.save(files.open_weights(tmp_path / "a.pt"), tmp_path / "b.pt")
    assert torch.load(again)._metadata == state._metadata


def test_files_under_names_of_another_kind_are_told_by_their_bytes(tmp_path):
    files.save({"a": torch.ones(2)}, tmp_path / "a.safetensors")
    files.save({"a": torch.ones(2)}, tmp_path / "b.pt")
    renamed = (tmp_path / "a.safetensors").rename(tmp_path / "a.bin")
    np.testing.assert_array_equal(files.load(renamed)["a"], [1, 1])
    with pytest.raises(UserError, match="is a file of torch.save under a safetensors name; rename it to b.pt"):
        files.load((tmp_path / "b.pt").rename(tmp_path / "b.safetensors"))


def test_a_safetensors_header_may_have_any_length(tmp_path):
    lengths = set()
    for size in range(1, 200, 4):
        path = files.save({"a" * size: torch.ones(1)}, tmp_path / f"{size}.safetensors")
        lengths.add(path.read_bytes()[0])
        assert [*files.load(path)] == ["a" * size]
    assert 0x80 in lengths  # with which a pickle begins


def test_a_sharded_models_index_is_a_name_of_its_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SHARD_BYTES", 100)
    files.save_folder({"a": np.ones(20, np.float32), "b": np.ones(20, np.float32)}, {}, tmp_path)
    assert [*files.load(tmp_path / "model.safetensors.index.json")] == ["a", "b"]
