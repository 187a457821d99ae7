"""Text to rows: packing, chats, tokenizers, reading, keeping."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import chat, data
from jaxtrain.systems.memory_lm.config import Data, Model
from jaxtrain.systems.memory_lm.packing import IGNORE, pack, padding_ratio
from jaxtrain.systems.memory_lm.text_dataset import Encoder
from jaxtrain.systems.memory_lm.tokenizers import ByteTokenizer, from_json, train_bpe
from tests.contract.tasks import assert_equal, final_parameters, tiny

CHAT = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def settings(tmp_path, compat="correct", vocabulary=258, **options):
    section = Data(**{"max_length": 32, "cache_dir": str(tmp_path / "cache"), "tokenizer": "bytes", **options})
    return SimpleNamespace(data=section, model=Model(vocab_size=vocabulary), compat=compat)


def learned(tokenizer, row, **options) -> str:
    """The text that the labels of a chat teach, the end token shown."""
    labels = Encoder(tokenizer, None, "instruction_finetuning", **options).encode(row)[1]
    return tokenizer.decode([int(label) for label in labels if label != IGNORE], skip_special=False)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]},
        {"prompt": "Hi?", "response": "Yes."},
    ],
    ids=["messages", "conversations", "prompt_response"],
)
def test_every_chat_shape_teaches_the_answer_and_the_end(row):
    assert learned(ByteTokenizer(), row) == "Yes.<|endoftext|>"


def test_a_plain_text_column_is_the_fourth_chat_shape():
    assert learned(ByteTokenizer(), {"text": "Hi"}) == "Hi<|endoftext|>"


def test_the_originals_transcript_teaches_no_end():
    assert learned(ByteTokenizer(), {"messages": CHAT}, original=True) == "Yes."


def test_a_template_is_applied_and_its_end_marker_is_taught():
    text = train_bpe(["<|im_start|> <|im_end|> user assistant Hi? Yes."], 300)
    tokenizer = from_json(text, pad="<pad>", chat_template=CHATML)
    assert learned(tokenizer, {"messages": CHAT}) == "Yes.<|im_end|>"
    prompt = chat.prompt(tokenizer, [("user", "Hi?")])
    assert prompt == "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n"


PARTED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% for part in m['content'] %}"
    "{{ '[' + part['text'] + ']' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
)
IN_PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": "Ye"}, {"type": "text", "text": "s."}]},
]


@pytest.mark.parametrize(
    ("template", "said"), [(None, "Yes.<|endoftext|>"), (CHATML, "Yes.<|im_end|>"), (PARTED, "[Ye][s.]")]
)
def test_content_in_parts_is_read_as_the_template_reads_it(template, said):
    text = train_bpe(["<|im_start|> <|im_end|> user assistant Hi? Yes. [ ]"], 300)
    tokenizer = ByteTokenizer() if template is None else from_json(text, pad="<pad>", chat_template=template)
    assert said in learned(tokenizer, {"messages": IN_PARTS})


def test_a_part_that_is_no_text_is_refused():
    messages = [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}, *CHAT]
    with pytest.raises(UserError, match="a part of type image"):
        learned(ByteTokenizer(), {"messages": messages})


def test_a_row_without_text_is_refused_with_its_columns():
    with pytest.raises(UserError, match="the columns a"):
        Encoder(ByteTokenizer(), 8, "instruction_finetuning").encode({"a": 1})


def test_bytes_survive_the_way_there_and_back():
    text = "naïve 日本 <|endoftext|> \N{GRINNING FACE}"
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens.ids, skip_special=False) == text
    assert len(tokens.ids) == len(tokens.offsets)


def test_a_null_text_is_empty_here_and_the_word_none_in_the_original():
    encode = lambda original: Encoder(ByteTokenizer(), 8, original=original).encode({"text": None})[0]
    assert len(encode(False)) == 0
    assert ByteTokenizer().decode(encode(True)) == "None"


def documents(lengths):
    made = [np.arange(2, 2 + length, dtype=np.int32) for length in lengths]
    return [(one, one.copy()) for one in made]


def test_packing_keeps_every_token_once_and_in_order():
    columns = pack(documents([5, 30, 2, 11, 4]), 16, 0)
    kept = columns["input_ids"][columns["segment_ids"] > 0]
    np.testing.assert_array_equal(kept, np.concatenate([ids for ids, _ in documents([5, 30, 2, 11, 4])]))
    assert (columns["labels"][columns["segment_ids"] == 0] == IGNORE).all()


def test_documents_that_may_not_be_cut_stay_whole():
    columns = pack(documents([7, 9, 8, 7, 1]), 16, 0, split=False)
    assert columns["segment_ids"].max(axis=1).tolist() == [2, 2]
    assert padding_ratio(columns) == pytest.approx(1 / 32)


def test_positions_restart_with_every_segment():
    columns = pack(documents([3, 4]), 8, 0)
    assert columns["position_ids"][0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]


def test_padding_of_the_default_corpus_is_below_a_twentieth(tmp_path):
    source = data.build_data(settings(tmp_path, max_length=256, corpus_bytes=200_000), "train")
    assert padding_ratio(source.columns) < 0.05


def test_the_corpus_holds_nothing_out_that_it_trains_on():
    from jaxtrain.systems.memory_lm import corpus

    train, test = corpus.documents("train", 100_000), corpus.documents("test", 100_000)
    assert len(train) > len(test) > 0
    assert not set(train) & set(test)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "txt", "folder"])
def test_local_files_are_read(tmp_path, kind):
    import pandas

    rows = pandas.DataFrame({"text": ["first document", "second one"]})
    path = tmp_path / f"train.{kind}"
    write = {
        "jsonl": lambda: rows.to_json(path, orient="records", lines=True),
        "csv": lambda: rows.to_csv(path, index=False),
        "parquet": lambda: rows.to_parquet(path),
        "txt": lambda: path.write_text("\n".join(rows["text"])),
    }
    if kind == "folder":
        path = tmp_path / "set"
        path.mkdir()
        rows.to_json(path / "train.jsonl", orient="records", lines=True)
    else:
        write[kind]()
    source = data.build_data(settings(tmp_path, dataset_name=str(path)), "train")
    ids = source.columns["input_ids"][source.columns["segment_ids"] > 0]
    assert ByteTokenizer().decode(ids.tolist()) == "first documentsecond one"


def test_rows_are_tokenised_once(tmp_path, monkeypatch):
    config = settings(tmp_path, corpus_bytes=5000)
    first = data.build_data(config, "train").columns
    monkeypatch.setattr(data, "make_rows", None)
    second = data.build_data(config, "train").columns
    np.testing.assert_array_equal(first["input_ids"], second["input_ids"])


def test_a_hub_dataset_is_tokenised_anew_at_a_new_commit_and_once_at_the_same(tmp_path, monkeypatch):
    import huggingface_hub

    read = []
    monkeypatch.setattr(data, "_load", lambda section, split: [{"text": f"text {read.append(split)}"}])
    config = settings(tmp_path, dataset_name="lab/texts", eval_split=None)
    for sha in ("one", "one", "two"):
        info = SimpleNamespace(sha=sha)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, timeout, info=info: info)
        data.build_data(config, "train")
    assert read == ["train", "train"]


def test_a_changed_file_is_tokenised_anew(tmp_path):
    path = tmp_path / "train.jsonl"
    counts = []
    for text in ("one", "one and more"):
        path.write_text(json.dumps({"text": text}))
        columns = data.build_data(settings(tmp_path, dataset_name=str(path)), "train").columns
        counts.append(int((columns["segment_ids"] > 0).sum()))
    assert counts == [4, 13]


def test_a_vocabulary_that_is_too_small_is_refused_with_the_size_to_take(tmp_path):
    with pytest.raises(UserError, match=r"model.vocab_size=258"):
        data.build_data(settings(tmp_path, vocabulary=200, corpus_bytes=5000), "train")


def test_padded_rows_of_an_empty_document_are_all_padding(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"text": ""}\n{"text": "abc"}')
    columns = data.build_data(settings(tmp_path, dataset_name=str(path), packing=False), "train").columns
    assert columns["attention_mask"].sum(axis=1).tolist() == [0, 4]
    assert (columns["labels"][0] == IGNORE).all()


def test_batch_tokens_sets_the_batch_size():
    assert Data(max_length=128, batch_tokens=4096).batch_size == 32
    with pytest.raises(ValueError, match="less than one row"):
        Data(max_length=128, batch_tokens=100)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "eval_samples"),
        ({"eval_split": None}, "dataset_name of files or of the hub"),
        ({"eval_samples": 4, "dataset_name": "texts", "tokenizer": "bpe:300"}, "trained already"),
        ({"eval_samples": 4, "dataset_name": "t", "training_mode": "instruction_finetuning"}, "packing: false"),
    ],
)
def test_a_stream_without_end_says_what_it_needs(given, message):
    with pytest.raises(ValueError, match=message):
        Data(streaming=True, **given)


@pytest.mark.slow
def test_a_run_on_a_streamed_text_resumes_with_the_same_bits(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{i} " * (20 + i % 90)}) for i in range(400)))
    given = (f"data.dataset_name={path}", "data.streaming=true", "data.eval_split=null", "data.batch_size=8")
    quiet = ("evaluation.every_steps=null", "optim.schedule.name=constant", "checkpoint.every_steps=5")

    def trained(folder, steps):
        trainer = tiny("memory_lm.scratch", tmp_path / folder, *given, *quiet, f"train.steps={steps}")
        trainer.train()
        return final_parameters(trainer)

    whole = trained("whole", 10)
    trained("cut", 5)
    assert json.loads((tmp_path / "cut/checkpoints/5/meta.json").read_text())["stream"]["place"]["start"] > 0
    assert_equal(whole, trained("cut", 10))


TEXTS = ["abc", "d" * 40, "", "efghijk", "l" * 21, "mn", "o" * 9, "p" * 33]


def _stream(tmp_path, **options):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    given = {"dataset_name": str(path), "streaming": True, "eval_split": None, "num_samples": None, **options}
    return data.build_data(settings(tmp_path, **given), "train")


def _rows(source, place=None):
    """(row, the place after it) of a pass."""
    chunks = source.chunks(0, 0, 1, 1, None, place=place)
    return [(chunk[0], json.loads(json.dumps(source.place()))) for chunk in chunks]


@pytest.mark.parametrize("packing", [True, False])
def test_streamed_rows_are_those_that_are_read_at_once(tmp_path, packing):
    wanted = _stream(tmp_path, packing=packing, num_samples=len(TEXTS)).columns
    found = [row for row, _ in _rows(_stream(tmp_path, packing=packing))]
    assert wanted.keys() == found[0].keys()
    for name, column in wanted.items():
        np.testing.assert_array_equal(np.stack([row[name] for row in found]), column)


@pytest.mark.parametrize("packing", [True, False])
def test_a_streamed_text_goes_on_inside_a_document(tmp_path, packing):
    whole = _rows(_stream(tmp_path, packing=packing))
    assert len(whole) >= 4
    for done, (_, place) in enumerate(whole, start=1):
        rest = _rows(_stream(tmp_path, packing=packing), place)
        assert [row["input_ids"].tolist() for row, _ in rest] == [r["input_ids"].tolist() for r, _ in whole[done:]]


def test_a_stream_reads_its_rows_one_by_one(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in ("abc", "defg", "left out")))
    options = {"dataset_name": str(path), "streaming": True, "num_samples": 2}
    columns = data.build_data(settings(tmp_path, **options), "train").columns
    assert (columns["segment_ids"] > 0).sum() == 4 + 5


def test_evaluation_reads_a_dataset_of_its_own_with_the_training_datas_tokenizer(tmp_path):
    for name, text in (("train", "of what it learns"), ("held_out", "zzz")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"text": text}))
    options = {"dataset_name": str(tmp_path / "train.jsonl"), "tokenizer": "bpe:264", "vocabulary": 264}
    config = settings(tmp_path, eval_dataset_name=str(tmp_path / "held_out.jsonl"), **options)
    ids = data.build_data(config, "validation").columns["input_ids"][0]
    assert data.tokenizer_of(config).decode(ids.tolist()) == "zzz"
    with pytest.raises(UserError, match="data.eval_dataset_name: missing"):
        data.build_data(settings(tmp_path, **options), "validation")
