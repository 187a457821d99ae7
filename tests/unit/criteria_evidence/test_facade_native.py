"""A facade model in jaxtrain's own Trainer: converted, trained in JAX, its weights back in the torch module."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from jaxtrain import Trainer, TrainingConfig
from jaxtrain.systems import criteria_evidence as psy
from tests.unit.criteria_evidence.facade import folder_of, original

pytestmark = pytest.mark.slow


class Texts(Dataset):
    def __init__(self, prefixes=("",)):
        torch.manual_seed(0)
        self.ids, self.prefixes = torch.randint(5, 60, (16, 9)), prefixes

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = self.ids[index]
        found = {
            f"{p}{k}": v for p in self.prefixes for k, v in (("input_ids", ids), ("attention_mask", ids.ne(0).long()))
        }
        return {**found, "labels": ids[0] % 2, "start_positions": ids[1] % 9, "end_positions": ids[2] % 9}


def spans(output, batch):
    return psy.span_loss(*tuple(output.values())[-2:], batch["start_positions"], batch["end_positions"])


@pytest.mark.parametrize("name", ["project.Criteria", "architectures.Joint"])
def test_a_facade_model_is_trained_in_jax_as_torch_would(name, tmp_path):
    module, kind = name.split(".")
    folder = folder_of(tmp_path / "encoder")
    model = getattr(original(module), kind)(folder)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    data = Texts() if kind == "Criteria" else Texts(("criteria_", "evidence_"))
    loss = nn.CrossEntropyLoss() if kind == "Criteria" else spans
    config = TrainingConfig(
        run={"dir": str(tmp_path / "run"), "quiet": True},
        optim={"name": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0},
        data={"batch_size": 16, "shuffle": False},
        train={"steps": 1},
        checkpoint={"keep_best": 0},
    )
    batch = torch.utils.data.default_collate([data[i] for i in range(16)])
    named = {key: value for key, value in batch.items() if "input_ids" in key or "mask" in key}
    output = model(**named)
    value = loss(output, batch["labels"]) if kind == "Criteria" else loss(output, batch)
    value.backward()
    want = {k: p.detach() - 0.1 * p.grad for k, p in model.named_parameters() if p.grad is not None}
    Trainer(model, data, None, config, loss=loss).train()
    for key, parameter in model.named_parameters():
        if key in want:
            torch.testing.assert_close(parameter.detach(), want[key], atol=2e-5, rtol=1e-4, msg=key)
