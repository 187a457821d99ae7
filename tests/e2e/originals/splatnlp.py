"""A small twin, a batch of random builds, and what the README's functions get as arguments."""

import argparse
import pathlib

import torch

from jaxtrain.systems import set_completion
from jaxtrain.systems.set_completion import torch_twin
from jaxtrain.systems.set_completion.torch_processes import distributed


def network(namespace):
    torch.manual_seed(0)
    namespace["model"] = torch_twin.SetCompletionModel(
        vocab_size=12, weapon_vocab_size=3, embedding_dim=8, hidden_dim=8, output_dim=10, num_layers=1, num_heads=2
    )


def metric(namespace):
    namespace.update(metric_tensor=torch.tensor([6.0, 3.0]), world_size=distributed.get_world_size())


def summed(namespace):
    assert namespace["metric_tensor"].tolist() == [6.0, 3.0]


def batch(namespace):
    model = namespace["model"]
    namespace["abilities"], namespace["weapons"] = torch.randint(0, 10, (4, 5)), torch.randint(0, 3, (4, 1))
    namespace["key_padding_mask"] = torch.zeros(4, 5, dtype=torch.bool)
    namespace["targets"] = torch.randint(0, 2, (4, 10)).float()
    namespace["criterion"], namespace["grad_clip"] = torch.nn.BCEWithLogitsLoss(), 1.0
    namespace["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
    namespace["scaler"] = torch.amp.GradScaler("cuda")
    namespace["before"] = model.output_layer.weight.detach().clone()


def moved(namespace):
    assert not torch.equal(namespace["before"], namespace["model"].output_layer.weight)


def rows(namespace):
    items = [{"ability_tags": [1, 2, 3], "weapon_id": 0}] * 8
    namespace.update(dataset=set_completion.SetDataset(items, 12), batch_size=4)


def gradients(namespace):
    norm = torch.nn.utils.get_total_norm([p.grad for p in namespace["model"].parameters()])
    assert float(norm) <= 1.0001


def loss(namespace):
    namespace["val_loss"] = 0.5


def annealing(namespace):
    namespace.update(epochs=2, steps_per_epoch=3)


def stops(namespace):
    stopping = namespace["EarlyStopping"](patience=2)
    assert [stopping.check(value) for value in (1.0, 1.0, 1.0)] == [False, False, True]


def saved_as(namespace):
    namespace.update(epoch=3, best_loss=0.4, checkpoint_path=pathlib.Path("checkpoint.pt"))


def loads(namespace):
    saved = torch.load("checkpoint.pt", weights_only=True)
    namespace["model"].load_state_dict(saved["model_state_dict"], strict=True)


def plain(namespace):
    assert namespace["convert_ddp_state"]({"module.weight": 1}) == {"weight": 1}


def log(namespace):
    namespace["log_file"] = "training.log"


def arguments(namespace):
    namespace.update(args=argparse.Namespace(hidden_dim=512), save_dir=pathlib.Path())


BEFORE = {2: network, 3: metric, 4: batch, 5: rows, 8: loss, 9: annealing, 11: saved_as, 13: log, 14: arguments}
AFTER = {3: summed, 4: moved, 6: gradients, 10: stops, 11: loads, 12: plain}
