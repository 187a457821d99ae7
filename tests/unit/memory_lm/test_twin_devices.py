"""The torch twins keep to the device of their batch: on torch's meta device a tensor made elsewhere raises."""

import pytest
import torch

from jaxtrain import config_io

TASKS = {"scratch": "configs/memory_lm_tiny.yaml", "adapter": "configs/memory_lm_adapter_tiny.yaml"}
SHARED = "memory.num_shared_chapters=1"


@pytest.mark.parametrize("strategy", ["sequence", "sequence-rolling", "token"])
@pytest.mark.parametrize("config_file", TASKS.values(), ids=TASKS)
def test_a_twin_makes_its_tensors_on_the_batchs_device(config_file, strategy, tmp_path):
    overrides = [f"run.dir={tmp_path}", SHARED, f"memory.routing_strategy_train={strategy}"]
    task, config = config_io.load(config_file, overrides)
    module = task.twin.build(config).to("meta")
    ids = torch.zeros((2, config.data.max_length), dtype=torch.int32, device="meta")
    batch = {"input_ids": ids, "attention_mask": ids, "labels": ids, "valid": torch.ones(2, dtype=bool, device="meta")}
    assert task.twin.loss(module, batch, config).device.type == "meta"
