"""Entries of a batch that nothing names come in the dataset's order."""

import pytest
import torch

from jaxtrain import Trainer, TrainingConfig, UserError
from jaxtrain.systems.torch_module.torch_examples import Named


def test_a_loss_without_names_hears_the_entries_in_the_datasets_order(tmp_path):
    """x, y, weight, as the dataset has them, not sorted."""
    data = Named(x=torch.randn(8, 3), y=torch.randn(8, 1), weight=torch.ones(8, 1))
    config = TrainingConfig(num_epochs=1, batch_size=4, run={"dir": str(tmp_path / "run")})
    with pytest.raises(UserError, match="the batch has x, y, weight: which is which"):
        Trainer(torch.nn.Linear(3, 1), data, None, config, loss=lambda output, target, m: output.mean())
