"""Models of tabular data of rtdl_revisiting_models."""

import torch
from rtdl_revisiting_models import FTTransformer, ResNet
from torch import nn

from tests.e2e.certified import SAMPLES, Certified, classes, rows


def ft_transformer():
    module = FTTransformer(
        n_cont_features=4, cat_cardinalities=[3, 5], d_out=5, n_blocks=2, d_block=16, attention_n_heads=2,
        attention_dropout=0.1, ffn_d_hidden=None, ffn_d_hidden_multiplier=2, ffn_dropout=0.1, residual_dropout=0.0,
    )  # fmt: skip
    kinds = torch.stack([torch.randint(0, 3, (SAMPLES,)), torch.randint(0, 5, (SAMPLES,))], 1)
    return module, rows(x_cont=torch.randn(SAMPLES, 4), x_cat=kinds, label=classes()), nn.CrossEntropyLoss()


def resnet():
    module = ResNet(d_in=4, d_out=5, n_blocks=2, d_block=16, d_hidden=None, d_hidden_multiplier=2.0, dropout1=0.1,
                    dropout2=0.0)  # fmt: skip
    return module, rows(x=torch.randn(SAMPLES, 4), label=classes()), nn.CrossEntropyLoss()


MODELS = [Certified("FT-Transformer", ft_transformer), Certified("ResNet, tabular", resnet)]
