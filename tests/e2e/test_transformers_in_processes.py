"""transformers' `fsdp` under torchrun: one program over two processes, with transformers' numbers and files."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import processes

transformers = pytest.importorskip("transformers")
from tests.e2e.transformers_in_processes import trained  # noqa: E402

pytestmark = pytest.mark.slow


def test_two_processes_give_the_losses_weights_and_checkpoint_of_transformers_in_one(tmp_path):
    """20 updates of two micro-batches, whose tokens are counted over both processes."""
    losses, state = trained(transformers, str(tmp_path / "alone"))
    outputs = processes.run(2, str(tmp_path / "two"), module="tests.e2e.transformers_in_processes")
    for output in outputs:
        found = json.loads(next(line for line in output.splitlines() if line.startswith('{"losses')))
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        for name, value in state.items():
            np.testing.assert_allclose(found["state"][name], value, rtol=1e-3, atol=1e-4, err_msg=name)
    assert "a step runs on 2 devices of 2 processes, fsdp: 100% of the weights' bytes are split" in "".join(outputs)
    ours, theirs = (load_file(tmp_path / side / "checkpoint-10" / "model.safetensors") for side in ("two", "alone"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-3, atol=1e-4, err_msg=name)
