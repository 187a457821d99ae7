"""What a compiled step costs before and beside the device's work: `python -m benchmarks.first_call`.

CPU seconds of the first call of a BERT of transformers (layers of 256, two labels, the compile cache warm from an
earlier process), and milliseconds of the calling thread per call of a network of 120 parameters. Each in a process of
its own; CPU time, because a busy machine stretches wall time only.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile

from benchmarks import parser, save

FIRST = """
import json, sys, time
from torch_bridge.torchvision_operators import declare_torchvision
declare_torchvision()
import torch, transformers
import jaxtrain
torch.manual_seed(0)
c = transformers.BertConfig(vocab_size=1000, hidden_size=256, num_hidden_layers=int(sys.argv[1]), num_attention_heads=4,
                            intermediate_size=1024, num_labels=2)
model = transformers.BertForSequenceClassification(c)
ids = torch.randint(1, 1000, (8, 32))
batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
started = time.process_time()
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
step = jaxtrain.compile(model, lambda model, batch: model(**batch).loss, optimizer, wait=True)
loss = float(step(batch))
seconds = time.process_time() - started
print(json.dumps({"first_call_cpu_s": seconds, "loss": loss}))
"""

CALLS = """
import json, statistics, time
import torch
from torch import nn
from torch.nn import functional as F
import jaxtrain
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(60)])
batch = torch.randn(4, 16), torch.randn(4, 16)
loss = lambda model, batch: F.mse_loss(model(batch[0]), batch[1])
step = jaxtrain.compile(model, loss, torch.optim.AdamW(model.parameters(), 1e-3), wait=True)
for _ in range(30):
    last = step(batch)
float(last)
spent = []
for _ in range(300):
    started = time.thread_time()
    last = step(batch)
    spent.append((time.thread_time() - started) * 1e3)
    float(last)
print(json.dumps({"call_ms": statistics.median(spent)}))
"""


def figures(script: str, cache: str, *arguments: str) -> dict[str, float]:
    environ = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
    command = [sys.executable, "-c", script, *arguments]
    output = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--layers", default="4", help="of the BERT (default: 4)")
    p.add_argument("--rounds", type=int, default=3, help="processes per figure (default: 3); medians are shown")
    arguments = p.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        cold = figures(FIRST, cache, arguments.layers)
        warm = [figures(FIRST, cache, arguments.layers) for _ in range(arguments.rounds)]
        calls = [figures(CALLS, cache) for _ in range(arguments.rounds)]
    found = {
        "first_call_cold_cpu_s": cold["first_call_cpu_s"],
        "first_call_warm_cpu_s": statistics.median(one["first_call_cpu_s"] for one in warm),
        "call_ms": statistics.median(one["call_ms"] for one in calls),
    }
    for name, value in found.items():
        print(f"{name:24s} {value:8.3f}")
    save(found, arguments.json)


if __name__ == "__main__":
    main()
