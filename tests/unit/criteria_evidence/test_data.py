"""Rows, splits, padding, buckets, and rows whose answer cannot be used."""

import csv
import logging

import numpy as np
import pytest

from jaxtrain import config_io
from jaxtrain.errors import UserError
from jaxtrain.systems.criteria_evidence import TASKS, data, synthetic, tokenization
from jaxtrain.train.trainer import Trainer
from tests.unit.criteria_evidence.golden import FOLDER

ENCODER = {"vocab_size": 131, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
ENCODER |= {"intermediate_size": 8, "max_position_embeddings": 64}
SYNTHETIC = {**ENCODER, "vocab_size": 55}


def settings(architecture: str, encoder=None, **sections):
    data_section = sections.get("data", {})
    encoder = encoder or (ENCODER if "path" in data_section else SYNTHETIC)
    sections["data"] = {"max_length": 32, "evidence_max_length": 48, **data_section}
    values = {"task": f"criteria_evidence.{architecture}", "model": {"encoder": encoder}, **sections}
    return config_io.validate(config_io.schema(TASKS[architecture]), values)


def fixture(**more):
    file = FOLDER / "fixture" / "redsm5_matched_evidence.csv"
    values = {"path": str(file), "tokenizer": str(FOLDER / "fixture" / "tokenizer.json"), "evidence_max_length": 40}
    return {**values, "max_length": 24, "ratios": (0.6, 0.2, 0.2), **more}


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, synthetic.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def broken_posts(tmp_path):
    """40 posts; row 3's answer is nowhere, row 5's is cut away."""
    rows = synthetic.rows(40)
    rows[3]["sentence_text"] = "words that are not there"
    rows[5]["post_text"] = " ".join(["today"] * 60) + " " + rows[5]["post_text"]
    source = synthetic.tokenizer()
    (tmp_path / "tokenizer.json").write_text(source.json)
    values = {"path": write_csv(tmp_path / "posts.csv", rows), "tokenizer": str(tmp_path / "tokenizer.json")}
    return {**values, "evidence_max_length": 40, "max_length": 20}


@pytest.mark.parametrize("architecture", TASKS)
def test_the_fixture_of_quoted_line_breaks_is_read_whole(architecture):
    corpus = data.load(architecture, settings(architecture, data=fixture()))
    assert sum(len(rows) for rows in corpus.splits.values()) == 18


def test_rows_without_an_answer_are_dropped_with_a_count(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        corpus = data.load("evidence", settings("evidence", SYNTHETIC, data=broken_posts(tmp_path)))
    assert corpus.dropped == [3, 5]
    assert sum(len(rows) for rows in corpus.splits.values()) == 38
    assert "2 answers cannot be used: Answer span not found in context. 1 rows (3)" in caplog.text


def test_rows_without_an_answer_are_an_error_on_request(tmp_path):
    config = settings("share", SYNTHETIC, data={**broken_posts(tmp_path), "on_missing_answer": "error"})
    with pytest.raises(UserError, match=r"Unable to align character span with token offsets. 1 rows \(5\)"):
        data.load("share", config)


def test_a_kept_row_without_an_answer_counts_for_its_label_only(tmp_path):
    config = settings("share", SYNTHETIC, data={**broken_posts(tmp_path), "on_missing_answer": "keep", "split": "rows"})
    corpus = data.load("share", config)
    assert sum(len(rows) for rows in corpus.splits.values()) == 40
    assert corpus.columns([3], {"": 40})["start_positions"].tolist() == [-1]
    with pytest.raises(UserError, match="keep needs a classifier"):
        data.load(
            "evidence", settings("evidence", SYNTHETIC, data={**broken_posts(tmp_path), "on_missing_answer": "keep"})
        )


@pytest.mark.parametrize(("compat", "shared"), [("correct", False), ("original", True)])
def test_posts_stay_together_unless_the_original_is_asked_for(compat, shared, tmp_path):
    rows = [{**row, "post_id": f"p{i // 4}"} for i, row in enumerate(synthetic.rows(80))]
    values = {**broken_posts(tmp_path), "path": write_csv(tmp_path / "grouped.csv", rows)}
    found = data.split_rows(rows, settings("criteria", SYNTHETIC, data=values, compat=compat))
    posts = {name: {rows[i]["post_id"] for i in members} for name, members in found.items()}
    assert bool(posts["train"] & posts["test"]) == shared
    assert sorted(i for members in found.values() for i in members) == list(range(80))


def test_class_weights_average_to_one_over_the_training_rows():
    config = settings("criteria", loss={"class_weights": "balanced"})
    corpus = data.load("criteria", config)
    weights, labels = corpus.row_weights[corpus.splits["train"]], corpus.examples.labels[corpus.splits["train"]]
    assert weights.mean() == pytest.approx(1, rel=1e-6)
    sums = [weights[labels == label].sum() for label in (0, 1)]
    assert sums[0] == pytest.approx(sums[1], rel=1e-6)


def test_tokens_are_read_from_the_cache_the_second_time(tmp_path, monkeypatch):
    tokenizer = synthetic.tokenizer()
    sentences = [row["sentence_text"] for row in synthetic.rows(5)]
    first = tokenizer.encode_cached(sentences, None, 16, tmp_path)
    monkeypatch.setattr(tokenization.Tokenizer, "encode", lambda *_: pytest.fail("tokenized again"))
    second = tokenizer.encode_cached(sentences, None, 16, tmp_path)
    for name in ("bounds", "ids", "types", "offsets", "sequence"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_another_text_misses_the_cache(tmp_path):
    tokenizer = synthetic.tokenizer()
    tokenizer.encode_cached(["tired today"], None, 16, tmp_path)
    assert tokenizer.encode_cached(["sad today"], None, 16, tmp_path).ids.tolist() != []
    assert len(list(tmp_path.glob("*.npz"))) == 2


def buckets(count: int, **more) -> data.TextSource:
    values = {"padding": "buckets", "num_buckets": count, "synthetic_posts": 120, **more}
    return TASKS["joint"].build_data(settings("joint", data=values), "train")


def test_a_batch_is_padded_to_the_smallest_bucket_that_holds_it():
    source = buckets(4)
    lengths = source.corpus.examples.texts["evidence_"].lengths[source.rows]
    shapes = set()
    for first in range(0, 80, 8):
        indices = np.arange(first, first + 8)
        batch = source.collate_for(indices)([source[i] for i in indices])
        width = batch["evidence_input_ids"].shape[1]
        assert lengths[indices].max() <= width <= source.widths["evidence_"][-1]
        shapes.add((batch["criteria_input_ids"].shape, batch["evidence_input_ids"].shape))
    assert len(shapes) <= source.batch_shapes <= 4


def test_the_shape_depends_on_the_whole_batch_not_on_one_process_rows():
    source = buckets(4)
    widest = int(np.argmax(source.need))
    indices = np.array([*range(7), widest])
    batch = source.collate_for(indices)([source[i] for i in indices[:4]])
    assert batch["evidence_input_ids"].shape == (4, source.widths["evidence_"][-1])


@pytest.mark.slow
def test_a_run_with_buckets_compiles_at_most_one_step_per_bucket(tmp_path):
    values = {"padding": "buckets", "num_buckets": 3, "synthetic_posts": 60, "batch_size": 4}
    config = settings(
        "evidence",
        data={**values, "evidence_max_length": 48},
        train={"epochs": 1},
        run={"dir": str(tmp_path), "quiet": True},
        shard={"devices": 1},
        tracking={"tensorboard": False},
    )
    trainer = Trainer(config=config, task=TASKS["evidence"])
    trainer.train()
    source = trainer.source("train")
    assert 2 <= source.batch_shapes <= 3
    assert 2 <= trainer.program.compilations <= source.batch_shapes


def test_with_masked_padding_the_loss_does_not_depend_on_the_width():
    values = []
    for padding in ("fixed", "buckets"):
        config = settings("evidence", data={"padding": padding, "evidence_max_length": 60}, loss={"mask_padding": True})
        source = TASKS["evidence"].build_data(config, "validation")
        trainer_batch = (
            source[np.arange(8)]
            if padding == "fixed"
            else source.collate_for(np.arange(8))([source[i] for i in range(8)])
        )
        model = _model(config)
        values.append(
            float(TASKS["evidence"].loss(model, {**trainer_batch, "valid": np.ones(8, bool)}, config, None).value)
        )
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def _model(config):
    from flax import nnx

    return TASKS["evidence"].build_model(config, nnx.Rngs(0))


MISTAKES = [
    ({"encoder": {**SYNTHETIC, "vocab_size": 20}}, {"max_length": 32}, "vocab_size is 20"),
    ({"encoder": SYNTHETIC}, {}, "takes 64 tokens, texts are padded to 256; set data.max_length=64"),
    ({"encoder": {**SYNTHETIC, "max_position_embeddings": 8}}, {"padding": "buckets"}, "takes 8 tokens"),
    ({"encoder": {**SYNTHETIC, "pad_token_id": 1}}, {"max_length": 32}, "pads with 0"),
]


@pytest.mark.parametrize(("model", "values", "message"), MISTAKES)
def test_an_encoder_that_does_not_fit_the_texts_is_refused(model, values, message):
    config = config_io.validate(config_io.schema(TASKS["criteria"]), {"model": model, "data": values})
    with pytest.raises(UserError, match=message):
        data.load("criteria", config)


FILES = [
    ("", "is empty"),
    ("status,sentence_text\n", "no rows"),
    ("status\n1\n", "no column sentence_text"),
    ("status,sentence_text\nyes,a\n", "row 0: status is 'yes'"),
]


@pytest.mark.parametrize(("content", "message"), FILES)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(content, message, tmp_path):
    path = tmp_path / "annotations.csv"
    path.write_text(content)
    values = fixture(path=str(path), split="rows")
    with pytest.raises(UserError, match=message):
        data.load("criteria", settings("criteria", data=values))


def test_a_missing_file_and_a_missing_tokenizer_are_named(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        data.load("criteria", settings("criteria", data=fixture(path=str(tmp_path / "none.csv"))))
    with pytest.raises(UserError, match=r"data\.tokenizer: is not set"):
        data.load("criteria", settings("criteria", data=fixture(tokenizer=None)))
