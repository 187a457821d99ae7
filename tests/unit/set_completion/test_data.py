import json
import random
import sqlite3

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.systems.set_completion import synthetic
from jaxtrain.systems.set_completion.data import build_data, collate_sets, split_rows
from jaxtrain.systems.set_completion.losses import multi_hot
from jaxtrain.systems.set_completion.masking import PADDING, SetDataset, hide, removal_probabilities
from jaxtrain.systems.set_completion.preprocess import process_abilities
from jaxtrain.systems.set_completion.readers import read_corpus, write_corpus
from jaxtrain.systems.set_completion.vocabulary import default_vocabulary, tokenize, tokenize_build
from tests.unit.set_completion.golden import config, table

DATA = table("dataset")


@pytest.mark.parametrize("recorded", DATA["items"], ids=lambda entry: str(entry["null_token"]))
def test_the_datasets_masks_are_the_originals_draw_for_draw(recorded):
    seed = recorded["seed(random and numpy global)"]
    random.seed(seed)
    np.random.seed(seed)
    options = (recorded["num_instances_per_set"], recorded["skew_factor"], recorded["null_token"])
    dataset = SetDataset(DATA["rows"], DATA["vocab_size"], *options)
    items = [[part.tolist() for part in dataset[i]] for i in range(len(dataset))]
    assert items == recorded["items_in_index_order [input, weapon, target]"]


def test_removal_probabilities_equal_the_originals():
    for longest, wanted in DATA["removal_distribution_p(k removals), k=1..max"].items():
        np.testing.assert_allclose(removal_probabilities(int(longest)), wanted, rtol=1e-12)


def test_splits_equal_the_originals():
    for case in DATA["splits(row indices, pandas df.sample order)"]:
        given = (case["N"], case["frac"], case["random_state"], case["validation_size"], case["test_size"])
        got = split_rows(*given)
        wanted = {"train": case["train"], "validation": case["val"], "test": case["test"]}
        assert {name: rows.tolist() for name, rows in got.items()} == wanted


def test_multi_hot_equals_the_originals():
    got = multi_hot(jnp.asarray(DATA["collate"]["targets"]), DATA["vocab_size"], DATA["pad_id"])
    assert np.argwhere(np.asarray(got)).tolist() == DATA["multi_hot_nonzero"]


def test_tokenize_and_its_moving_pad_equal_the_originals():
    given = DATA["tokenize"]
    first = tokenize(given["in"]["ability_tags"], given["in"]["weapon_id"])
    assert list(first) == [given[key] for key in ("tags", "weapons", "ability_to_id", "weapon_to_id")]
    again = given["second_call_reusing_maps"]
    second = tokenize(again["in"]["ability_tags"], again["in"]["weapon_id"], first[2], first[3])
    assert list(second) == [again[key] for key in ("tags", "weapons", "ability_to_id", "weapon_to_id")]


def test_tokenize_build_equals_the_original():
    assert [tokenize_build(case["in"]) for case in DATA["tokenize_build"]] == [c["out"] for c in DATA["tokenize_build"]]
    for case in DATA["tokenize_build_errors"]:
        with pytest.raises(ValueError, match="ability points"):
            tokenize_build(case["in"])


@pytest.mark.parametrize("name", ["all_ability_columns_present", "some_columns_missing"])
def test_process_abilities_equals_the_original(name):
    case = table("preprocess")[name]
    got = process_abilities(case["in_abilities"], case["in_weapon_id"], original=True)
    assert list(got) == [case["out_index"], case["out_ability_tags"]]


def test_only_legal_builds_are_kept_by_default():
    case = table("preprocess")["some_columns_missing"]
    assert process_abilities(case["in_abilities"], case["in_weapon_id"])[0] == [0, 1, 3]


def test_device_masks_hide_as_many_tokens_as_the_rule_says():
    targets = jnp.tile(jnp.arange(6), (40_000, 1))
    hidden = 6 - (hide(targets, jnp.arange(40_000), jax.random.key(0)) >= 0).sum(1)
    np.testing.assert_allclose(np.bincount(hidden, minlength=6)[1:] / 40_000, removal_probabilities(5), atol=0.01)


def test_device_masks_hide_every_token_equally_often():
    targets = jnp.tile(jnp.arange(6), (20_000, 1))
    seen = (hide(targets, jnp.arange(20_000), jax.random.key(1)) >= 0).mean(0)
    np.testing.assert_allclose(seen, seen.mean(), atol=0.02)


def test_what_is_hidden_depends_on_key_and_index_only():
    targets = jnp.tile(jnp.arange(9), (8, 1))
    whole = hide(targets, jnp.arange(8), jax.random.key(3))
    part = hide(targets[2:5], jnp.array([2, 3, 4]), jax.random.key(3))
    np.testing.assert_array_equal(part, whole[2:5])
    assert not np.array_equal(hide(targets, jnp.arange(8), jax.random.key(4)), whole)


def test_null_instances_and_sets_of_one_token():
    targets = jnp.array([[5, 6, PADDING], [7, PADDING, PADDING], [5, 6, 7]])
    bare = hide(targets, jnp.array([1, 2, 3]), jax.random.key(0))
    assert bare[1].tolist() == [PADDING] * 3  # nothing to show: the loss leaves it out
    nulls = hide(targets, jnp.array([1, 2, 3]), jax.random.key(0), instances=3, null_id=9)
    assert nulls[1].tolist() == [9, PADDING, PADDING]
    assert nulls[2].tolist() == [9, PADDING, PADDING]  # index 3 is a first instance
    assert nulls[0].tolist() == bare[0].tolist()


def _three_files(folder):
    sets, weapons = [[12, 13, 30], [138], [1, 4]], [0, 2, 1]
    vocabulary = {f"weapon_id_{40 + i}": i for i in range(3)}
    return write_corpus(folder, sets, weapons, default_vocabulary(), vocabulary)


def test_tab_separated_files_and_sqlite_hold_the_same(tmp_path):
    path = _three_files(tmp_path)
    corpus = read_corpus(str(path))
    assert corpus.tokens.tolist() == [[12, 13, 30], [138, -1, -1], [1, 4, -1]]
    assert corpus.weapons.tolist() == [[0], [2], [1]]
    with sqlite3.connect(tmp_path / "corpus.db") as connection:
        connection.execute("CREATE TABLE builds (ability_tags TEXT, weapon_id INTEGER)")
        rows = [(json.dumps([i for i in row if i >= 0]), w) for row, (w,) in zip(*map(np.ndarray.tolist, corpus))]  # noqa: B905
        connection.executemany("INSERT INTO builds VALUES (?, ?)", rows)
    again = read_corpus(str(tmp_path / "corpus.db"), "builds", max_rows=2)
    np.testing.assert_array_equal(again.tokens, corpus.tokens[:2])


def test_a_comma_separated_file_is_named_as_such(tmp_path):
    path = tmp_path / "tokenized.csv"
    path.write_text("ability_tags,weapon_id\n[1],0\n")
    with pytest.raises(UserError, match="tab separated"):
        read_corpus(str(path))


def test_a_row_that_is_no_list_is_named(tmp_path):
    path = tmp_path / "tokenized.csv"
    path.write_text("ability_tags\tweapon_id\n[1]\t0\n[1 2]\t0\n")
    with pytest.raises(UserError, match="row 2"):
        read_corpus(str(path))


def test_a_model_too_small_for_the_data_is_refused_with_both_numbers(tmp_path):
    path = _three_files(tmp_path)
    files = [f"data.path={path}", f"data.vocab_path={tmp_path}/vocab.json"]
    settings = config(
        "splat_tiny", *files, f"data.weapon_vocab_path={tmp_path}/weapon_vocab.json", "model.vocab_size=99"
    )
    with pytest.raises(UserError, match="model.vocab_size is 99, the data want 140"):
        build_data(settings, "train")


def test_validation_masks_are_frozen_and_training_has_none():
    settings = config("splat_tiny")
    first, second = build_data(settings, "validation"), build_data(settings, "validation")
    np.testing.assert_array_equal(first.columns["inputs"], second.columns["inputs"])
    assert "inputs" not in build_data(settings, "train").columns


def test_items_of_the_originals_dataset_are_padded_to_one_width():
    rows = [{"ability_tags": list(range(n)), "weapon_id": n % 3} for n in (2, 5, 9)]
    dataset = SetDataset(rows, 12)
    batch = collate_sets([dataset[i] for i in range(0, len(dataset), 5)])
    assert {name: array.shape for name, array in batch.items()} == {
        "inputs": (3, 32),
        "targets": (3, 32),
        "weapon": (3, 1),
    }
    assert batch["targets"][1].tolist()[:6] == [0, 1, 2, 3, 4, PADDING]


def test_synthetic_builds_are_legal_and_follow_their_rules():
    vocabulary = default_vocabulary()
    corpus, planted = synthetic.generate(300, 4, 3, 0, vocabulary)
    names = {number: token for token, number in vocabulary.items()}
    sets = [
        ({names[i] for i in row if i >= 0}, int(w)) for row, (w,) in zip(corpus.tokens, corpus.weapons, strict=True)
    ]
    rules = [rule for rule in synthetic.planted_rules(planted) if rule.holds]
    kept = [
        rule.token in tokens
        for tokens, weapon in sets
        for rule in rules
        if rule.weapon == weapon and rule.seen in tokens
    ]
    assert len(kept) >= 600
    assert all(kept)
