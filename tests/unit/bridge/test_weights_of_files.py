"""`jaxtrain.compile(weights=...)`: the devices get a file's weights tensor by tensor, torch's meta tensors later."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jaxtrain
from jaxtrain import UserError
from torch_bridge import files


def net(tied: bool = True) -> nn.Module:
    module = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 32), nn.BatchNorm1d(6), nn.Linear(32, 64, bias=False))
    if tied:
        module[3].weight = module[0].weight
    return module


def loss(module, ids):
    return F.cross_entropy(module(ids).flatten(0, 1), ids.flatten())


def trained(module, **options):
    step = jaxtrain.compile(module, loss, torch.optim.AdamW(module.parameters(), 1e-2), shard="fsdp", **options)
    draw = torch.Generator().manual_seed(0)
    return step, [float(step(torch.randint(0, 64, (8, 6), generator=draw))) for _ in range(4)]


def on_meta(**options) -> nn.Module:
    with torch.device("meta"):
        return net(**options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    torch.manual_seed(0)
    module, folder = net(), tmp_path_factory.mktemp("weights")
    files.save(module.state_dict(), folder / "model.safetensors")
    torch.save(module.state_dict(), folder / "model.pt")
    once = {name: value for name, value in module.state_dict().items() if name != "3.weight"}
    files.save_folder(once, {}, folder / "hf")  # a tied weight under one name
    return folder, module.state_dict(), trained(module)[1]


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "hf"])
def test_a_module_on_the_meta_device_trains_from_a_file_as_one_with_weights(saved, name):
    folder, _, losses = saved
    module = on_meta()
    step, found = trained(module, weights=folder / name)
    assert found == losses
    assert module[3].weight is module[0].weight
    assert all(
        array.addressable_shards[0].data.size * 8 == array.size
        for array in step.weights.arrays.values()
        if array.ndim == 2
    )


def test_torchs_tensors_have_the_files_values_once_they_are_read(saved):
    folder, state, _ = saved
    module = on_meta()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    step = jaxtrain.compile(module, loss, optimizer, shard="fsdp", weights=folder / "model.pt")
    assert step.ahead
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    assert optimizer.param_groups[0]["params"][0] is module[0].weight


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"1.bias": None}, r"1 keys of the module are missing \(1.bias\), 0 are none of its own"),
        ({"extra": torch.zeros(2)}, r"0 keys of the module are missing \(\), 1 are none of its own \(extra\)"),
        ({"1.weight": torch.zeros(3, 32)}, r"1.weight is \[3, 32\], the module wants \[32, 32\]"),
    ],
)
def test_a_file_of_another_module_is_refused(saved, tmp_path, change, why):
    state = {name: value for name, value in (saved[1] | change).items() if value is not None}
    torch.save(state, tmp_path / "other.pt")
    module = on_meta()
    with pytest.raises(UserError, match=why):
        jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters()), weights=tmp_path / "other.pt")


def test_a_buffer_that_no_file_holds_is_refused(saved):
    module = on_meta()
    module.register_buffer("angles", torch.zeros(3, device="meta"), persistent=False)
    with pytest.raises(UserError, match="angles is on the meta device, and no file of weights holds it"):
        jaxtrain.compile(module, loss, torch.optim.SGD(module.parameters()), weights=saved[0] / "model.pt")


def test_a_step_of_torchs_optimizer_that_finds_no_gradients_fetches_nothing(saved):
    """Drop-ins' loops call it after each compiled update."""
    module = on_meta()
    step, _ = trained(module, weights=saved[0] / "model.pt")
    step.optimizer.step()
    assert step.ahead
    module[1].weight.grad = torch.ones(32, 32)
    step.optimizer.step()
    assert not step.ahead
