"""A converted BERT beside the same BERT in flax and in torch eager: `python -m benchmarks.converted_bert`.

Three classifiers of one size take whole training steps (forward, backward, clipping, AdamW; dropout 0.1) on batches of
one shape, in turns, so that what else the machine does hits all of them. Figures: milliseconds per step, and the
converted one's time as a ratio of the others', from rounds next to each other.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
import torch

from benchmarks import parser, save
from jaxtrain import Trainer, TrainingConfig, config_io
from jaxtrain.runtime import host_memory
from jaxtrain.task import find_task
from torch_bridge.torchvision_operators import declare_torchvision

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}


def settings(folder: str, name: str, batch_size: int, precision: str) -> dict:
    return {
        "run": {"dir": f"{folder}/{name}", "quiet": True},
        "data": {"batch_size": batch_size, "placement": "host"},
        "train": {"steps": 1_000_000},
        "precision": {"policy": precision},
        "tracking": {"tensorboard": False},
        "shard": {"devices": 1},
    }


def texts(sizes: dict, samples: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shape = (samples, length)
    mask = np.arange(length) < rng.integers(length // 2, length + 1, (samples, 1))
    ids = np.where(mask, rng.integers(5, sizes["vocab_size"], shape), 0)
    return {
        "input_ids": ids.astype(np.int32),
        "token_type_ids": np.zeros(shape, np.int32),
        "attention_mask": mask.astype(np.int32),
        "labels": rng.integers(0, 2, samples).astype(np.int32),
    }


def jax_steps(trainer: Trainer) -> Callable[[int], None]:
    """A function that makes so many steps on one batch."""
    program, hyper = trainer.program.train_step(), trainer.program.hyper()
    batch = next(trainer.train_loader.batches([(0, 1)]))[2]
    state = [trainer.state]

    def run(steps: int) -> None:
        for _ in range(steps):
            state[0], _ = program(state[0], batch, hyper, {})
        jax.block_until_ready(state[0])

    return run


def flax_steps(sizes: dict, columns: dict, options: dict) -> Callable[[int], None]:
    task = find_task("criteria_evidence.criteria")
    config = config_io.validate(config_io.schema(task), {**options, "model": {"encoder": {**sizes, **DROPOUT}}})
    return jax_steps(Trainer(None, columns, None, config, task=task))


def bert(sizes: dict) -> torch.nn.Module:
    declare_torchvision()
    import transformers

    torch.manual_seed(0)
    return transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, **DROPOUT, num_labels=2))


def converted_steps(sizes: dict, columns: dict, options: dict) -> Callable[[int], None]:
    return jax_steps(Trainer(bert(sizes), columns, None, TrainingConfig(**options)))


def eager_steps(sizes: dict, columns: dict, options: dict) -> Callable[[int], None]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = bert(sizes).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    count, half = options["data"]["batch_size"], options["precision"]["policy"] == "bf16"
    batch = {key: torch.from_numpy(value[:count]).long().to(device) for key, value in columns.items()}

    def run(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(device, torch.bfloat16, enabled=half):
                loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        loss.item()

    return run


def compare(sizes: dict, batch_size: int, length: int, steps: int, rounds: int, precision: str) -> dict:
    """Median, least and most of milliseconds per step, and of the ratios."""
    columns = texts(sizes, 2 * batch_size, length)
    makers = {"converted": converted_steps, "flax": flax_steps, "torch_eager": eager_steps}
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            name: make(sizes, columns, settings(folder, name, batch_size, precision)) for name, make in makers.items()
        }
        for run in runs.values():
            run(2)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(rounds):
            for name in list(runs)[:: 1 if number % 2 else -1]:
                started = time.perf_counter()
                runs[name](steps)
                times[name].append((time.perf_counter() - started) / steps * 1e3)
    for other in ("flax", "torch_eager"):
        times[f"converted / {other}"] = [a / b for a, b in zip(times["converted"], times[other], strict=True)]
    return {
        name: {"median": statistics.median(values), "least": min(values), "most": max(values)}
        for name, values in times.items()
    }


@host_memory.kept()
def main() -> None:
    p = parser(__doc__)
    p.add_argument("--hidden", type=int, default=256)
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--length", type=int, default=128, metavar="TOKENS")
    p.add_argument("--batch-size", type=int, default=16)
    p.add_argument("--steps", type=int, default=5, help="per round")
    p.add_argument("--rounds", type=int, default=9)
    p.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    arguments = p.parse_args()
    sizes = {
        "vocab_size": 8000,
        "hidden_size": arguments.hidden,
        "num_hidden_layers": arguments.layers,
        "num_attention_heads": arguments.heads,
        "intermediate_size": 4 * arguments.hidden,
        "max_position_embeddings": arguments.length,
    }
    found = compare(
        sizes, arguments.batch_size, arguments.length, arguments.steps, arguments.rounds, arguments.precision
    )
    for name, figures in found.items():
        unit = "  " if "/" in name else "ms"
        print(f"{name:24s} {figures['median']:9.2f} {unit} ({figures['least']:.2f} to {figures['most']:.2f})")
    asked = {name: value for name, value in vars(arguments).items() if name != "json"}
    about = {"device": jax.devices()[0].device_kind, "cpus": os.cpu_count(), "arguments": asked}
    save({**about, "figures": found}, arguments.json)


if __name__ == "__main__":
    main()
