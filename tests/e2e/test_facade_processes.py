"""An original's Trainer on several processes."""

import re

import pytest

from tests import processes


@pytest.mark.slow
def test_every_process_and_the_files_have_the_same_weights(tmp_path):
    outputs = processes.run(2, str(tmp_path), module="tests.e2e.originals.two_trainers", PYTHONPATH=str(processes.ROOT))
    results = [re.search(r"trained: (\S+ \S+)", output).group(1) for output in outputs]
    assert results[0] == results[1]
    names = {path.name for path in (tmp_path / "run").glob("*.pt")}
    assert names == {"checkpoint_epoch_0.pt", "checkpoint_epoch_1.pt", "best_checkpoint.pt", "final_checkpoint.pt"}
    assert "World size: 2" in (tmp_path / "logs" / "training.log").read_text()
