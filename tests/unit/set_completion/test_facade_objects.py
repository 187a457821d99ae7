"""A user's session with the original's models, datasets, loaders and rules, as torch has them."""

import copy
import pickle
import random

import numpy as np
import pandas as pd
import pytest
import torch

from jaxtrain.systems import set_completion as splatnlp
from tests.unit.set_completion.golden import FOLDER, table
from torch_bridge import files

SIZES = {"vocab_size": 12, "weapon_vocab_size": 3, "embedding_dim": 8, "hidden_dim": 8, "output_dim": 10}
OPTIONS = {"num_layers": 1, "num_heads": 2, "num_inducing_points": 3, "pad_token_id": 11, "use_layer_norm": True}


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return splatnlp.SetCompletionModel(**SIZES, **OPTIONS)


def call(model, padding: int = 0):
    tokens = torch.tensor([[1, 2, 3], [4, 5, 11]])
    tokens = torch.nn.functional.pad(tokens, (0, padding), value=11)
    return model(tokens, torch.tensor([[0], [2]]), key_padding_mask=tokens == 11)


def test_the_model_is_a_torch_module_with_its_arguments_as_attributes(model):
    assert isinstance(model, torch.nn.Module)
    assert {name: getattr(model, name) for name in SIZES} == SIZES
    logits = call(model)
    assert logits.shape == (2, 10)
    logits.sum().backward()
    assert not model.ability_embedding.weight.grad[11].any()
    torch.testing.assert_close(call(model.eval(), padding=5), call(model))


def test_the_published_model_has_83_million_parameters():
    with torch.device("meta"):
        sizes = {"vocab_size": 140, "weapon_vocab_size": 130, "embedding_dim": 32, "hidden_dim": 512, "output_dim": 140}
        model = splatnlp.SetCompletionModel(**sizes, num_layers=3, num_heads=8, use_layer_norm=True)
    assert sum(parameter.numel() for parameter in model.parameters()) == 83_001_420
    assert len(model.state_dict()) == 345


def test_copies_pickles_and_checkpoints_compute_the_same(model, tmp_path):
    model.eval()
    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, tmp_path / "ddp.pth")
    torch.save({"model_state_dict": model.state_dict(), "epoch": 3}, tmp_path / "dict.pth")
    load = lambda name: splatnlp.SetCompletionModel.load_from_checkpoint(tmp_path / name, **SIZES, **OPTIONS).eval()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), load("ddp.pth"), load("dict.pth")):
        assert torch.equal(call(other), call(model))


def test_a_row_of_padding_leaves_the_others_alone_and_no_tokens_give_the_bias(model):
    tokens = torch.tensor([[1, 2], [11, 11]])
    logits = model.eval()(tokens, torch.tensor([[0], [1]]), key_padding_mask=tokens == 11)
    alone = model(tokens[:1], torch.tensor([[0]]), key_padding_mask=tokens[:1] == 11)
    torch.testing.assert_close(logits[:1], alone)
    empty = model(torch.zeros(2, 0, dtype=torch.long), torch.tensor([[0], [1]]), torch.zeros(2, 0, dtype=torch.bool))
    torch.testing.assert_close(empty, model.output_layer.bias.expand(2, -1))


def test_items_are_the_originals_tensors():
    case = table("dataset")
    rows = pd.DataFrame(case["rows"])
    for want in case["items"]:
        dataset = splatnlp.SetDataset(
            rows, case["vocab_size"], want["num_instances_per_set"], want["skew_factor"], want["null_token"]
        )
        assert len(dataset) == want["len"]
        random.seed(want["seed(random and numpy global)"])
        np.random.seed(want["seed(random and numpy global)"])
        items = [dataset[i] for i in range(len(dataset))]
        key = "items_in_index_order [input, weapon, target]"
        assert [[part.tolist() for part in item] for item in items] == want[key]
        assert all(part.dtype is torch.int64 for part in items[0])


def test_loaders_pad_and_mask():
    frame = pd.DataFrame(table("dataset")["rows"])
    train, val, test = splatnlp.generate_tokenized_datasets(frame, frac=1.0, random_state=0)
    assert (len(train), len(val), len(test)) == (8, 1, 3)
    loaders = splatnlp.generate_dataloaders(
        train, val, test, 40, 39, num_instances_per_set=2, batch_size=4, shuffle=True, num_workers=0
    )
    inputs, weapons, targets, mask = next(iter(loaders[0]))
    assert (inputs.shape, weapons.shape) == (mask.shape, (4, 1))
    assert torch.equal(inputs != 39, mask)
    assert [len(loader.dataset) for loader in loaders] == [16, 2, 6]
    assert isinstance(loaders[0].sampler, torch.utils.data.RandomSampler)
    assert isinstance(loaders[1].sampler, torch.utils.data.SequentialSampler)
    hot = splatnlp.create_multi_hot_targets(
        targets, {**{str(i): i for i in range(39)}, "<PAD>": 39}, torch.device("cpu")
    )
    assert hot.shape == (4, 40)
    assert hot.sum(1).tolist() == (targets != 39).sum(1).tolist()


def test_the_three_splits_share_no_index():
    frame = pd.DataFrame(table("dataset")["rows"])
    parts = splatnlp.generate_tokenized_datasets(frame, frac=1.0, random_state=0)
    assert sorted(index for part in parts for index in part.index) == list(frame.index)


def test_training_drops_its_last_batch_and_the_others_keep_theirs():
    frame = pd.DataFrame(table("dataset")["rows"])
    loaders = splatnlp.generate_dataloaders(frame, frame, frame, 40, 39, num_instances_per_set=1, batch_size=5)
    assert [[len(batch[0]) for batch in loader] for loader in loaders] == [[5, 5], [5, 5, 2], [5, 5, 2]]


def test_distributed_loaders_have_samplers_of_their_own():
    frame = pd.DataFrame(table("dataset")["rows"])
    loaders = splatnlp.generate_dataloaders(frame, frame, frame, 40, 39, batch_size=5, distributed=True)
    samplers = [loader.sampler for loader in loaders]
    assert all(isinstance(one, torch.utils.data.DistributedSampler) for one in samplers)
    assert [one.shuffle for one in samplers] == [True, False, False]


def test_items_are_counted_from_the_end_too():
    dataset = splatnlp.SetDataset(table("dataset")["rows"], 40, num_instances_per_set=2)
    assert torch.equal(dataset[-1][2], dataset[len(dataset) - 1][2])
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_a_config_names_a_device_that_torch_takes():
    assert torch.device(splatnlp.TrainingConfig().device).type in ("cpu", "cuda")
    assert splatnlp.TrainingConfig(device="cuda:1").device == "cuda:1"


BLOCK = {"embed_dim": 8, "num_heads": 2, "use_layer_norm": True, "dropout": 0.25}
BLOCKS = {
    "MultiheadAttentionBlock": BLOCK,
    "SelfAttentionBlock": BLOCK,
    "InducedSetAttentionBlock": BLOCK | {"num_inducing_points": 3},
    "PoolingMultiheadAttention": BLOCK | {"num_seeds": 2},
    "SetTransformer": BLOCK | {"input_dim": 4, "num_seeds": 2, "num_inducing_points": 3},
    "SetTransformerLayer": {"embed_dim": 8, "num_heads": 2, "num_inducing_points": 3, "use_layer_norm": True},
}


@pytest.mark.parametrize("name", BLOCKS)
def test_a_blocks_arguments_are_its_attributes(name):
    block = getattr(splatnlp, name)(**BLOCKS[name])
    assert {key: getattr(block, key) for key in BLOCKS[name]} == BLOCKS[name]


def test_tag_strings_are_tokenized_as_the_original_does():
    case = table("dataset")["tokenize"]
    frame, abilities, weapons = splatnlp.tokenize(pd.DataFrame(case["in"]))
    assert (frame["ability_tags"].tolist(), frame["weapon_id"].tolist()) == (case["tags"], case["weapons"])
    assert (abilities, weapons) == (case["ability_to_id"], case["weapon_to_id"])
    with pytest.raises(ValueError, match="at most 57"):
        splatnlp.tokenize_build({"swim_speed_up": 58})


def test_early_stopping_takes_the_codes_names_too():
    stopping = splatnlp.EarlyStopping(patience=2, delta=0.1)
    assert (stopping.min_delta, stopping.counter, stopping.best_score, stopping.early_stop) == (0.1, 0, None, False)
    assert (stopping.delta, splatnlp.EarlyStopping().delta) == (0.1, 0.0)
    assert [stopping(loss) for loss in (1.0, 0.95, 0.94)] == [False, False, True]
    assert (stopping.early_stop, stopping.best_score, stopping.counter) == (True, -1.0, 2)


def test_an_equal_loss_is_an_improvement_for_a_call_and_none_for_a_check():
    called, checked = splatnlp.EarlyStopping(patience=2), splatnlp.EarlyStopping(patience=2)
    for loss in (1.0, 1.0, 2.0):
        called(loss)
        checked.check(loss)
    assert (called.counter, called.early_stop) == (1, False)
    assert (checked.counter, checked.early_stop) == (2, True)


def test_masks_have_torchs_name_in_every_block(model):
    x, mask = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    layer = model.transformer_layers[0].eval()
    blocks = (layer.set_transformer.enc_layer1, layer.set_transformer.dec_layer1, layer.set_transformer, layer)
    for block in blocks:
        masked = block(x, key_padding_mask=mask)
        torch.testing.assert_close(masked[1, :2], block(x[1:, :2])[0, :2])
        assert not torch.allclose(masked[1], block(x)[1])


def test_builds_are_found_under_the_originals_names():
    case = table("reconstruct")
    model = splatnlp.SetCompletionModel(**case["config"])
    recorded = files.load(FOLDER / "reconstruct.safetensors")
    model.load_state_dict({key: torch.from_numpy(np.array(recorded[f"param/{key}"])) for key in model.state_dict()})
    by_name = splatnlp.build_predict_abilities(case["vocab"], case["weapon_vocab"], output_type="dict")
    predict = lambda tokens, weapon: by_name(model, tokens, weapon)
    allocator = splatnlp.Allocator()
    for one in case["cases"]:
        capstones, score, _ = splatnlp.greedy_closure(predict, one["weapon"], one["context"], allocator)
        assert [token.name for token in capstones.values()] == one["greedy_capstones"]
        assert score == pytest.approx(one["greedy_score"], abs=1e-5)
        assert splatnlp.expand_capstones_to_context(capstones) == one["expanded_context"]
    (found,) = splatnlp.reconstruct_build(predict, one["weapon"], one["context"], allocator, 5, 6)
    together = lambda contexts, weapons: [*map(predict, contexts, weapons)]
    batched = splatnlp.reconstruct_builds_batched(together, [one["weapon"]] * 2, [one["context"], []], allocator)
    assert batched[0] == [found]
    (wanted,) = one["builds beam=5 steps=6 top_k=1"]
    assert (dict(found.mains), dict(found.subs), found.total_ap) == (
        wanted["mains"],
        wanted["subs"],
        wanted["total_ap"],
    )
    for one in case["allocator"]:
        tokens = [splatnlp.AbilityToken.from_vocab_entry(name) for name in one["capstones"]]
        build, penalty = allocator.allocate({f"entry {number}": token for number, token in enumerate(tokens)})
        assert penalty == one["penalty"]
        assert build is None or build.total_ap == one["build"]["total_ap"]
    assert splatnlp.AbilityToken.from_vocab_entry("swim_speed_up_12").min_ap == 12
    for name, words in (
        ("<PAD>", "asks for no ability"),
        ("<NULL>", "asks for no ability"),
        ("swim", "no ability token"),
    ):
        with pytest.raises(ValueError, match=words):
            splatnlp.AbilityToken.from_vocab_entry(name)


def test_the_autoencoders_steps_are_the_originals():
    case, tensors = table("sae_step"), files.load(FOLDER / "sae_step.safetensors")
    tensor = lambda name: torch.from_numpy(np.array(tensors[name]))
    sae = splatnlp.SparseAutoencoder(**case["config"])
    sae.load_state_dict({key: tensor(f"param/{key}") for key in sae.state_dict()}, strict=True)
    optimizer = torch.optim.AdamW(sae.parameters(), lr=1e-3)
    for number, want in enumerate(case["metrics_per_step"]):
        got = sae.training_step(tensor(f"in/x{number}"), optimizer, gradient_clip_val=1.0)
        assert got == pytest.approx(want, rel=1e-5)
    assert sae.decoder.weight.grad is None
    for key, value in sae.state_dict().items():
        torch.testing.assert_close(value, tensor(f"after3/{key}"), atol=1e-6, rtol=1e-5)
    assert sae.get_dead_neurons(threshold=1.0).numel() == sae.hidden_dim == 48


def test_the_hook_reads_and_edits_features(model):
    sae = splatnlp.SparseAutoencoder(8, 4)
    hook, handle = splatnlp.register_hooks(model.eval(), sae, no_change=True)
    assert hook.mode_str == "no_change"
    plain = call(model)
    assert (hook.last_h_post.shape, hook.last_x_recon) == ((2, 32), None)
    hook.update_neuron(3, 2.5)
    assert (hook.idx, hook.value, hook.mode_str) == (3, 2.5, "edit")
    edited = call(model)
    assert not torch.equal(edited, plain)
    torch.testing.assert_close(hook.last_x_recon, sae.decode(hook.last_h_post.index_fill(1, torch.tensor([3]), 2.5)))
    hook.set_mode(bypass=True)
    assert torch.equal(call(model), plain)
    hook.update_neuron(32, 1.0)
    with pytest.raises(IndexError, match="has 32"):
        call(model)
    handle.remove()


def test_the_buffer_has_the_codes_names():
    buffer = splatnlp.ActivationBuffer(max_size=4, d=2)
    assert (buffer.max_size, buffer.d) == (4, 2)
    buffer.add(torch.ones(3, 2))
    buffer.add(acts=torch.zeros(0, 2))
    assert (buffer.max_size, buffer.ptr, buffer.full, len(buffer), tuple(buffer.buf.shape)) == (4, 3, False, 3, (4, 2))


def test_probabilities_come_by_name():
    vocab = {**{f"t{i}": i for i in range(9)}, "<PAD>": 9}
    weapons = {"weapon_id_40": 0}
    torch.manual_seed(0)
    model = splatnlp.SetCompletionModel(**SIZES, **{**OPTIONS, "pad_token_id": 9}).eval()
    by_name = splatnlp.build_predict_abilities(vocab, weapons, output_type="dict")
    found = by_name(model, ["t1", "t2"], "weapon_id_40")
    logits = model(torch.tensor([[1, 2]]), torch.tensor([[0]]))
    assert list(found) == list(vocab)
    assert list(found.values()) == pytest.approx(logits[0].sigmoid().tolist())
    labels = splatnlp.build_predict_abilities(vocab, weapons, output_type="labels")(model, [], "weapon_id_40")
    assert set(labels) == {name for name, i in vocab.items() if model.output_layer.bias[i] >= 0}
    frame = splatnlp.build_predict_abilities(vocab, weapons, output_type="df")(model, ["t1"], "weapon_id_40")
    assert frame["probability"].is_monotonic_decreasing
    for kind in (ValueError, KeyError):
        with pytest.raises(kind, match="^not in the vocabulary: t99, weapon_id_1"):
            splatnlp.build_predict_abilities(vocab, weapons)(model, ["t99"], "weapon_id_1")


def test_attributes_that_the_originals_users_set_can_be_set():
    stopping, buffer = splatnlp.EarlyStopping(patience=2), splatnlp.ActivationBuffer(4, d=2)
    stopping.delta = 0.2
    assert [stopping(loss) for loss in (1.0, 0.9, 0.85)] == [False, False, True]
    assert (stopping.min_delta, stopping.best_score) == (0.2, -1.0)
    buffer.buf, buffer.ptr = torch.ones(4, 2), 3
    buffer.add(torch.zeros(1, 2))
    assert buffer.buf.sum() == 6 and buffer.ptr == 0  # noqa: PT018


def test_a_random_state_of_numpys_shuffles_as_its_seed_does():
    frame = pd.DataFrame({"n": range(40)})
    by_state = splatnlp.generate_tokenized_datasets(frame, 1.0, np.random.RandomState(3))
    for one, other in zip(by_state, splatnlp.generate_tokenized_datasets(frame, 1.0, 3), strict=True):
        assert list(one.n) == list(other.n)


def test_an_ability_token_takes_its_parts():
    token = splatnlp.AbilityToken(name="run_speed_up_21", family="run_speed_up", min_ap=12, main_only=False)
    assert splatnlp.Allocator().allocate([token])[0].achieved_ap == {"run_speed_up": 20}
    reach = lambda points: splatnlp.AbilityToken("run_speed_up_3", "run_speed_up", points, False)
    assert splatnlp.Allocator().allocate([reach(57)])[0].total_ap == 57
    assert splatnlp.Allocator().allocate([reach(60)]) == (None, None)


def test_a_build_counts_its_points_and_an_illegal_one_raises():
    slots = {"head": "comeback", "clothes": None, "shoes": None}
    build = splatnlp.Build(slots, {"run_speed_up": 2}, 99)
    assert (build.achieved_ap, build.total_ap) == ({"comeback": 10, "run_speed_up": 6}, 16)
    assert build.to_dict() == {"mains": slots, "subs": {"run_speed_up": 2}, "total_ap": 16}
    for mains, subs, words in (
        ({"head": None, "clothes": None}, {}, "wanted .*shoes"),
        (slots | {"shoes": "comeback"}, {}, "belongs to head"),
        (slots, {"haunt": 1}, "only fit main slots"),
        (slots, {"run_speed_up": 10}, "at most 9"),
        (slots, {"run_speed_up": -1}, "negative"),
        (slots | {"neck": None}, {}, "got the slots"),
    ):
        with pytest.raises(ValueError, match=words):
            splatnlp.Build(mains, subs)


def test_padding_is_never_a_target_and_the_third_argument_is_the_device():
    vocab = {"<PAD>": 0, "a": 1, "b": 2, "c": 3}
    hot = splatnlp.create_multi_hot_targets(torch.tensor([[1, 2, 0], [2, 3, 3]]), vocab, torch.device("cpu"))
    assert hot.tolist() == [[0, 1, 1, 0], [0, 0, 1, 1]]
    ragged = splatnlp.create_multi_hot_targets([[1], [2, 3]], vocab, "meta")
    assert (ragged.device.type, ragged.shape) == ("meta", (2, 4))
    with pytest.raises(ValueError, match="lacks '<pad>'"):
        splatnlp.create_multi_hot_targets(torch.tensor([[1]]), vocab, "cpu", "<pad>")
    with pytest.raises(RuntimeError):
        splatnlp.create_multi_hot_targets(torch.tensor([[1]]), vocab, "<PAD>")


def test_an_epochs_metrics_are_the_originals():
    case = table("dataset")["metrics"]
    hot = lambda pairs: np.array([[(i, j) in set(map(tuple, pairs)) for j in range(40)] for i in range(6)], float)
    metrics = dict.fromkeys(("loss", "f1", "precision", "recall", "hamming"), 0.0)
    truth, guess = hot(table("dataset")["multi_hot_nonzero"]), hot(case["pred_nonzero"])
    assert splatnlp.update_epoch_metrics(metrics, np.split(truth, 3), np.split(guess, 3)) == pytest.approx(
        case["result"]
    )
    assert splatnlp.update_epoch_metrics(metrics, truth, 0 * guess)["f1"] == 0


def test_an_allocators_other_slots_and_a_searchs_traces_are_refused():
    with pytest.raises(ValueError, match="main_only_slots_override"):
        splatnlp.Allocator({"comeback": "shoes"})
    with pytest.raises(ValueError, match="traces"):
        splatnlp.reconstruct_build(None, "w", [], splatnlp.Allocator(), record_traces=True)
    with pytest.raises(TypeError, match="wanted an Allocator"):
        splatnlp.reconstruct_build(lambda *_: {}, "w", [], None)


def test_builds_that_differ_in_where_standard_mains_sit_are_equal():
    one = splatnlp.Build({"head": "run_speed_up", "clothes": "haunt", "shoes": "special_saver"}, {})
    other = splatnlp.Build({"head": "special_saver", "clothes": "haunt", "shoes": "run_speed_up"}, {})
    assert (one == other, hash(one) == hash(other), len({one, other})) == (True, True, 1)
    assert one != splatnlp.Build(one.mains, {"run_speed_up": 1})
    assert one != "a build"


def test_a_state_dict_loses_ddps_prefix_alone():
    assert list(splatnlp.convert_ddp_state({"module.module.a": 1, "_orig_mod.b": 2})) == ["module.a", "_orig_mod.b"]


def test_a_loader_without_a_batch_divides_by_zero_as_the_original():
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ZeroDivisionError, match="no batch with a visible token"):
        splatnlp.train_epoch(
            model, [], optimizer, torch.nn.BCEWithLogitsLoss(), splatnlp.TrainingConfig(), {"<PAD>": 0}
        )
