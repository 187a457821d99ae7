"""A user's own code on a GPU: loops, compiled calls and Trainer beside torch itself; see `benchmarks.first_contact`."""

import copy
import tempfile
import time
from collections.abc import Callable
from typing import Any

CHECKS: dict[str, Callable[[], Any]] = {}  # by name, what each module of checks adds


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    CHECKS[function.__name__] = function
    return function


def device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def far(theirs: Any, ours: Any) -> float:
    """The largest difference, relative to the largest value."""
    import torch

    a, b = (torch.as_tensor(x, dtype=torch.float64).cpu() for x in (theirs, ours))
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-12))


def network():
    import torch

    class Network(torch.nn.Module):
        """Convolutions, batch statistics, attention, a recurrent layer and masks made in the forward pass."""

        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Sequential(
                torch.nn.Conv1d(8, 64, 3, padding=1), torch.nn.BatchNorm1d(64), torch.nn.GELU()
            )
            self.layer = torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
            self.recurrent = torch.nn.LSTM(64, 64, batch_first=True)
            self.head = torch.nn.Linear(64, 5)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x, lengths):
            mask = torch.arange(x.shape[1], device=x.device)[None] >= lengths[:, None]
            x = self.conv(x.transpose(1, 2)).transpose(1, 2)
            x = self.layer(x, src_key_padding_mask=mask)
            x, _ = self.recurrent(x.masked_fill(mask[..., None], 0.0))
            return self.head(x.mean(1)) * self.scale

    torch.manual_seed(0)
    return Network()


def batches(place: str, count: int = 12, rows: int = 16):
    import torch

    torch.manual_seed(1)
    for _ in range(count):
        x, lengths, y = torch.randn(rows, 24, 8), torch.randint(5, 25, (rows,)), torch.randint(0, 5, (rows,))
        yield tuple(tensor.to(place) for tensor in (x, lengths, y))


def cross_entropy(module, batch):
    import torch

    x, lengths, y = batch
    return torch.nn.functional.cross_entropy(module(x, lengths), y)


def in_torch(module, place: str) -> list[float]:
    import torch

    torch.backends.cudnn.allow_tf32 = False
    optimizer, losses = torch.optim.AdamW(module.parameters(), 1e-3), []
    for batch in batches(place):
        loss = cross_entropy(module, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def own_loop(place: str) -> dict[str, Any]:
    import torch

    import jaxtrain

    module = network().to(place)
    twin = copy.deepcopy(module)
    theirs = in_torch(twin, place)
    step = jaxtrain.compile(module, cross_entropy, torch.optim.AdamW(module.parameters(), 1e-3), wait=True)
    ours = [float(step(batch)) for batch in batches(place)]
    step.sync()
    batch = next(iter(batches(place, 1)))
    module.eval(), twin.eval()
    with torch.no_grad():
        outputs = far(module(*batch[:2]), step.eval()(*batch[:2]))
    flat = lambda module: torch.cat([value.double().cpu().ravel() for value in module.state_dict().values()])
    weights = far(flat(twin), flat(module))
    module.train()
    timed = list(batches(place, 50))
    float(step(timed[0]))
    began = time.perf_counter()
    for batch in timed:
        last = step(batch)
    float(last)
    return {
        "far": far(theirs, ours), "far_weights": weights, "far_eval": outputs,
        "one_program": step.torch is None, "device": str(next(module.parameters()).device),
        "ms": (time.perf_counter() - began) / 50 * 1e3,
    }  # fmt: skip


@check
def written_batches() -> dict[str, Any]:
    """Every batch in the same tensors, written in place right after a step that is still queued."""
    import torch

    import jaxtrain

    place = device()
    module = network().to(place)
    theirs = in_torch(copy.deepcopy(module), place)
    step = jaxtrain.compile(module, cross_entropy, torch.optim.AdamW(module.parameters(), 1e-3), wait=True)
    same = next(batches(place, 1))
    losses = []
    for batch in batches(place):
        for tensor, value in zip(same, batch, strict=True):
            tensor.copy_(value)
        losses.append(step(same))
        same[0].fill_(torch.nan)
        same[2].zero_()
    output = step.eval()(*same[:2])
    return {"far": far(theirs, [float(loss) for loss in losses]), "eval_on": str(output.device)}


@check
def batch_memory() -> dict[str, Any]:
    """Milliseconds of a step whose batch of 100 MB lies on the device already."""
    import torch

    import jaxtrain

    place = device()
    module = torch.nn.Sequential(torch.nn.Linear(4096, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).to(place)
    twin, x = copy.deepcopy(module), torch.randn(6400, 4096, device=place)
    loss_of = lambda module, x: module(x).square().mean()
    step = jaxtrain.compile(module, loss_of, torch.optim.SGD(module.parameters(), 1e-3), wait=True)
    optimizer = torch.optim.SGD(twin.parameters(), 1e-3)

    def in_torch_once():
        optimizer.zero_grad()
        loss = loss_of(twin, x)
        loss.backward()
        optimizer.step()
        return loss

    found = {}
    for name, once in (("ms", lambda: step(x)), ("torch_ms", in_torch_once)):
        for _ in range(3):
            float(once())
        began = time.perf_counter()
        for _ in range(50):
            last = once()
        found[name + "_end"] = float(last)
        found[name] = (time.perf_counter() - began) / 50 * 1e3
    return found


def compiled_calls(place: str) -> dict[str, Any]:
    import torch

    from torch_bridge.capture import module_call

    torch.backends.cudnn.allow_tf32 = False
    module = network().to(place)
    twin = copy.deepcopy(module)
    theirs = in_torch(twin, place)
    with module_call.compiled_calls(module):
        ours = in_torch(module, place)
        began = time.perf_counter()
        in_torch(module, place)
    return {"far": far(theirs, ours), "ms": (time.perf_counter() - began) / 12 * 1e3}


def _each_place() -> None:
    for kind in (own_loop, compiled_calls):
        CHECKS[f"{kind.__name__}_on_device"] = lambda kind=kind: kind(device())
        CHECKS[f"{kind.__name__}_torch_on_cpu"] = lambda kind=kind: kind("cpu")


_each_place()


@check
def readme_on_device() -> Any:
    import torch

    from jaxtrain import Trainer, TrainingConfig

    model = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.GELU(), torch.nn.Linear(16, 1)).to(device())
    x = torch.randn(256, 3)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(learning_rate=1e-2, num_epochs=40, batch_size=64, run={"dir": folder, "quiet": True})
        trainer = Trainer(model, data, data, config, loss=torch.nn.MSELoss())
        best = trainer.train()["best_val_loss"]
        with torch.no_grad():
            found = float(torch.nn.functional.mse_loss(model(x.to(device())), x.sum(1, keepdim=True).to(device())))
    assert best < 0.01, best
    return {"best": best, "torch": found, "device": str(next(model.parameters()).device)}


@check
def optimizer_and_callbacks() -> Any:
    """Trainer with torch's optimizer, scheduler and metrics of a module on the device."""
    import torch

    from jaxtrain import Trainer, TrainingConfig

    place = device()
    model = network().to(place)
    twin = copy.deepcopy(model)
    rows = list(batches("cpu", 12))
    data = [({"x": x, "lengths": n}, y) for batch in rows for x, n, y in zip(*batch, strict=True)]
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    seen: list[float] = []

    class Watch:
        def on_step_end(self, trainer, step, metrics):
            seen.append(float(metrics["loss"]))

    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            run={"dir": folder, "quiet": True}, data={"batch_size": 16, "shuffle": False}, train={"steps": 12}
        )
        Trainer(
            model, data, None, config, loss=torch.nn.CrossEntropyLoss(), optimizer=optimizer, scheduler=scheduler,
            callbacks=[Watch()],
        ).train()  # fmt: skip
    torch.backends.cudnn.allow_tf32 = False
    other, losses = torch.optim.SGD(twin.parameters(), 0.05, momentum=0.9), []
    schedule = torch.optim.lr_scheduler.StepLR(other, 3, 0.5)
    for batch in batches(place):
        loss = cross_entropy(twin, batch)
        other.zero_grad()
        loss.backward()
        other.step()
        schedule.step()
        losses.append(float(loss))
    return {"far": far(losses, seen)}
