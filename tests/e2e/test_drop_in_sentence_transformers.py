"""`from jaxtrain.sentence_transformers import SentenceTransformerTrainer`: the library's losses, the step compiled."""

import os

import numpy as np
import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
library = pytest.importorskip("sentence_transformers", minversion="6.0")

import datasets  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
from sentence_transformers import losses  # noqa: E402
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer  # noqa: E402

import jaxtrain.sentence_transformers as ours  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(30))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny BERT with its tokenizer, as transformers saves them."""
    path = tmp_path_factory.mktemp("bert")
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, mask_token="[MASK]", **special).save_pretrained(path)
    torch.manual_seed(0)
    transformers.BertModel(
        transformers.BertConfig(
            vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=40, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    ).save_pretrained(path)  # fmt: skip
    return path


def text(index: int, length: int = 6) -> str:
    return " ".join(f"w{number}" for number in np.random.default_rng(index).integers(0, 30, length))


def pairs():
    rows = [{"anchor": text(i), "positive": text(i + 100)} for i in range(24)]
    return datasets.Dataset.from_list(rows)


def scored():
    rows = [{"sentence1": text(i), "sentence2": text(i + 100), "score": (i % 5) / 4} for i in range(24)]
    return datasets.Dataset.from_list(rows)


def labelled():
    rows = [{"premise": text(i), "hypothesis": text(i + 100), "label": i % 3} for i in range(24)]
    return datasets.Dataset.from_list(rows)


LOSSES = {
    "ranking": (pairs, losses.MultipleNegativesRankingLoss),
    "cosine": (scored, losses.CosineSimilarityLoss),
    "softmax": (labelled, lambda model: losses.SoftmaxLoss(model, 16, 3)),  # with weights of its own
}


def train(engine, folder, output, data, loss):
    bert = Transformer(str(folder))
    model = library.SentenceTransformer(modules=[bert, Pooling(16, "mean")], device="cpu")
    torch.manual_seed(1)
    arguments = library.SentenceTransformerTrainingArguments(
        output_dir=str(output), per_device_train_batch_size=4, max_steps=6, learning_rate=1e-2, logging_steps=1,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = engine.SentenceTransformerTrainer(model, arguments, train_dataset=data(), loss=loss(model))
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    "name", [name if name == "ranking" else pytest.param(name, marks=pytest.mark.slow) for name in LOSSES]
)
def test_the_losses_and_weights_are_the_librarys(folder, tmp_path, name, capsys):
    theirs = train(library, folder, tmp_path / "theirs", *LOSSES[name])
    capsys.readouterr()
    mine = train(ours, folder, tmp_path / "mine", *LOSSES[name])
    print(capsys.readouterr().out)
    curve = lambda trainer: [
        entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry
    ]
    assert len(curve(mine)) == 12
    np.testing.assert_allclose(curve(mine), curve(theirs), rtol=1e-5, atol=1e-6)
    # Adam turns the rounding of gradients near 0 into steps: with softmax, the library's weights in float32 are 5e-5
    # from those in float64.
    most = 1e-4 if name == "softmax" else 1e-5
    for key, value in theirs.model.state_dict().items():
        torch.testing.assert_close(mine.model.state_dict()[key], value, rtol=0, atol=most)
    for key, value in theirs.loss.state_dict().items():
        torch.testing.assert_close(mine.loss.state_dict()[key], value, rtol=0, atol=most)
    embeddings = [trainer.model.encode([text(500)]) for trainer in (theirs, mine)]
    np.testing.assert_allclose(*embeddings, atol=1e-5)


def test_every_trainer_of_the_library_is_replaced_and_every_other_name_is_its_own():
    names = [name for name in library.__all__ if name.endswith("Trainer")]
    assert len(names) >= 4
    assert [name for name in names if getattr(ours, name) is getattr(library, name)] == []
    assert [n for n in library.__all__ if n not in names and getattr(ours, n) is not getattr(library, n)] == []
