"""How far converted torch models are from torch: `python -m benchmarks.architectures`.

Small random models of transformers, timm and torch.nn, float32: relative L2 of outputs and gradients. Figures go into
benchmarks/results/architectures.json, one model after the other; those that stand there are not measured again
(--again does). `python docs/generate_operators.py` makes docs/operators.md of them.
"""

import json
import pathlib
import time

from benchmarks import parser

RESULTS = pathlib.Path(__file__).parent / "results/architectures.json"


def main() -> None:
    p = parser(__doc__, figures=False)
    p.add_argument("--again", action="store_true", help="measure all of them")
    p.add_argument("--only", metavar="TEXT", default="", help="models whose name holds it")
    arguments = p.parse_args()
    from tests.e2e import models_timm, models_torch_nn, models_transformers
    from tests.e2e.architectures import compare

    known = json.loads(RESULTS.read_text()) if RESULTS.is_file() and not arguments.again else {}
    for module in (models_torch_nn, models_timm, models_transformers):
        for architecture in module.ARCHITECTURES:
            if architecture.name in known or arguments.only not in architecture.name:
                continue
            started = time.perf_counter()
            distance = compare(architecture)
            known[architecture.name] = {
                "source": architecture.source,
                "training": architecture.training,
                "outputs": distance.outputs,
                "gradients": distance.gradients,
                "buffers": distance.buffers,
                "parameters": distance.parameters,
                "operators": sorted(distance.operators),
            }
            RESULTS.parent.mkdir(exist_ok=True)
            RESULTS.write_text(json.dumps(known, indent=1) + "\n")
            seconds = time.perf_counter() - started
            print(
                f"{architecture.name:40s} {distance.outputs:.1e} {distance.gradients:.1e}  {seconds:.0f} s", flush=True
            )


if __name__ == "__main__":
    main()
