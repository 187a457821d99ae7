"""Averaged weights are found in the forms in which training loops save them."""

import numpy as np
import pytest

from jaxtrain import UserError
from torch_bridge.files.averages import averages

ORDER = ["a.weight", "a.bias"]
VALUES = {"a.weight": np.ones((2, 3)), "a.bias": np.arange(2.0)}
SHAPES = {key: value.shape for key, value in VALUES.items()}
LISTED = list(VALUES.values())
COUNT = np.array(3)


def prefixed(prefix: str, scale: float = 1.0) -> dict:
    return {prefix + key: scale * value for key, value in VALUES.items()}


FORMS = {
    "state dict": VALUES,
    "AveragedModel": {"n_averaged": COUNT, **prefixed("module.")},
    "in a dict": {"module": VALUES, "decay": 0.9, "updates": 3},
    "shadow": {"shadow": VALUES, "decay": 0.9},
    "ema_pytorch": {**prefixed("online_model.", 2.0), **prefixed("ema_model."), "initted": COUNT},
    "diffusers": {"shadow_params": LISTED, "decay": 0.9, "optimization_step": 3},
}


@pytest.mark.parametrize("saved", FORMS.values(), ids=FORMS)
def test_every_form_gives_the_average_by_name(saved):
    found, told = averages(saved, SHAPES, ORDER, "f")
    assert {key: value.tolist() for key, value in found.items()} == {k: v.tolist() for k, v in VALUES.items()}
    assert len(told) == ("shadow_params" in saved)


@pytest.mark.parametrize("saved", [{"decay": 0.9}, {"a.weight": VALUES["a.weight"]}, {"shadow_params": LISTED[:1]}])
def test_an_average_that_is_absent_is_named(saved):
    with pytest.raises(UserError, match=r"f: its averaged weights do not fit this model: that of a\.\w+ is absent"):
        averages(saved, SHAPES, ORDER, "f")
