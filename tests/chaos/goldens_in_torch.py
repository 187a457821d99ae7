"""How far torch itself is from what the Sherlock originals recorded in torch: `python -m tests.chaos.goldens_in_torch`.

The recorded cases that train (tests/golden/fmri_autoencoder), rerun with the torch twin and torch's own AdamW from the
same weights and batches, with one thread and with two, beside the replay through jaxtrain. A line per case and kind of
tensor: the largest relative L2 distance to the recorded tensors in each of the three. What is far off in all three is
rounding of float32 that the training amplified, not another computation.
"""

import argparse
import sys
from types import SimpleNamespace

import numpy as np
import torch

from jaxtrain.systems.fmri_autoencoder import torch_twin
from jaxtrain.systems.fmri_autoencoder.config import Gen1Options, HeadOptions
from jaxtrain.systems.fmri_autoencoder.torch_gen1 import SherlockAutoencoder
from jaxtrain.systems.fmri_autoencoder.torch_head import MultimodalAutoencoder
from tests.parity import fmri_autoencoder as parity
from tests.parity.replay import replay
from tests.parity.test_fmri_autoencoder import TRAINED, opened

THREADS = (1, 2)
NO_GRADIENT = "grad, true gradient 0"
STAGES = {"out_train": "outputs", "loss": "loss", "grad": "grad", "after3": "after 3 steps", "final": "at the end"}
STAGES |= {"trainer": "losses and norms of the training"}


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--cases", nargs="+", default=list(TRAINED), metavar="NAME")
    for name in p.parse_args(argv).cases:
        case, tensors = opened(name)
        given = {key: value for key, value in tensors.items() if key not in case["expects"]}
        runs = {f"torch, threads {count}": rerun(case, given, count) for count in THREADS}
        common = runs[f"torch, threads {THREADS[0]}"].keys() & tensors.keys()
        runs["jaxtrain"] = replay(case, given, name)
        for stage in (*STAGES.values(), NO_GRADIENT):
            keys = [key for key in common if stage_of(key, case) == stage]
            worst = {
                who: max((distance(got[key], tensors[key]) for key in keys), default=0) for who, got in runs.items()
            }
            print(f"{name}, {stage}: " + "; ".join(f"{who} {value:.1e}" for who, value in worst.items()), flush=True)
    return 0


def stage_of(key: str, case: dict) -> str | None:
    """The kind of a tensor; None for a bias whose steps are rounding noise, which the original says not to compare."""
    stage, name = key.split("/", 1)
    if name in case.get("zero_true_gradient", ()):
        return NO_GRADIENT if stage == "grad" else None
    return STAGES[stage]


def distance(got, wanted) -> float:
    got, wanted = (np.asarray(value, np.float64).reshape(-1) for value in (got, wanted))
    return float(np.linalg.norm(got - wanted) / max(np.linalg.norm(wanted), 1e-6))


def rerun(case: dict, given: dict[str, np.ndarray], threads: int) -> dict[str, np.ndarray]:
    """Outputs and gradients of the first batch in training mode, and the original's Trainer, in torch."""
    torch.set_num_threads(threads)
    head = not str(case["generation"]).startswith("gen1")
    batch = as_tensors(parity.group(given, "in/"))
    module = fresh(case, given, head)
    with torch.no_grad():
        out = {f"out_train/{key}": value.numpy() for key, value in torch_twin.call(module, batch).items()}
    module = fresh(case, given, head)
    total = loss(module, batch, case, "'normalized'" in case["grad_of"])
    total.backward()
    out["loss/total"] = total.detach().numpy()
    out |= {f"grad/{key}": parameter.grad.numpy() for key, parameter in module.named_parameters()}
    return out | trained(fresh(case, given, head), case, given, head)


def trained(module, case: dict, given: dict[str, np.ndarray], head: bool) -> dict[str, np.ndarray]:
    settings = case["trainer"]["config"]
    recorded = SimpleNamespace(case=case, tensors=given, expects=case["expects"])
    per_epoch, batches = parity._Case.train_batches(recorded, settings)
    rate = parity.rate_of(head, settings, per_epoch)
    optimizer = torch.optim.AdamW(module.parameters(), weight_decay=settings["weight_decay"])
    losses, norms, out = [], [], {}
    for step in range(case["expects"]["trainer/loss_per_step"][0]):
        optimizer.param_groups[0]["lr"] = rate(step)
        total = loss(module, as_tensors(batches(step % per_epoch)), case, head)
        optimizer.zero_grad()
        total.backward()
        clip = settings["gradient_clip_val"] or float("inf")
        norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), clip).item())
        losses.append(total.item())
        optimizer.step()
        if step == 2:
            out |= saved("after3", module)
    out |= {"trainer/loss_per_step": np.array(losses), "trainer/grad_norm_before_clip_per_step": np.array(norms)}
    return out | saved("final", module)


def fresh(case: dict, given: dict[str, np.ndarray], head: bool):
    config = {**case["config"], "encoder_dropout": 0.0, "decoder_dropout": 0.0}
    if head:
        module = MultimodalAutoencoder.of(HeadOptions(**config, widths=case["width_map"]))
    else:
        widths = {"widths": case["width_map_linear"], "channel_widths": case["width_map_conv"]}
        module = SherlockAutoencoder.of(Gen1Options(**config, **widths))
    module.load_state_dict(as_tensors(parity.group(given, "param/")), strict=True)
    return module.train()


def loss(module, batch: dict, case: dict, normalized: bool):
    options = SimpleNamespace(normalize_by_std=normalized, **case["loss_weights"])
    config = SimpleNamespace(model=None, loss=options)
    return torch_twin.loss(module, {**batch, "valid": torch.ones(len(batch["video"]))}, config)


def as_tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor(value) for key, value in arrays.items()}


def saved(stage: str, module) -> dict[str, np.ndarray]:
    return {f"{stage}/{key}": value.numpy().copy() for key, value in module.state_dict().items()}


if __name__ == "__main__":
    sys.exit(main())
