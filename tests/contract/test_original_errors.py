"""Mistakes raise the types that the originals raise, so that a script's `except` clauses catch them here too."""

import json
import pathlib

import numpy as np
import pytest
import torch
from torch import nn

from jaxtrain.systems import criteria_evidence as psy
from jaxtrain.systems import fmri_autoencoder as sherlock
from jaxtrain.systems import hjepa
from jaxtrain.systems import memory_lm as memory
from jaxtrain.systems import set_completion as splat
from jaxtrain.systems.criteria_evidence.original import architectures

FIXTURE = pathlib.Path(__file__).parents[1] / "golden/criteria_evidence/fixture"
LEVELS = [torch.randn(2, 4, 8) for _ in range(2)]
MODEL = nn.Linear(2, 2)
ONE_WEIGHT = nn.Linear(3, 3)

HJEPA = {
    "unknown data set": (ValueError, lambda: hjepa.build_dataset("mnist", "nowhere")),
    "data that is not there": (FileNotFoundError, lambda: hjepa.ImageNetDataset("nowhere")),
    "unknown kind of loss": (ValueError, lambda: hjepa.HJEPALoss(loss_type="l3")),
    "unknown reduction": (ValueError, lambda: hjepa.HJEPALoss(reduction="median")),
    "weights for other levels": (ValueError, lambda: hjepa.HJEPALoss(hierarchy_weights=[1.0], num_hierarchies=2)),
    "negative weight": (ValueError, lambda: hjepa.HJEPALoss(hierarchy_weights=[-1.0, 1.0], num_hierarchies=2)),
    "fewer targets": (ValueError, lambda: hjepa.HJEPALoss(num_hierarchies=2)(LEVELS, LEVELS[:1])),
    "other shapes": (ValueError, lambda: hjepa.HJEPALoss(num_hierarchies=2)(LEVELS, [x[:, :2] for x in LEVELS])),
    "half of an odd batch": (ValueError, lambda: hjepa.VICRegLoss()(torch.randn(3, 8))),
    "unknown loss.type": (ValueError, lambda: hjepa.create_loss_from_config({"loss": {"type": "focal"}})),
    "a flat unknown type": (ValueError, lambda: hjepa.create_loss_from_config({"type": "focal"})),
    "no contrastive views": (ValueError, lambda: hjepa.ContrastiveJEPALoss(hjepa.HJEPALoss())(LEVELS, LEVELS)),
    "rotary width": (ValueError, lambda: hjepa.VisionRoPE2D(6)),
    "unknown optimizer": (ValueError, lambda: hjepa.create_optimizer(MODEL, {"training": {"optimizer": "lion9"}})),
    "unknown schedule": (ValueError, lambda: hjepa.create_lr_scheduler("adamw", 1.0, 0.0, 2, 2, 0, "stairs")),
    "no checkpoint": (FileNotFoundError, lambda: hjepa.load_checkpoint("none.pth", MODEL)),
    "unknown pooling": (ValueError, lambda: hjepa.LinearProbe(8, 2, pooling="median")(torch.randn(2, 4, 8))),
    "unknown test": (ValueError, lambda: hjepa.EppsPulleyTest(test_method="guess")(torch.randn(8, 2))),
}
PSY = {
    "no file": (FileNotFoundError, lambda: psy.CriteriaDataset("none.csv", str(FIXTURE / "tokenizer.json"))),
    "no rows": (ValueError, lambda: _criteria("sentence_text,status\n")),
    "no header": (ValueError, lambda: _criteria("")),
    "no such column": (KeyError, lambda: _criteria("text,status\na,1\n")),
    "splits that overlap": (ValueError, lambda: _splits(["a"], ["a"], [])),
    "unknown optimizer": (ValueError, lambda: psy.create_optimizer(MODEL, {"optimizer": {"name": "lion9"}})),
    "unknown activation": (ValueError, lambda: architectures.ClassificationHead(4, 2, 2, None, "tan")),
    "hidden sizes": (ValueError, lambda: architectures.ClassificationHead(4, 2, 3, [4])),
    "unknown pooling": (ValueError, lambda: architectures.SequencePooler(4, "median")),
}
SPLAT = {
    "too many points": (ValueError, lambda: splat.tokenize_build({"swim_speed_up": 58})),
    "a float": (ValueError, lambda: splat.tokenize_build({"swim_speed_up": 3.0})),
    "no such neuron": (IndexError, lambda: _edited(99)),
    "an illegal build": (ValueError, lambda: splat.Build({"head": "stealth_jump"}, {})),
    "no pad token": (ValueError, lambda: splat.create_multi_hot_targets(torch.zeros(1, 1).long(), {"a": 0}, "cpu")),
    "no file": (FileNotFoundError, lambda: splat.load_json("none.json")),
}
SHERLOCK = {
    "unknown loss": (ValueError, lambda: sherlock.FMRIMatchingLoss("l3")(torch.ones(2, 2), torch.ones(2, 2))),
    "perceptual loss": (NotImplementedError, lambda: sherlock.PerceptualLoss()),
    "unknown keyword": (TypeError, lambda: sherlock.TrainingConfig(learning_rat=1.0)),
    "other weights": (RuntimeError, lambda: sherlock.TextEncoder(4, 2).load_state_dict(ONE_WEIGHT.state_dict())),
    "no recordings": (FileNotFoundError, lambda: sherlock.SherlockDataset("nowhere")),
}
MEMORY = {
    "no config": (FileNotFoundError, lambda: memory.load_config("none.yaml")),
    "no batch": (ValueError, lambda: _trainer(batch_size=0)),
    "no steps": (ValueError, lambda: _trainer(max_steps=0)),
    "two beginnings": (ValueError, lambda: _trainer(resume_from_checkpoint="a", init_from_checkpoint="b")),
    "negative length": (ValueError, lambda: _generate(max_new_tokens=-1)),
    "no temperature": (ValueError, lambda: _generate(temperature=0.0)),
    "top_p beyond 1": (ValueError, lambda: _generate(top_p=1.5)),
    "negative top_k": (ValueError, lambda: _generate(top_k=-1)),
    "unknown strategy": (ValueError, lambda: memory.create_inference_router(memory.ChapterRouter(4, 2), "guess", 1)),
    "unknown keyword": (TypeError, lambda: memory.MemoryConfig(num_memory_token=3)),
}
CASES = {
    f"{name}: {what}": case
    for name, table in (("hjepa", HJEPA), ("psy", PSY), ("splatnlp", SPLAT), ("sherlock", SHERLOCK), ("memory", MEMORY))
    for what, case in table.items()
}


def _criteria(text: str):
    pathlib.Path("rows.csv").write_text(text)
    return psy.CriteriaDataset("rows.csv", str(FIXTURE / "tokenizer.json"))


def _splits(train, val, test):
    pathlib.Path("splits.json").write_text(json.dumps({"train": train, "val": val, "test": test}))
    return psy.load_splits_json("splits.json")


def _edited(neuron: int):
    sae = splat.SparseAutoencoder(4, expansion_factor=2)
    layer = nn.Linear(4, 2)
    layer.register_forward_pre_hook(splat.SetCompletionHook(sae, neuron, 1.0))
    return layer(torch.ones(1, 4))


def _trainer(**training):
    return memory.Trainer(memory.Config(training=memory.TrainingConfig(**training)))


def _generate(**options):
    return memory.generate(MODEL, None, "text", **options)


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_raises_the_originals_type(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.random.seed(0)
    kind, call = CASES[name]
    with pytest.raises(kind) as caught:
        call()
    assert str(caught.value).strip()
