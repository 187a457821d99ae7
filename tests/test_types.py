"""What a type checker and an editor see: a misspelt name is an error, and completion offers the right one."""

import ast
import importlib
import json
import pathlib
import subprocess
import sys

import pytest

import jaxtrain
from jaxtrain.config import FLAT_NAMES, TrainingConfig

ROOT = pathlib.Path(__file__).parents[1]
RIGHT = """
import pathlib
import torch
import jaxtrain
from jaxtrain import Loss, Statistics, Task, Trainer, TrainingConfig, UserError, WholeSplit
from jaxtrain import compile, compile_many, load_config
from jaxtrain.config import DataConfig, GroupConfig, OptimConfig, ScheduleConfig
import jaxtrain.lightning as L
from jaxtrain.lightning import LightningModule
from jaxtrain.lightning.cli import LightningCLI
from jaxtrain.accelerate import Accelerator, notebook_launcher

config = TrainingConfig(learning_rate=1e-2, num_epochs=3, batch_size=8, mixed_precision="no", output_dir="runs/x")
config = TrainingConfig(train={"epochs": 3}, optim={"lr": "auto", "schedule": {"name": "cosine", "warmup_steps": 3}})
config = TrainingConfig(optim=OptimConfig(groups={"head": {"match": ["head.*"], "lr": 1e-3}, "body": GroupConfig()}))
config = TrainingConfig(run={"dir": pathlib.Path("runs")}, precision={"policy": "bf16"}, lora={"match": ("q", "v")})
plain: TrainingConfig = TrainingConfig.plain(learning_rate=1e-2, num_epochs=3, optim={"clip_norm": 1.0})
rate: float = config.optim.lr
epochs: int | None = config.train.epochs
loaded: TrainingConfig = jaxtrain.load_config("configs/digits.yaml", "optim.lr=1e-3")
module = torch.nn.Linear(1, 1)
trainer = Trainer(module, None, None, config, loss=torch.nn.MSELoss(), scheduler_interval="epoch", callbacks=[])
history: dict = trainer.train()
trainer.verify().checks
step = compile(module, lambda module, batch: module(batch).sum(), torch.optim.SGD(module.parameters()), clip_norm=1.0)
steps = compile_many({"a": module}, {"a": (lambda a, batch: a(batch).sum(), torch.optim.SGD(module.parameters()))})
evaluated = step.eval()
evaluated.eval().state_dict()
steps["a"].eval().parameters()
width = load_config("configs/digits.yaml").model.width
class Data(DataConfig):
    path: str = "data"
data = Data(path="elsewhere", batch_size=3)
metric = WholeSplit(lambda outputs, batch: 0.0)
fitted = L.Trainer(max_epochs=3, callbacks=[L.callbacks.ModelCheckpoint()], logger=False)
fitted.fit(LightningModule(), ckpt_path="last")
fitted.sync()
Accelerator(gradient_accumulation_steps=2).backward
LightningCLI(LightningModule, seed_everything_default=3)
"""
MISSPELT = """
TrainingConfig(lerning_rate=1e-2)
TrainingConfig(num_epoch=3)
TrainingConfig.plain(num_epoch=3)
TrainingConfig(train={"epohcs": 3})
TrainingConfig(optim={"schedule": {"nme": "cosine"}})
TrainingConfig(optim={"schedule": {"name": "cosin"}})
TrainingConfig(precision={"policy": "bf61"})
TrainingConfig(batch_size="many")
OptimConfig(learning_rate=1e-3)
ScheduleConfig(warmup=3)
config.optm
config.optim.learning_rate
Trainer(module, None, None, config, losss=1)
Trainer(module, scheduler_interval="epochs")
trainer.trian()
trainer.stat_dict()
trainer.train(resum="never")
trainer.verify(step=3)
jaxtrain.complie
jaxtrain.load_confg("x.yaml")
jaxtrain.load_config(3)
compile(module, loss_fun=None, optimizer=None)
compile(module, lambda module, batch: 0, None, precision="fp61")
step.snyc()
step.cuont
steps["a"].evl()
steps.synk()
Loss(valu=1.0)
Statistics(sum={})
Task(nam="x")
WholeSplit(fn=lambda outputs, batch: 0.0)
L.Trainer(max_epohcs=3)
L.Triner()
fitted.fit(LightningModule(), train_dataloader=None)
fitted.ckeckpoint_callback
L.LightningModul
Accelerator(gradient_accumulation=2)
Accelerator().prepar
LightningCLI(trainer_clas=L.Trainer)
"""
LIBRARIES_RIGHT = """
import transformers
from jaxtrain.transformers import AutoModelForCausalLM, Seq2SeqTrainer, Trainer, TrainingArguments
from jaxtrain.trl import DPOConfig, GRPOConfig, ModelConfig, SFTConfig, SFTTrainer, ScriptArguments, TrlParser
from jaxtrain.sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, evaluation, losses, util

arguments = TrainingArguments(output_dir="x", max_steps=3)
model = AutoModelForCausalLM.from_pretrained("x")
trainer = Trainer(args=arguments, train_dataset=None)
plain: transformers.Trainer = trainer
trainer.train(resume_from_checkpoint=True)
trainer.save_model(output_dir="x")
Seq2SeqTrainer(args=None, compute_metrics=None)
SFTTrainer("model", args=SFTConfig(max_length=3))
SentenceTransformerTrainer(SentenceTransformer("x"), evaluator=None)
losses.CosineSimilarityLoss(SentenceTransformer("x"))
"""
LIBRARIES_MISSPELT = """
TrainingArguments(output_dir="x", max_step=3)
Trainer(arg=arguments)
trainer.trian()
trainer.save_model(folder="x")
Seq2SeqTrainer(datas=None)
SFTTrainer("model", arg=None)
SFTTrainer("model").trian()
SFTConfig(max_len=3)
SentenceTransformerTrainer(SentenceTransformer("x"), evaluators=None)
losses.CosinSimilarityLoss
GRPOConfig(max_completion=3)
"""


def errors(folder: pathlib.Path, right: str, misspelt: str) -> tuple[set[str], set[str]]:
    """Return pyright's errors in the right lines, and the misspelt lines that have none."""
    lines = [*right.strip().splitlines(), *misspelt.strip().splitlines()]
    first = len(right.strip().splitlines())
    file = folder / "script.py"
    file.write_text("\n".join(lines))
    settings = {"typeCheckingMode": "basic", "extraPaths": [str(ROOT)], "reportUnusedExpression": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    numbers = {}
    for error in json.loads(done.stdout)["generalDiagnostics"]:
        if error["severity"] == "error":
            numbers[error["range"]["start"]["line"]] = error["message"]
    wrong = {f"{lines[number]}: {message}" for number, message in numbers.items() if number < first}
    return wrong, {line for number, line in enumerate(lines) if number >= first and number not in numbers}


def test_each_misspelt_name_is_an_error_and_no_right_one_is(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("lightning")
    pytest.importorskip("pyright")
    assert errors(tmp_path, RIGHT, MISSPELT) == (set(), set())


@pytest.mark.slow  # pyright reads all of transformers
def test_misspelt_names_of_the_libraries_trainers_are_errors(tmp_path):
    for name in ("pyright", "trl", "sentence_transformers"):
        pytest.importorskip(name)
    assert errors(tmp_path, LIBRARIES_RIGHT, LIBRARIES_MISSPELT) == (set(), set())


def test_the_stub_of_the_check_has_the_classes_of_transformers(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    stub = importlib.import_module("transformers_stub")
    monkeypatch.setattr(stub, "STUB", tmp_path / "transformers/__init__.pyi")
    script = tmp_path / "script.py"
    script.write_text("from transformers import BertModel, Trainer, TrainingArguments, Trianer, pipeline")
    names = stub.write([script])
    assert names == ["BertModel", "Trainer", "TrainingArguments", "pipeline"]
    for node in ast.parse(stub.STUB.read_text()).body[1:]:
        (alias,) = node.names
        assert getattr(importlib.import_module(node.module), alias.name) is getattr(transformers, alias.asname)


COMPLETIONS = {
    "from jaxtrain import TrainingConfig\nTrainingConfig().opt": "optim",
    "from jaxtrain import TrainingConfig\nTrainingConfig().optim.weig": "weight_decay",
    "from jaxtrain.config import OptimConfig\nOptimConfig(beta": "beta1=",
    "import jaxtrain\njaxtrain.compile_": "compile_many",
    "import jaxtrain\njaxtrain.compile(1, 2, 3, clip": "clip_norm=",
    "from jaxtrain import Trainer\nTrainer(sched": "scheduler=",
    "from jaxtrain import Trainer\ntrainer = Trainer()\ntrainer.lo": "load_state_dict",
    "import jaxtrain\nstep = jaxtrain.compile(1, 2, 3)\nstep.sy": "sync",
}


@pytest.mark.parametrize("code", COMPLETIONS)
def test_an_editor_completes_names(code):
    jedi = pytest.importorskip("jedi")
    completed = jedi.Script(code, project=jedi.Project(ROOT)).complete()
    assert COMPLETIONS[code] in [one.name_with_symbols for one in completed]


def test_a_checker_sees_every_public_name_that_python_loads():
    tree = ast.parse((ROOT / "jaxtrain/__init__.py").read_text())
    shown = next(node for node in tree.body if isinstance(node, ast.If)).body
    names = {alias.name: node.module for node in shown if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted(names) == jaxtrain.__all__
    for name, module in names.items():
        assert getattr(importlib.import_module(module), name) is getattr(jaxtrain, name)


def test_the_signature_has_every_setting_and_flat_name():
    stub = (ROOT / "jaxtrain/config.pyi").read_text()
    signature = stub[stub.index("class TrainingConfig") :].partition("def __init__(")[2].partition(") -> None")[0]
    parameters = {line.strip().partition(":")[0] for line in signature.splitlines() if ":" in line}
    assert parameters == {*FLAT_NAMES, *TrainingConfig.model_fields}
