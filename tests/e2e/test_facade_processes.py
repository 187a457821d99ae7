"""An original's Trainer on several processes."""

import re

import pytest

from tests import processes


@pytest.mark.slow
def test_sharded_weights_end_up_whole_in_every_process_and_in_the_files(tmp_path):
    outputs = processes.run(2, str(tmp_path), module="tests.e2e.originals.two_trainers", PYTHONPATH=str(processes.ROOT))
    results = [re.search(r"trained: (\S+ \S+)", output).group(1) for output in outputs]
    assert results[0] == results[1]
    names = {path.name for path in (tmp_path / "run").glob("*.pt")}
    assert names == {"checkpoint_epoch_0.pt", "checkpoint_epoch_1.pt", "best_checkpoint.pt", "final_checkpoint.pt"}
    assert "World size: 2" in (tmp_path / "logs" / "training.log").read_text()
