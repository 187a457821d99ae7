"""`lora` in any torch module: adapters train, the weights stay, and PEFT reads what comes out."""

import jax
import numpy as np
import pytest
import torch
from torch import nn

from jaxtrain import Trainer, TrainingConfig, export, run
from jaxtrain.errors import UserError
from jaxtrain.systems.torch_module.torch_examples import keywords
from torch_bridge import files
from torch_bridge.torchvision_operators import declare_torchvision
from torch_bridge.training import lora

SETTINGS = {"rank": 4, "alpha": 8, "match": ["query", "value"], "modules_to_save": ["classifier"]}
SIZES = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Reader(Net):
    def forward(self, x):
        return self.second(torch.tanh(nn.functional.linear(x, self.first.weight, self.first.bias)))


def samples(count=32):
    torch.manual_seed(0)
    x = torch.randn(count, 16)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def config(folder, steps=4, **sections):
    return TrainingConfig(
        run={"dir": str(folder), "quiet": True},
        data={"batch_size": 16},
        train={"steps": steps},
        optim={"lr": 1e-2, "schedule": {"name": "constant"}},
        evaluation={"every_epochs": None},
        tracking={"tensorboard": False},
        **sections,
    )


def net(kind=Net):
    torch.manual_seed(1)
    return kind()


def trained(folder, module, steps=4, **options):
    sections = options.pop("sections", {})
    trainer = Trainer(module, samples(), None, config(folder, steps, **sections), loss=nn.CrossEntropyLoss(), **options)
    trainer.train()
    return trainer


def bert():
    declare_torchvision()
    import transformers

    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)).eval()


@pytest.mark.slow
def test_peft_computes_the_same_logits_from_the_exported_folder(tmp_path):
    model, plain = bert(), bert()
    data = keywords("train", samples=64)
    Trainer(model, data, None, config(tmp_path / "run"), lora=SETTINGS).train()
    lora.save(model, tmp_path / "adapter")

    import peft

    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    batch = {key: value[:8] for key, value in data.columns.items() if key != "labels"}
    with torch.no_grad():
        ours, expected, untrained = model.eval()(**batch).logits, theirs(**batch).logits, bert()(**batch).logits
        np.testing.assert_allclose(ours, expected, atol=1e-5)
        assert float((ours - untrained).abs().max()) > 1e-3
        np.testing.assert_allclose(lora.merge(model)(**batch).logits, ours, atol=1e-5)
    assert model.state_dict().keys() == bert().state_dict().keys()


@pytest.mark.slow
def test_gpt2_is_adapted_in_its_transposed_layers(tmp_path):
    declare_torchvision()
    import peft
    import transformers

    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    make = lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    torch.manual_seed(0)
    model, ids = make(), torch.randint(0, 64, (32, 8))
    plain = make()
    plain.load_state_dict(model.state_dict())
    data = [{"input_ids": row, "labels": row} for row in ids]
    Trainer(model, data, None, config(tmp_path / "run"), lora={"rank": 2, "match": ["c_attn", "c_proj"]}).train()
    lora.save(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(plain, str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        ours = model.eval()(ids).logits
        np.testing.assert_allclose(ours, theirs(ids).logits, atol=1e-5)
        np.testing.assert_allclose(lora.merge(model)(ids).logits, ours, atol=1e-5)


@pytest.mark.slow
def test_only_adapters_move_as_torchs_own_loop_moves_them(tmp_path):
    module, twin = net(), net()
    lora.adapt(twin, TrainingConfig(lora={"rank": 2}).lora, seed=0)
    before = {key: value.clone() for key, value in twin.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-2)
    trainer = Trainer(module, samples(16), None, config(tmp_path), loss=nn.CrossEntropyLoss(), lora={"rank": 2})
    trainer.train()
    x, y = samples(16).tensors
    for _ in range(4):
        optimizer.zero_grad()
        nn.functional.cross_entropy(twin(x), y).backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
    for key, value in module.state_dict().items():
        np.testing.assert_allclose(value, twin.state_dict()[key], atol=1e-5, err_msg=key)
        assert torch.equal(value, before[key]) == (".lora_" not in key), key


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_adapters_on_four_devices_are_those_of_one(tmp_path, strategy):
    options = {"rank": 4, "dropout": 0.1, "match": ["first"], "modules_to_save": ["second"]}
    one = trained(tmp_path / "one", net(), lora=options, devices=jax.devices()[:1])
    shard = {"shard": {"strategy": strategy}}
    four = trained(tmp_path / "four", net(), lora=options, sections=shard, devices=jax.devices()[:4])
    for key, value in one.state_dict().items():
        np.testing.assert_allclose(four.state_dict()[key], value, atol=1e-6, err_msg=key)
    assert ("fsdp" in str(four.state.frozen["first.base_layer.weight"].sharding.spec)) == (strategy == "fsdp")


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path):
    whole = trained(tmp_path / "whole", net(), lora={"rank": 2, "dropout": 0.1})
    trained(tmp_path / "halves", net(), 2, lora={"rank": 2, "dropout": 0.1})
    resumed = trained(tmp_path / "halves", net(), lora={"rank": 2, "dropout": 0.1})
    for key, value in whole.state_dict().items():
        np.testing.assert_array_equal(value, resumed.state_dict()[key], err_msg=key)


@pytest.mark.slow
def test_an_adapter_that_forward_does_not_call_is_refused(tmp_path):
    with pytest.raises(UserError, match="first has an adapter that the forward pass does not call"):
        Trainer(net(Reader), samples(), None, config(tmp_path), loss=nn.CrossEntropyLoss(), lora={"rank": 2})


def test_a_pattern_without_a_layer_is_refused():
    settings = TrainingConfig(lora={"rank": 2, "match": "secnd"}).lora
    with pytest.raises(UserError, match="'secnd' matches no layer, did you mean 'second'"):
        lora.adapt(net(), settings, seed=0)


def test_the_layers_of_a_fused_encoder_are_refused():
    settings = TrainingConfig(lora={"rank": 2, "match": "linear1"}).lora
    with pytest.raises(UserError, match="layers.0.linear1 is a part of nn.TransformerEncoderLayer"):
        lora.adapt(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8), 1), settings, seed=0)


@pytest.mark.slow
def test_a_run_from_a_yaml_exports_both_folders(tmp_path):
    folder, settings = str(tmp_path / "run"), "lora={rank: 2, match: [head], modules_to_save: [conv]}"
    assert (
        run.main(["--config", "configs/torch_module_tiny.yaml", f"run.dir={folder}", settings, "train.epochs=1"]) == 0
    )
    for form in ("peft", "merged"):
        assert export.main(["--run", folder, "--format", form, str(tmp_path / form)]) == 0
    adapter = files.load(tmp_path / "peft" / "adapter_model.safetensors")
    down, up = (adapter[f"base_model.model.head.lora_{part}.weight"] for part in "AB")
    merged = files.load(tmp_path / "merged" / "model.safetensors")
    trained = files.load(tmp_path / "run" / "exports" / "best.pt")
    np.testing.assert_allclose(merged["head.weight"], trained["head.base_layer.weight"] + 8 * up @ down, atol=1e-6)
    assert {key for key in adapter if ".conv." in key} == {"base_model.model.conv.weight", "base_model.model.conv.bias"}
