"""Compare the memory that a first few steps of AdamW add in torch and under jaxtrain.compile.

    python -m benchmarks.step_memory

Each side runs in a process of its own: a stack of linear layers, 50 million float32 parameters (201 MB), five steps.
Printed: MB above the process with its model and its imports, at the peak and after the last step.
"""

import pathlib
import resource
import subprocess
import sys

from benchmarks import parser, save

LAYERS, WIDTH, STEPS = 12, 2048, 5


def resident_mb() -> float:
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def measure(side: str) -> tuple[float, float]:
    """Return MB above the start, at the peak and at the end."""
    import torch

    import jaxtrain

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(8, WIDTH)
    loss = lambda module, x: module(x).square().mean()
    small = torch.nn.Linear(4, 4)  # imports and compiles whatever any step needs
    warm = jaxtrain.compile(small, loss, torch.optim.AdamW(small.parameters()), wait=True)
    float(warm(torch.randn(8, 4)))
    step = jaxtrain.compile(model, loss, optimizer, wait=True) if side == "jaxtrain" else None
    before = resident_mb()
    for _ in range(STEPS):
        if step is not None:
            value = float(step(batch))
            continue
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
    after = resident_mb()
    assert value >= 0
    return peak_mb() - before, after - before


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--side", choices=("torch", "jaxtrain"), help="measure one side in this process")
    arguments = p.parse_args()
    if arguments.side:
        print(*measure(arguments.side))
        return
    found = {}
    for name in ("torch", "jaxtrain"):
        command = [sys.executable, "-m", "benchmarks.step_memory", "--side", name]
        peak, after = map(float, subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split())
        found[name] = peak
        print(f"{name}: {peak:.0f} MB more at the peak, {after:.0f} MB after {STEPS} steps")
    print(f"ratio of the peaks: {found['jaxtrain'] / found['torch']:.2f}")
    save(found, arguments.json)


if __name__ == "__main__":
    main()
