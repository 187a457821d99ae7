"""Adapters made by peft: torch's losses on one device and split over eight, frozen weights as they were."""

import pytest
import torch

import jaxtrain
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import jaxtrain.transformers  # noqa: E402

pytestmark = pytest.mark.slow
BATCHES = [torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(i)) for i in range(6)]


def base(dtype=torch.float32):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def adapted(dtype=torch.float32):
    module = base(dtype)
    torch.manual_seed(1)
    return peft.get_peft_model(module, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))


def optimizer(module):
    return torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], 1e-2)


def loss(module, ids):
    return module(input_ids=ids, labels=ids).loss


def frozen(module):
    return {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}


def in_torch(module):
    update, seen = optimizer(module), []
    for ids in BATCHES:
        value = loss(module, ids)
        value.backward()
        update.step()
        update.zero_grad()
        seen.append(value.item())
    return seen


@pytest.mark.parametrize(
    ("shard", "dtype", "rel"),
    [("ddp", torch.float32, 1e-5), ("fsdp", torch.float32, 1e-5), ("fsdp", torch.bfloat16, 2e-2)],
)
def test_adapters_train_as_in_torch_and_the_rest_stays(shard, dtype, rel, tmp_path):
    theirs, ours = adapted(dtype), adapted(dtype)
    want, before = in_torch(theirs), frozen(ours)
    step = jaxtrain.compile(ours, loss, optimizer(ours), shard=shard)
    assert [float(step(ids)) for ids in BATCHES] == pytest.approx(want, rel=rel)
    step.sync()
    assert step.torch is None
    assert set(step.opt_state) == {name for name, p in ours.named_parameters() if p.requires_grad}
    for name, value in before.items():
        assert torch.equal(ours.get_parameter(name), value)
        array = step.weights.arrays[name]
        assert str(array.dtype) == str(dtype).removeprefix("torch.")
        assert array.addressable_shards[0].data.size * (8 if shard == "fsdp" else 1) == array.size
    ours.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(base(dtype), tmp_path)
    torch.testing.assert_close(loss(again, BATCHES[0]), loss(ours, BATCHES[0]))


def test_transformers_trainer_trains_adapters_split_over_eight_devices(tmp_path):
    rows = [{"input_ids": row, "labels": row} for ids in BATCHES for row in ids]

    def run(engine, **options):
        arguments = transformers.TrainingArguments(
            str(tmp_path / engine.__name__), max_steps=4, per_device_train_batch_size=8, learning_rate=1e-2,
            report_to=[], logging_steps=1, use_cpu=True, save_steps=4, **options,
        )  # fmt: skip
        trainer = engine.Trainer(adapted(), arguments, train_dataset=rows)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row], trainer

    want, _ = run(transformers)
    got, trainer = run(jaxtrain.transformers, fsdp=True)
    assert got == pytest.approx(want, rel=1e-5)
    assert any(not array.is_fully_replicated for array in trainer._xla_step.weights.arrays.values())
    saved = tmp_path / "jaxtrain.transformers" / "checkpoint-4"
    again = peft.PeftModel.from_pretrained(base(), saved)
    torch.testing.assert_close(loss(again, BATCHES[0]), loss(trainer.model, BATCHES[0]))
