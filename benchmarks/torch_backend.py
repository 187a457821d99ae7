"""Compare backends of torch.compile in a training loop: `python -m benchmarks.torch_backend --models bert resnet`.

Each backend trains the same model on the same batches, in a process of its own, with one thread pinned to one core
(inductor needs a C++ compiler). Reported: the first step and the median of the later ones, in seconds of CPU time and
of the clock; `ratio` is inductor's median divided by jaxtrain's: above 1, jaxtrain is faster.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

from benchmarks import parser, save

ENGINES = ("eager", "inductor", "jaxtrain")


def mlp(torch):
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(256, 10))
    batches = [(torch.randn(128, 256), torch.randint(0, 10, (128,))) for _ in range(4)]
    return model, batches, lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def bert(torch):
    import transformers

    config = transformers.BertConfig(
        vocab_size=1000,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForSequenceClassification(config)
    batches = [{"input_ids": torch.randint(1, 1000, (8, 64)), "labels": torch.randint(0, 2, (8,))} for _ in range(4)]
    return model, batches, lambda model, batch: model(**batch).loss


def gpt2(torch):
    import transformers

    config = transformers.GPT2Config(
        vocab_size=1000, n_embd=128, n_layer=4, n_head=4, n_positions=64, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    batches = [torch.randint(1, 1000, (8, 64)) for _ in range(4)]
    loss = lambda model, ids: model(input_ids=ids, labels=ids).loss
    return transformers.GPT2LMHeadModel(config), batches, loss


def resnet(torch):
    import timm

    batches = [(torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))) for _ in range(4)]
    loss = lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    return timm.create_model("resnet10t", num_classes=10), batches, loss


def vit(torch):
    import timm

    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, num_classes=10)
    batches = [(torch.randn(16, 3, 64, 64), torch.randint(0, 10, (16,))) for _ in range(4)]
    return model, batches, lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


MODELS = {function.__name__: function for function in (mlp, bert, gpt2, resnet, vit)}


def measure(name: str, engine: str, threads: int, seconds: float) -> dict:
    """Train in this process; return the times of its steps and its losses."""
    import torch

    from torch_bridge.torchvision_operators import declare_torchvision

    declare_torchvision()
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, batches, loss_of = MODELS[name](torch)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    if engine == "jaxtrain":
        from torch_bridge.capture.backend import jaxtrain

        compiled = torch.compile(model, backend=jaxtrain, options={"wait": True})
    else:
        compiled = model if engine == "eager" else torch.compile(model)
    wall, cpu, losses = [], [], []
    end = None
    while end is None or time.perf_counter() < end or len(wall) < 8:
        clock, used = time.perf_counter(), time.process_time()
        loss = loss_of(compiled, batches[len(wall) % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        wall.append(time.perf_counter() - clock)
        cpu.append(time.process_time() - used)
        end = end or time.perf_counter() + seconds
    return {
        "first_s": wall[0],
        "first_cpu_s": cpu[0],
        "step_s": statistics.median(wall[3:]),
        "step_cpu_s": statistics.median(cpu[3:]),
        "steps": len(wall),
        "losses": losses[:8],
    }


def in_process(name: str, engine: str, threads: int, seconds: float) -> dict:
    """Do as `measure` in a new process on as many cores as it has threads."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen={str(threads > 1).lower()}",
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-m", "benchmarks.torch_backend", "--measure", name, engine]
    command += ["--threads", str(threads), "--seconds", str(seconds)]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    pin = lambda: os.sched_setaffinity(0, cores)
    out = subprocess.run(command, env=environment, capture_output=True, text=True, preexec_fn=pin)
    if out.returncode:
        raise SystemExit(f"{name} with {engine} failed:\n{out.stderr[-2000:]}")
    return json.loads(out.stdout.splitlines()[-1])


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    command.add_argument("--threads", type=int, default=1)
    command.add_argument("--seconds", type=float, default=5.0, help="time of the steady state, for each measurement")
    command.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = command.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure, arguments.threads, arguments.seconds)))
        return
    table: dict[str, dict] = {}
    for name in arguments.models:
        row: dict = {engine: in_process(name, engine, arguments.threads, arguments.seconds) for engine in ENGINES}
        row["ratio"] = row["inductor"]["step_cpu_s"] / row["jaxtrain"]["step_cpu_s"]
        row["ratio_to_eager"] = row["eager"]["step_cpu_s"] / row["jaxtrain"]["step_cpu_s"]
        far = zip(row["eager"]["losses"], row["jaxtrain"]["losses"], strict=True)
        row["loss_difference"] = max(abs(a - b) / max(abs(a), 1e-3) for a, b in far)
        table[name] = row
        steps = ", ".join(f"{engine} {row[engine]['step_cpu_s'] * 1e3:.1f} ms" for engine in ENGINES)
        print(f"{name:8s} {steps}; inductor/jaxtrain {row['ratio']:.2f}, losses differ by {row['loss_difference']:.1e}")
    save(table, arguments.json)


if __name__ == "__main__":
    main()
