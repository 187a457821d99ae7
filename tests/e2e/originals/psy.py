"""Nothing stands in: both functions run as they are."""

import random

import numpy as np
import torch


def draws(namespace):
    namespace["drawn"] = [random.random(), np.random.rand(), torch.rand(1).item()]
    namespace["set_seed"](seed=42)
    assert namespace["drawn"] == [random.random(), np.random.rand(), torch.rand(1).item()]


def is_device(namespace):
    assert isinstance(namespace["device"], torch.device)


BEFORE: dict = {}
AFTER = {1: draws, 2: is_device}
