"""`from jaxtrain.transformers import Trainer`: transformers' own loop, curves and checkpoints, the step compiled."""

import json
import os

import numpy as np
import pytest
import torch

from jaxtrain import UserError
from torch_bridge.torchvision_operators import declare_torchvision

os.environ["HF_HUB_OFFLINE"] = "1"
declare_torchvision()
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import jaxtrain.transformers as ours  # noqa: E402

ENGINES = {"transformers": transformers.Trainer, "jaxtrain": ours.Trainer}


def classifier(dropout: float = 0.0):
    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            num_labels=3, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
            max_position_embeddings=40,
        )
    )  # fmt: skip


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        ids = torch.randint(1, 60, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": int(ids.sum()) % 3}


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def trainer(engine: str, folder, model=None, **more):
    options = {
        "per_device_train_batch_size": 8, "num_train_epochs": 3, "learning_rate": 1e-3, "weight_decay": 0.1,
        "warmup_steps": 3, "logging_steps": 1, "report_to": [], "use_cpu": True, "eval_strategy": "epoch",
        "save_strategy": "epoch", "disable_tqdm": True,
    } | more  # fmt: skip
    arguments = transformers.TrainingArguments(output_dir=str(folder), **options)
    return ENGINES[engine](
        classifier() if model is None else model,
        arguments,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        compute_metrics=accuracy,
    )


def curve(made) -> list[float]:
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_accuracy")
    return [entry[name] for entry in made.state.log_history for name in names if name in entry]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"gradient_accumulation_steps": 3}, id="accumulation"),
        pytest.param(
            {"label_smoothing_factor": 0.1, "lr_scheduler_type": "cosine"}, id="smoothing", marks=pytest.mark.slow
        ),
    ],
)
def test_the_curve_and_the_files_are_transformers(tmp_path, options):
    runs = {name: trainer(name, tmp_path / name, **options) for name in ENGINES}
    for made in runs.values():
        made.train()
    theirs, mine = runs.values()
    np.testing.assert_allclose(curve(mine), curve(theirs), rtol=1e-4, atol=1e-6)
    listed = [sorted(str(p.relative_to(tmp_path / name)) for p in (tmp_path / name).rglob("*")) for name in ENGINES]
    assert listed[0] == listed[1]


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return {"x": torch.randn(6, generator=torch.Generator().manual_seed(index)), "labels": float(index % 3)}


class ClearsAll(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, optimizer, **more):
        optimizer.zero_grad()


@pytest.mark.parametrize("clears", [False, True], ids=["added up", "cleared"])
def test_weights_of_the_loss_itself_are_trained_and_neither_clipped_nor_counted_in_the_norm(tmp_path, clears):
    """transformers clears the gradients of the model alone, so the loss's add up unless a library clears them."""
    weights, curves = [], []
    for name, engine in ENGINES.items():
        torch.manual_seed(0)
        model, head = torch.nn.Linear(6, 4), torch.nn.Linear(4, 1)

        class WithHead(engine):
            clears_all_gradients = clears

            def compute_loss(self, model, inputs, head=head, **more):
                return ((head(model(inputs["x"]))[:, 0] - inputs["labels"]) ** 2).mean()

        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / name), per_device_train_batch_size=4, max_steps=6, max_grad_norm=0.05,
            logging_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no",
            remove_unused_columns=False,
        )  # fmt: skip
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        made = WithHead(model, arguments, train_dataset=Points(), optimizers=(optimizer, None))
        if clears:
            made.add_callback(ClearsAll())
        made.train()
        if name == "jaxtrain":
            assert (made._xla_step is not None) == clears  # compiled, or left to torch
        weights.append([*model.state_dict().values(), *head.state_dict().values()])
        curves.append(curve(made))
    assert len(curves[0]) == 18
    np.testing.assert_allclose(*curves, rtol=1e-5)
    for theirs, mine in zip(*weights, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


class Varying(Sentences):
    def __getitem__(self, index):
        item = super().__getitem__(index)
        length = 3 + index % 6
        return item | {key: item[key][:length] for key in ("input_ids", "attention_mask")}


def batch_encoding(rows):
    """Padded to the longest, in the class that tokenizers give."""
    names = ("input_ids", "attention_mask")
    padded = {n: torch.nn.utils.rnn.pad_sequence([row[n] for row in rows], batch_first=True) for n in names}
    return transformers.BatchEncoding(padded | {"labels": torch.tensor([row["labels"] for row in rows])})


@pytest.mark.slow
def test_batches_of_many_lengths_come_in_a_tokenizers_own_class(tmp_path):
    runs = {name: trainer(name, tmp_path / name, max_steps=5, save_strategy="no") for name in ENGINES}
    for made in runs.values():
        made.train_dataset, made.data_collator = Varying(), batch_encoding
        made.train()
    theirs, mine = runs.values()
    np.testing.assert_allclose(curve(mine), curve(theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [("transformers", "jaxtrain"), ("jaxtrain", "transformers")])
def test_20_steps_on_each_side_are_40_of_transformers(tmp_path, first, second):
    more = {"lr_scheduler_type": "constant", "eval_strategy": "no", "save_strategy": "steps", "save_steps": 20}
    trainer(first, tmp_path / "parts", max_steps=20, **more).train()
    reference = trainer("transformers", tmp_path / "reference", max_steps=40, **more)
    reference.train()
    resumed = trainer(second, tmp_path / "parts", max_steps=40, **more)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts/checkpoint-20"))
    for key, value in reference.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[key], value, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_resumed_run_with_dropout_has_the_bits_of_an_uninterrupted_one(tmp_path):
    whole = trainer("jaxtrain", tmp_path / "whole", classifier(0.1))
    whole.train()
    parts = trainer("jaxtrain", tmp_path / "whole", classifier(0.1))
    parts.train(resume_from_checkpoint=str(tmp_path / "whole/checkpoint-7"))
    for key, value in whole.model.state_dict().items():
        assert torch.equal(parts.model.state_dict()[key], value), key
    state = json.loads((tmp_path / "whole/checkpoint-21/trainer_state.json").read_text())
    assert state["global_step"] == 21


class Weighted:
    """A subclass of the user's with a loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = torch.nn.functional.cross_entropy(outputs.logits, labels, torch.tensor([1.0, 2.0, 0.5]))
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_a_subclass_that_overrides_compute_loss(tmp_path):
    curves = {}
    for name, base in ENGINES.items():
        kind = type("Own", (Weighted, base), {})
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / name), per_device_train_batch_size=8, max_steps=6, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        made = kind(classifier(), arguments, train_dataset=Sentences())
        made.train()
        curves[name] = curve(made)
    np.testing.assert_allclose(curves["jaxtrain"], curves["transformers"], rtol=1e-4, atol=1e-6)


def with_texts(rows):
    """Padded as Sentences are, with a text, numbers and a list of texts that no two batches share."""
    batch = torch.utils.data.default_collate(rows)
    names = [f"row {int(ids.sum())}" for ids in batch["input_ids"]]
    return batch | {"names": names, "first": names[0], "rows": len(names)}


class ReadsPython(Weighted):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        names, first, rows = (inputs.pop(name) for name in ("names", "first", "rows"))
        assert isinstance(first, str)
        assert len(names) == rows
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss * (1 + rows / 8)
        return (loss, outputs) if return_outputs else loss


@pytest.mark.slow
def test_texts_and_numbers_in_a_batch_ask_for_no_program_of_their_own(tmp_path):
    curves = {}
    for name, base in ENGINES.items():
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / name), per_device_train_batch_size=8, max_steps=9, logging_steps=1, report_to=[],
            use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
        )  # fmt: skip
        made = type("Own", (ReadsPython, base), {})(
            classifier(), arguments, train_dataset=Sentences(), data_collator=with_texts
        )
        made.train()
        curves[name] = curve(made)
    np.testing.assert_allclose(curves["jaxtrain"], curves["transformers"], rtol=1e-4, atol=1e-6)
    assert len(made._xla_step.programs) <= 3  # captured or recorded, of 8 rows and of the last 2


class Halves(transformers.TrainerCallback):
    """Reads and changes weights between steps."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            model.classifier.bias.mul_(0.5)


@pytest.mark.slow
def test_a_callback_that_changes_weights_between_steps_is_obeyed(tmp_path):
    ends = {}
    for name in ENGINES:
        made = trainer(name, tmp_path / name, max_steps=5, eval_strategy="no", save_strategy="no")
        made.add_callback(Halves())
        made.train()
        ends[name] = made.model.classifier.bias.detach()
    torch.testing.assert_close(ends["jaxtrain"], ends["transformers"], rtol=1e-4, atol=1e-6)


class Clips(transformers.TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        args.max_grad_norm = [0.05, 0.0, 1.0][state.global_step % 3]


@pytest.mark.slow
def test_a_limit_of_gradients_that_a_callback_sets_counts(tmp_path):
    ends = {}
    for name in ENGINES:
        options = {"max_steps": 6, "optim": "sgd", "learning_rate": 0.1}
        made = trainer(name, tmp_path / name, eval_strategy="no", save_strategy="no", **options)
        made.add_callback(Clips())
        made.train()
        ends[name] = made.model.classifier.weight.detach()
    torch.testing.assert_close(ends["jaxtrain"], ends["transformers"], rtol=1e-4, atol=1e-6)


class Watches(transformers.TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.seen.append(model.classifier.bias.detach().clone())


@pytest.mark.slow
def test_a_callback_that_reads_weights_between_steps_sees_the_newest(tmp_path):
    seen = {}
    for name in ENGINES:
        made, callback = trainer(name, tmp_path / name, max_steps=5, eval_strategy="no", save_strategy="no"), Watches()
        made.add_callback(callback)
        made.train()
        seen[name] = torch.stack(callback.seen)
    assert len(seen["jaxtrain"]) == 5
    torch.testing.assert_close(seen["jaxtrain"], seen["transformers"], rtol=1e-4, atol=1e-6)


class ReadsGradients(transformers.TrainerCallback):
    def __init__(self):
        self.norms = []

    def read(self, args, state, control, model=None, **kwargs):
        self.norms.append(float(model.classifier.weight.grad.norm()))


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["on_pre_optimizer_step", "on_optimizer_step"])
def test_a_callback_that_reads_gradients_sees_transformers(tmp_path, hook):
    norms, kind = {}, type("Reads", (ReadsGradients,), {hook: ReadsGradients.read})
    for name in ENGINES:
        made = trainer(name, tmp_path / name, max_steps=5, eval_strategy="no", save_strategy="no")
        norms[name] = kind()
        made.add_callback(norms[name])
        made.train()
    np.testing.assert_allclose(norms["jaxtrain"].norms, norms["transformers"].norms, rtol=1e-4)


class Lengths(Sentences):
    def __getitem__(self, index):
        ids = torch.randint(1, 60, (3 + index % 30,), generator=torch.Generator().manual_seed(index)).tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": sum(ids) % 3}


def collate(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    fill = lambda name, value: [sample[name] + [value] * (longest - len(sample[name])) for sample in samples]
    made = {"input_ids": fill("input_ids", 0), "attention_mask": fill("attention_mask", 0)}
    return {k: torch.tensor(v) for k, v in (made | {"labels": [sample["labels"] for sample in samples]}).items()}


@pytest.mark.slow
def test_batches_of_many_lengths_are_rounded_to_8_shapes_at_most(tmp_path, capsys):
    runs = {name: trainer(name, tmp_path / name, eval_strategy="no", save_strategy="no") for name in ENGINES}
    for made in runs.values():
        made.train_dataset, made.data_collator = Lengths(), collate
        made.train()
    np.testing.assert_allclose(curve(runs["jaxtrain"]), curve(runs["transformers"]), rtol=1e-4, atol=1e-6)
    assert "input_ids, attention_mask), which are rounded up to at most 8 shapes" in capsys.readouterr().out
    assert len(runs["jaxtrain"]._xla_step.programs) <= 8


@pytest.mark.slow
@pytest.mark.parametrize("option", [{"torch_compile": True}, {"push_to_hub": True}])
def test_an_argument_without_counterpart_is_named_before_training(tmp_path, option):
    with pytest.raises(UserError, match=next(iter(option))):
        trainer("jaxtrain", tmp_path, **option)


@pytest.mark.slow
def test_a_training_step_outside_train_leaves_gradients_and_weights_as_transformers_does(tmp_path):
    found = {}
    for name in ENGINES:
        made = trainer(name, tmp_path / name)
        made.create_optimizer_and_scheduler(10)
        made.current_gradient_accumulation_steps = 1
        made.training_step(made.model, next(iter(made.get_train_dataloader())))
        found[name] = [(p.detach(), p.grad) for p in made.model.parameters()]
    torch.testing.assert_close(found["jaxtrain"], found["transformers"], rtol=1e-4, atol=1e-6)
