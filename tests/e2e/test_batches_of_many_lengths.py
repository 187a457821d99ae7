"""Hugging Face's recipes with their own collate functions, which pad to the longest sample of a batch."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from jaxtrain import Trainer, TrainingConfig, UserError
from torch_bridge.torchvision_operators import declare_torchvision

BATCH, SAMPLES, EPOCHS = 8, 44, 2  # the last batch of an epoch has 4 samples


class Losses:
    def __init__(self):
        self.values = []

    def on_step_end(self, trainer, step, metrics):
        self.values.append(metrics["loss"])


class Items(torch.utils.data.Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return dict(self.items[index]) if isinstance(self.items[index], dict) else self.items[index]


def config(folder, **sections) -> TrainingConfig:
    return TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        **{"train": {"epochs": EPOCHS}, "tracking": {"tensorboard": False}} | sections,
    )


def loader(items, collate, size=BATCH):
    return DataLoader(Items(items), batch_size=size, collate_fn=collate)


def compare(folder, model, items, collate, loss=None, programs=8, rtol=1e-4, **sections) -> Trainer:
    """Train in torch and here, and compare every step's loss; validation losses too."""
    twin, train_set, held_out = copy.deepcopy(model), items[:SAMPLES], items[SAMPLES:]
    seen, step = Losses(), torch.optim.AdamW
    trainer = Trainer(
        model, loader(train_set, collate), loader(held_out, collate), config(folder, **sections), loss=loss,
        optimizer=step(model.parameters(), 1e-3), callbacks=[seen],
    )  # fmt: skip
    history = trainer.train()
    optimizer, wanted, validation = step(twin.parameters(), 1e-3), [], []
    own = lambda batch: twin(**batch).loss if loss is None else loss(twin(batch["ids"]), batch)
    for _ in range(EPOCHS):
        twin.train()
        for batch in loader(train_set, collate):
            optimizer.zero_grad()
            value = own(batch)
            value.backward()
            optimizer.step()
            wanted.append(value.item())
        twin.eval()
        with torch.no_grad():
            found = [(own(batch).item(), len(next(iter(batch.values())))) for batch in loader(held_out, collate)]
        validation.append(sum(value * rows for value, rows in found) / sum(rows for _, rows in found))
    np.testing.assert_allclose(seen.values, wanted, rtol=rtol)
    np.testing.assert_allclose([metrics["loss"] for metrics in history["val_history"]], validation, rtol=rtol)
    assert trainer.program.compilations <= programs
    return trainer


# --- the six notebooks ----------------------------------------------------------------------------------------------

TINY = {
    "vocab_size": 52, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
    "max_position_embeddings": 70, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
WORDS = [f"w{number}" for number in range(50)]


@pytest.fixture(scope="module")
def hf():
    declare_torchvision()
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    return transformers


@pytest.fixture
def tokenizer(hf):
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def sentences(count=SAMPLES + 20, least=3, most=67):
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, rng.integers(least, most + 1))) for _ in range(count)]


@pytest.mark.slow
def test_sequence_classification(tmp_path, hf, tokenizer):
    items = [{**tokenizer(text), "labels": number % 3} for number, text in enumerate(sentences())]
    model = hf.BertForSequenceClassification(hf.BertConfig(**TINY, num_labels=3))
    trainer = compare(tmp_path, model, items, hf.DataCollatorWithPadding(tokenizer))
    assert max(size.lengths for size in trainer.train_loader.batch_shapes.sizes) <= (70,)  # the model's longest
    assert "rounded up to at most 8" in (tmp_path / "train.log").read_text()


@pytest.mark.slow
def test_token_classification(tmp_path, hf, tokenizer):
    items = [dict(tokenizer(text)) for text in sentences()]
    items = [{**item, "labels": [token % 5 for token in item["input_ids"]]} for item in items]
    model = hf.BertForTokenClassification(hf.BertConfig(**TINY, num_labels=5))
    trainer = compare(tmp_path, model, items, hf.DataCollatorForTokenClassification(tokenizer))
    assert {axis.name: int(axis.value) for axis in trainer.train_loader.batch_shapes.axes}["labels"] == -100


@pytest.mark.slow
def test_question_answering(tmp_path, hf, tokenizer):
    items = [dict(tokenizer(text)) for text in sentences()]
    items = [{**item, "start_positions": 1, "end_positions": len(item["input_ids"]) - 1} for item in items]
    model = hf.BertForQuestionAnswering(hf.BertConfig(**TINY))
    compare(tmp_path, model, items, hf.DataCollatorWithPadding(tokenizer))


@pytest.mark.slow
def test_causal_language_model(tmp_path, hf, tokenizer):
    items = [dict(tokenizer(text)) for text in sentences(most=40)]
    settings = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 70, "vocab_size": 52}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**settings, **dropout))
    compare(tmp_path, model, items, hf.DataCollatorForLanguageModeling(tokenizer, mlm=False))


@pytest.mark.slow
def test_sequence_to_sequence(tmp_path, hf, tokenizer):
    texts = sentences(2 * (SAMPLES + 20), most=40)
    pairs = zip(texts[::2], texts[1::2], strict=True)
    items = [{**tokenizer(source), "labels": tokenizer(target)["input_ids"][:20]} for source, target in pairs]
    settings = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 52}
    model = hf.T5ForConditionalGeneration(hf.T5Config(**settings, dropout_rate=0.0, decoder_start_token_id=0))
    compare(tmp_path, model, items, hf.DataCollatorForSeq2Seq(tokenizer, model=model))


@pytest.mark.slow
def test_image_classification(tmp_path, hf):
    draw = torch.Generator().manual_seed(0)
    items = [{"image": torch.randn(3, 16, 16, generator=draw), "label": n % 4} for n in range(SAMPLES + 20)]

    def collate(examples):
        pixels = torch.stack([example["image"] for example in examples])
        return {"pixel_values": pixels, "labels": torch.tensor([example["label"] for example in examples])}

    small = {key: value for key, value in TINY.items() if key not in ("vocab_size", "max_position_embeddings")}
    model = hf.ViTForImageClassification(hf.ViTConfig(**small, image_size=16, patch_size=8, num_labels=4))
    compare(tmp_path, model, items, collate, programs=2)


# --- what padding must not change -----------------------------------------------------------------------------------


class Pooled(nn.Module):
    """Mean over all positions; with `masked`, over those that hold a token."""

    def __init__(self, masked: bool):
        super().__init__()
        self.masked, self.embedding, self.head = masked, nn.Embedding(20, 8), nn.Linear(8, 2)

    def forward(self, ids):
        vectors = self.embedding(ids)
        if not self.masked:
            return self.head(vectors.mean(1))
        held = (ids > 0).float()[..., None]
        return self.head((vectors * held).sum(1) / held.sum(1))


def padded(samples):
    return {
        "ids": pad_sequence([sample["ids"] for sample in samples], batch_first=True),
        "target": torch.tensor([sample["target"] for sample in samples]),
    }


def tokens(count=SAMPLES + 8, least=3, most=30):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(least, most + 1, (count,), generator=draw).tolist()
    return [{"ids": torch.randint(1, 20, (n,), generator=draw), "target": n % 2} for n in lengths]


def cross_entropy(output, batch):
    return F.cross_entropy(output, batch["target"])


def test_a_model_without_a_mask_keeps_every_length_and_is_told(tmp_path):
    torch.manual_seed(0)
    items = tokens(24, 3, 7)
    trainer = Trainer(
        Pooled(False), loader(items, padded), config=config(tmp_path, train={"steps": 2}), loss=cross_entropy
    )
    assert trainer.train_loader.batch_shapes.exact
    [note] = trainer.program.data.notes
    assert note.startswith("data.shapes: padding changes the result (the loss of a batch is")


@pytest.mark.slow
def test_a_model_without_a_mask_equals_torch(tmp_path):
    torch.manual_seed(0)
    items = tokens(SAMPLES + 8, 3, 8)
    compare(tmp_path, Pooled(False), items, padded, cross_entropy, programs=20)


@pytest.mark.slow
def test_a_masked_model_equals_torch_and_compiles_nothing_after_the_first_epoch(tmp_path):
    torch.manual_seed(0)
    trainer = compare(tmp_path, Pooled(True), tokens(), padded, cross_entropy, programs=5)
    steps = [size.step for size in trainer.train_loader.batch_shapes.sizes]
    assert max(steps) < trainer.steps_per_epoch


@pytest.mark.slow
def test_a_run_of_many_lengths_is_resumed_bit_for_bit(tmp_path):
    class Stop:
        def on_step_end(self, trainer, step, metrics):
            if step == 5:
                trainer.run.stop()

    def made(folder, callbacks=()):
        torch.manual_seed(0)
        model = Pooled(True)
        shuffled = DataLoader(
            Items(tokens()), BATCH, shuffle=True, collate_fn=padded, generator=torch.Generator().manual_seed(3)
        )
        Trainer(model, shuffled, config=config(folder), loss=cross_entropy, callbacks=callbacks).train()
        return model.state_dict()

    whole = made(tmp_path / "whole")
    made(tmp_path / "cut", [Stop()])
    resumed = made(tmp_path / "cut")
    for name, value in whole.items():
        assert torch.equal(resumed[name], value), name


@pytest.mark.slow
def test_ragged_datasets_are_padded_where_a_value_is_declared(tmp_path):
    items = Items([{"ids": item["ids"], "target": item["target"]} for item in tokens(24)])
    settings = config(tmp_path, data={"batch_size": BATCH, "shuffle": False}, train={"steps": 3})
    with pytest.raises(UserError, match="the dataset is ragged"):
        Trainer(Pooled(True), items, config=settings, loss=cross_entropy)
    seen = Losses()
    data = {"batch_size": BATCH, "shuffle": False, "pad_values": {"ids": 0}}
    torch.manual_seed(0)
    model = Pooled(True)
    twin = copy.deepcopy(model)
    settings = config(tmp_path, data=data, train={"steps": 3}, optim={"name": "sgd", "lr": 0.0})
    Trainer(model, items, config=settings, loss=cross_entropy, callbacks=[seen]).train()
    wanted = [cross_entropy(twin(batch["ids"]), batch).item() for batch in loader(items.items, padded)]
    np.testing.assert_allclose(seen.values, wanted, rtol=1e-5)


@pytest.mark.slow
def test_a_second_length_ends_a_run_that_asked_for_one(tmp_path):
    torch.manual_seed(0)
    settings = config(tmp_path, data={"shapes": "one"})
    with pytest.raises(UserError, match="the training step would compile again, because batch"):
        Trainer(Pooled(True), loader(tokens(), padded), config=settings, loss=cross_entropy).train()
