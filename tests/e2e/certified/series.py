"""Forecasters of gluonts, with the likelihood of a Student-t distribution."""

import torch

from tests.e2e.certified import SAMPLES, Certified, rows
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()

from gluonts.torch.model.d_linear.module import DLinearModel  # noqa: E402
from gluonts.torch.model.simple_feedforward.module import SimpleFeedForwardModel  # noqa: E402


def _data():
    series = torch.randn(SAMPLES, 16).cumsum(1)
    return {"past_target": series[:, :12], "future_target": series[:, 12:]}


def _likelihood(module):
    """The module's own loss, as a function of its outputs. Source: gluonts DistributionOutput.loss."""

    def loss(output, batch):
        arguments, loc, scale = output
        return module.distr_output.loss(batch["future_target"], arguments, loc, scale).mean()

    return loss


def d_linear():
    module = DLinearModel(prediction_length=4, context_length=12, hidden_dimension=8, kernel_size=5, scaling="std")
    return module, rows(**_data(), past_observed_values=torch.ones(SAMPLES, 12)), _likelihood(module)


def feed_forward():
    module = SimpleFeedForwardModel(prediction_length=4, context_length=12, hidden_dimensions=[16, 16])
    return module, rows(**_data()), _likelihood(module)


MODELS = [Certified("DLinear", d_linear), Certified("SimpleFeedForward", feed_forward)]
