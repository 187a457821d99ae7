"""A user's session with the original's datasets, loaders, optimizers, Trainer and Evaluator."""

import json
import sys
import types
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from jaxtrain.systems import criteria_evidence as psy
from tests.unit.criteria_evidence.facade import case_of, folder_of, original, params_of
from tests.unit.criteria_evidence.golden import FOLDER, assert_near, table

FIXTURE = FOLDER / "fixture"
FILES = {"criteria": "redsm5_annotations.csv"}
LENGTHS = {"criteria": {"max_length": 24}, "evidence": {"max_length": 40}, "share": {"max_length": 40}}
LENGTHS |= {"joint": {"criteria_max_length": 24, "evidence_max_length": 40}}


def dataset_of(name: str, tokenizer=str(FIXTURE / "tokenizer.json")):
    family, architecture = name.split("_")
    kind = getattr(original("architectures" if family == "arch" else "datasets"), f"{architecture.capitalize()}Dataset")
    path = FIXTURE / FILES.get(architecture, "redsm5_matched_evidence.csv")
    options = {"dsm_criteria_path": str(FIXTURE / "dsm_criteria.json"), "pair": family == "arch"}
    if architecture == "joint":
        return kind(path, tokenizer, tokenizer, **options, **LENGTHS[architecture])
    return kind(path, tokenizer, **options, **LENGTHS[architecture])


@pytest.mark.parametrize("name", sorted(table("data_pipeline")["ok_rows"]))
def test_items_are_the_originals(name):
    case, tensors = case_of("data_pipeline")
    dataset, rows = dataset_of(name), case["ok_rows"][name]
    items = [dataset[row] for row in rows]
    assert set(items[0]) == set(case["item_keys"][name])
    for key in items[0]:
        found = torch.stack([item[key] for item in items])
        assert found.dtype == torch.int64
        assert torch.equal(found, tensors[f"out/{name}.{key}"].long()), key
    for row, message in case["errors"].get(name, {}).items():
        with pytest.raises(ValueError, match=message.removeprefix("ValueError: ")):
            dataset[int(row)]


class StubTokenizer:
    """What a test of a user's own takes for a tokenizer."""

    def __call__(self, text, padding, truncation, max_length, return_tensors):
        ids = [len(word) for word in text.split()][:max_length]
        ids += [0] * (max_length - len(ids))
        ids = torch.tensor([ids])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}


def test_a_tokenizer_of_ones_own_works_and_a_loader_stacks_items(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("sentence_text,status\nso very tired,1\nfine,0\n")
    dataset = psy.CriteriaDataset(path, StubTokenizer(), max_length=5)
    batch = next(iter(DataLoader(dataset, batch_size=2)))
    assert batch["input_ids"].tolist() == [[2, 4, 5, 0, 0], [4, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        (None, FileNotFoundError, "no such file"),
        ("", ValueError, "is empty"),
        ("sentence_text,status\n", ValueError, "no rows"),
        ("sentence_text\na\n", KeyError, "no column status"),
    ],
)
def test_a_wrong_file_raises_what_the_original_raises(tmp_path, text, error, message):
    path = tmp_path / "rows.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=message):
        psy.CriteriaDataset(path, StubTokenizer())


def test_splits_by_post_are_the_originals_and_overlaps_are_refused(tmp_path):
    case = table("splits")["group_split_70_15_15"][0]
    parts = psy.group_split_by_post_id([f"s_{i}" for i in range(case["n"])], random_seed=case["seed"])
    assert parts == (case["train"], case["val"], case["test"])
    psy.save_splits_json(*parts, tmp_path / "splits.json")
    saved = psy.load_splits_json(tmp_path / "splits.json")
    assert saved["train"] == case["train"]
    assert saved["metadata"]["total_count"] == 10
    (tmp_path / "splits.json").write_text(json.dumps({"train": ["a"], "val": ["a"], "test": []}))
    with pytest.raises(ValueError, match="Data leakage"):
        psy.load_splits_json(tmp_path / "splits.json")


@pytest.mark.parametrize("case", table("lr_tables")["cases"])
def test_schedulers_step_as_the_originals(case):
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=case["lr"])
    if case["api"] == "setup":
        config = {"scheduler": {"type": case["name"], "warmup_ratio": case["warmup_ratio"]}}
        scheduler = psy.create_scheduler(optimizer, config, case["total_steps"])
    elif case["name"] == "none":
        scheduler = psy.create_scheduler(optimizer, {"scheduler": {"name": "none"}}, case["total_steps"])
    else:
        given = (case["warmup_steps"], case["total_steps"], case.get("num_cycles"))
        scheduler = psy.get_scheduler(case["name"], optimizer, *given)
    assert (scheduler is None) == case["scheduler_is_none"]
    rates = []
    for _ in case["lr_at_step"] or []:
        rates.append(optimizer.param_groups[0]["lr"])
        if scheduler is not None:
            optimizer.step()
            scheduler.step()
    assert rates == pytest.approx(case["lr_at_step"] or [], abs=1e-12)


def test_losses_have_torchs_values_and_gradients():
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    labels = torch.tensor([0, 1, 2, 0, 1, 1])
    torch.testing.assert_close(psy.FocalLoss(gamma=0.0)(logits, labels), nn.functional.cross_entropy(logits, labels))
    weights = psy.class_weights(labels, 3)
    assert float(weights[labels].mean()) == pytest.approx(1)
    assert weights[2] > weights[0] > weights[1]
    loss = psy.FocalLoss(gamma=2.0, alpha=weights, label_smoothing=0.1)(logits, labels)
    loss.backward()
    assert logits.grad.abs().sum() > 0
    spans = [torch.randn(2, 5, requires_grad=True) for _ in range(2)]
    batch = {"labels": labels[:2], "start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 4])}
    total = psy.multi_task_loss((logits[:2], *spans), batch, {"criteria": 0.5, "evidence": 2.0})
    want = 2 * psy.span_loss(*spans, batch["start_positions"], batch["end_positions"])
    torch.testing.assert_close(total, want + 0.5 * nn.functional.cross_entropy(logits[:2], labels[:2]))


def batches_of(tensors, split: str) -> list[dict[str, torch.Tensor]]:
    found, names = [], ("input_ids", "attention_mask", "labels")
    while f"in/{split}{len(found)}_input_ids" in tensors:
        found.append({name: tensors[f"in/{split}{len(found)}_{name}"].long() for name in names})
    return found


def recorded(name: str, tmp_path, monkeypatch):
    """The golden run's Trainer as its user builds it."""
    case, tensors = case_of(name)
    model = original("project").Criteria(folder_of(tmp_path / "encoder", case["encoder"]), classifier_dropout=0.0)
    model.load_state_dict(params_of(tensors), strict=True)
    settings = case["optim"]
    optimizer = psy.create_optimizer(model, {"learning_rate": settings["lr"], "weight_decay": settings["weight_decay"]})
    scheduler = psy.get_scheduler(settings["scheduler"], optimizer, settings["warmup_steps"], settings["total_steps"])
    calls = []
    mlflow = types.SimpleNamespace(active_run=lambda: True, log_metrics=lambda values, step=None: calls.append(step))
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    trainer = psy.Trainer(
        model=model,
        train_loader=batches_of(tensors, "train"),
        val_loader=batches_of(tensors, "val"),
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        device=torch.device("cpu"),
        scheduler=scheduler,
        save_dir=tmp_path / "checkpoints",
        **case["trainer"],
    )
    return trainer, case, tensors, calls


@pytest.mark.slow
def test_the_recorded_run_is_the_originals_to_its_checkpoints(tmp_path, monkeypatch):
    trainer, case, tensors, calls = recorded("trainer_run", tmp_path, monkeypatch)
    final = trainer.train()
    assert final == pytest.approx(case["final"], abs=1e-6)
    epochs = [{k: v for k, v in one.items() if k != "epoch_time"} for one in trainer.training_history]
    for got, want in zip(epochs, case["history"], strict=True):
        assert_near(got, want, 1e-4)
    assert calls == [call[2] for call in case["mlflow_calls_[name, metric keys, step]"]]
    assert trainer.global_step == case["global_step"]
    saved = torch.load(tmp_path / "checkpoints" / "best_checkpoint.pt", weights_only=True)
    assert sorted(saved) == case["best_checkpoint"]["keys"]
    assert saved["epoch"] == case["best_checkpoint"]["epoch"]
    assert sorted(saved["optimizer_state_dict"]) == case["optimizer_state_keys"]
    for key, want in params_of(tensors, "final/").items():
        if not key.endswith("key.bias"):  # rounding alone moves them
            torch.testing.assert_close(trainer.model.state_dict()[key], want, atol=1e-4, rtol=1e-4)


class Bag(nn.Module):
    """The smallest classifier of token ids."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(9, 4), nn.Linear(4, 2)

    def forward(self, input_ids, attention_mask):
        weight = attention_mask[..., None].float()
        return self.out((self.table(input_ids) * weight).sum(1) / weight.sum(1))


class Doubled(psy.Trainer):
    """A user's own: it counts the steps and doubles the loss."""

    seen = 0

    def training_step(self, batch, update=True):
        self.seen += 1
        return super().training_step(batch, update)

    def compute_loss(self, model, batch):
        loss, logits = super().compute_loss(model, batch)
        return 2 * loss, logits


def small_trainer(folder, kind=Doubled, **options):
    torch.manual_seed(0)
    model = Bag()
    ids = torch.randint(1, 9, (3, 4, 5))
    batches = [{"input_ids": x, "attention_mask": torch.ones_like(x), "labels": (x[:, 0] > 4).long()} for x in ids]
    optimizer = psy.create_optimizer(model, {"learning_rate": 0.1})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return kind(
        model, batches, batches, optimizer, nn.CrossEntropyLoss(), num_epochs=1, scheduler=scheduler, save_dir=folder,
        **options,
    )  # fmt: skip


def test_steps_can_be_called_overridden_and_extended(tmp_path):
    trainer, batch = small_trainer(tmp_path), small_trainer(tmp_path).train_loader[0]
    want = small_trainer(tmp_path).model
    loss = 2 * nn.functional.cross_entropy(want(batch["input_ids"], batch["attention_mask"]), batch["labels"])
    found = trainer.training_step(batch)
    assert float(found["loss"]) == pytest.approx(loss.item(), rel=1e-5)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(want.parameters(), 1.0)
    psy.create_optimizer(want, {"learning_rate": 0.1}).step()
    for got, expected in zip(trainer.model.parameters(), want.parameters(), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-5)
    assert trainer.optimizer.state_dict()["state"][0]["step"] == 1
    trainer.train()
    assert trainer.seen == 1 + len(trainer.train_loader) == trainer.global_step
    assert isinstance(trainer.model, nn.Module)


def test_a_checkpoint_is_gone_on_from(tmp_path):
    trainer, other = small_trainer(tmp_path), small_trainer(tmp_path / "other")
    trainer.train()
    other.load_checkpoint(tmp_path / "latest_checkpoint.pt")
    assert other.optimizer.param_groups[0]["lr"] == trainer.optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
    for one in (trainer, other):
        one.training_step(one.train_loader[0])
    assert other.global_step == trainer.global_step == 4
    for key, value in trainer.model.state_dict().items():
        assert torch.equal(other.model.state_dict()[key], value)


def test_a_compiled_models_checkpoint_fits_a_plain_model_and_back(tmp_path):
    trainer, other = small_trainer(tmp_path), small_trainer(tmp_path / "other")
    trainer.save_checkpoint(0, {}, False)
    state = torch.load(tmp_path / "latest_checkpoint.pt", weights_only=True)
    weights = state["model_state_dict"]
    torch.save(state | {"model_state_dict": {f"_orig_mod.{k}": v + 1 for k, v in weights.items()}}, tmp_path / "c.pt")
    other.load_checkpoint(tmp_path / "c.pt")
    assert torch.equal(other.model.out.bias, weights["out.bias"] + 1)
    other.model = torch.compile(other.model, backend="eager")
    other.load_checkpoint(tmp_path / "latest_checkpoint.pt")
    assert torch.equal(other.model.state_dict()["_orig_mod.out.bias"], weights["out.bias"])


def test_what_cannot_be_trained_is_refused(tmp_path):
    trainer = small_trainer(tmp_path, early_stopping_metric="val_span_em")
    trainer.train_epoch = trainer.validate = lambda epoch: {"val_loss": 1.0}
    trainer.scheduler = None
    for error in (ValueError, KeyError):
        with pytest.raises(error, match="early_stopping_metric: 'val_span_em' is not among"):
            trainer.train()
    for options in ({"early_stopping_mode": "up"}, {"amp_dtype": "float8"}):
        with pytest.raises(ValueError, match=next(iter(options))):
            small_trainer(tmp_path, **options)


def test_steps_of_ones_own_may_leave_out_the_epoch():
    class Short(psy.Trainer):
        def validate(self):
            return {"val_f1_macro": 0.5}

    trainer = small_trainer(None, Short)
    trainer.train_epoch = lambda: {"train_loss": 0.0}
    assert trainer.train() == {"best_val_f1_macro": 0.5, "total_epochs": 1}


@pytest.mark.parametrize("target", ["mlflow.log_metrics", f"{psy.Trainer.__module__}.mlflow"])
def test_patched_mlflow_sees_the_metrics_without_a_run(target):
    pytest.importorskip("mlflow")
    trainer = small_trainer(None, psy.Trainer)
    trainer.train_epoch = trainer.validate = lambda: {"val_f1_macro": 0.5}
    with mock.patch(target) as patched:
        trainer.train()
    log = patched if target.endswith("log_metrics") else patched.log_metrics
    assert [call.kwargs.get("step") for call in log.call_args_list] == [0, None]


@pytest.mark.parametrize("case", table("early_stopping")["cases"])
def test_a_run_stops_where_the_original_stops(case):
    class Replayed(psy.Trainer):
        improvements: list = []

        def train_epoch(self, epoch):
            return {"train_loss": 0.0}

        def validate(self, epoch):
            return {"val_x": case["values"][epoch]}

        def save_checkpoint(self, epoch, metrics, is_best):
            self.improvements.append(is_best)

    Replayed.improvements = []
    model = nn.Linear(2, 2)
    settings = {key: case[key] for key in ("patience", "min_delta")} | {"early_stopping_mode": case["mode"]}
    trainer = Replayed(
        model, [], [], torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(),
        num_epochs=len(case["values"]), early_stopping_metric="val_x", **settings,
    )  # fmt: skip
    assert trainer.train() == case["result"]
    assert Replayed.improvements == case["improved_per_epoch"]
    stopping = psy.EarlyStopping(case["patience"], case["min_delta"], case["mode"])
    stops = [stopping.step(value) for value in case["values"]]
    assert (stops.index(True) + 1 if any(stops) else len(stops)) == case["result"]["total_epochs"]


@pytest.mark.parametrize("case", table("metrics_classification")["cases"])
def test_the_evaluator_gives_the_originals_scores(case):
    class Table(nn.Module):
        def forward(self, input_ids, attention_mask):
            return torch.tensor(case["logits"])[input_ids[:, 0]]

    rows = torch.arange(len(case["labels"]))[:, None]
    loader = [
        {"input_ids": r, "attention_mask": torch.ones_like(r), "labels": torch.tensor(case["labels"])[r[:, 0]]}
        | ({"criterion_id": [case["criterion_ids"][i] for i in r[:, 0]]} if "criterion_ids" in case else {})
        for r in rows.split(case["batch_size"])
    ]
    for task in ("criteria", "evidence"):
        want = case[f"Evaluator.{task}"]
        if not isinstance(want, dict) or "error" in want:
            continue
        found = psy.Evaluator(Table(), "cpu", task).evaluate(loader)
        shared = set(want) & set(found) - {"classification_report"}
        assert len(shared) >= 6
        assert_near({k: found[k] for k in shared}, {k: want[k] for k in shared}, 1e-6)


@pytest.mark.parametrize("architecture", ["criteria", "evidence", "share", "joint"])
def test_predictions_are_the_originals(architecture):
    """The recorded texts under the recorded rule for the logits, in place of a network."""
    import transformers

    case = table("predict_decode")

    class Rule(nn.Linear):
        def forward(self, **given):
            ids = lambda name: next(
                v for k, v in given.items() if k.endswith("input_ids") and k.startswith(name)
            ).double()
            first, post = (ids("criteria_"), ids("evidence_")) if architecture == "joint" else (ids(""), ids(""))
            place = torch.arange(post.shape[1])
            logits = torch.stack([0.05 * first.mean(1), 0.02 * first.max(1).values], -1)
            spans = ((post * 37 + place * 11) % 53, (post * 11 + place * 37) % 53)
            return {"criteria": logits, "evidence": spans}.get(architecture, (logits, *spans))

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(FIXTURE / "tokenizer.json"), pad_token="[PAD]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    texts = (
        [{k: row[k] for k in ("sentence", "context")} for row in case["joint"]]
        if architecture == "joint"
        else case["texts"]
    )
    length = case["max_length"]
    found = psy.predict_texts(architecture, Rule(1, 1), tokenizer, texts, length, length)
    assert_near(found, case[architecture], 1e-5)


def test_a_model_is_left_in_evaluation_mode(tmp_path):
    trainer = small_trainer(tmp_path)
    trainer.validate()
    assert not trainer.model.training
    trainer.train_epoch()
    assert trainer.model.training
    psy.Evaluator(trainer.model, "cpu").evaluate(trainer.val_loader)
    assert not trainer.model.training


@pytest.mark.filterwarnings("error::UserWarning")
def test_accumulation_says_nothing():
    small_trainer(None, psy.Trainer, gradient_accumulation_steps=2).train_epoch()
