"""TabNet of pytorch_tabnet, with its sparsity loss."""

import torch
from pytorch_tabnet.tab_network import TabNet
from torch.nn import functional as F

from tests.e2e.certified import SAMPLES, Certified, classes, rows


def tabnet():
    module = TabNet(6, 5, n_d=4, n_a=4, n_steps=2, virtual_batch_size=8, group_attention_matrix=torch.eye(6))
    loss = lambda output, batch: F.cross_entropy(output[0], batch["label"]) - 1e-3 * output[1]
    return module, rows(x=torch.randn(SAMPLES, 6), label=classes()), loss


MODELS = [Certified("TabNet", tabnet)]
