"""What the examples share: their command line, and the loss curve, metrics and files that a run leaves as JSON.

--engine E          which Trainer or Accelerator: the library's own, or jaxtrain's
--output FILE       write {"engine", "loss", "seconds", "processor", "random", "metrics", "files"}
--output_dir DIR    where the run's own files go (default: runs/drop_in/<script>_<engine>)
--max_steps N       optimizer steps (default: 60)
--device D          where torch's model lies: cpu or cuda (default: cpu)
"""

import argparse
import hashlib
import importlib.util
import json
import logging
import pathlib
import random
import sys
import time
import warnings

STARTED, STARTED_PROCESSOR = time.perf_counter(), time.process_time()
if importlib.util.find_spec("torchvision") is not None:  # its CUDA wheel does not load beside a CPU build of torch
    from torch_bridge.torchvision_operators import declare_torchvision

    declare_torchvision()


def parse_args(library: str, **more: tuple) -> argparse.Namespace:
    """Read the command line. more: further options of one example as name=(default, help)."""
    script = pathlib.Path(sys.argv[0])
    parser = argparse.ArgumentParser(prog=script.name)
    parser.add_argument("--engine", choices=(library, "jaxtrain"), default=library)
    parser.add_argument("--output", help="a JSON file for the curve")
    parser.add_argument("--output_dir")
    parser.add_argument("--max_steps", type=int, default=60)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    for name, (default, text) in more.items():
        kind = (
            {"action": "store_true"} if isinstance(default, bool) else {"type": type(default or ""), "default": default}
        )
        parser.add_argument(f"--{name}", help=text, **kind)
    args = parser.parse_args()
    args.output_dir = args.output_dir or f"runs/drop_in/{script.stem}_{args.engine}"
    warnings.filterwarnings("ignore", category=UserWarning)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return args


def random_state() -> str:
    """Return a digest of torch's, numpy's and Python's global generators."""
    import numpy as np
    import torch

    kind, words, *rest = np.random.get_state()
    states = torch.get_rng_state().tolist(), words.tolist(), rest, random.getstate()
    return hashlib.sha256(repr(states).encode()).hexdigest()[:16]


class Curve:
    """The loss of every step, when it was known, and the random generators' states then."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.loss, self.seconds, self.processor, self.random = args, [], [], [], []

    def add(self, loss) -> None:
        self.loss.append(float(loss))
        self.seconds.append(time.perf_counter() - STARTED)
        self.processor.append(time.process_time() - STARTED_PROCESSOR)
        self.random.append(random_state())

    def finish(self, **metrics) -> None:
        """Print the curve, and write it with the run's metrics and files to --output."""
        folder = pathlib.Path(self.args.output_dir)
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        found = {
            "engine": self.args.engine,
            "loss": self.loss,
            "seconds": self.seconds,
            "whole_s": time.perf_counter() - STARTED,
            "processor": self.processor,  # seconds of all cores together, which other processes do not lengthen
            "whole_processor_s": time.process_time() - STARTED_PROCESSOR,
            "random": [*self.random, random_state()],
            "metrics": {name: float(value) for name, value in metrics.items()},
            "files": files,
        }
        print(f"{len(self.loss)} losses, {self.loss[0]:.4f} -> {self.loss[-1]:.4f}; {found['metrics']}")
        if self.args.output:
            pathlib.Path(self.args.output).write_text(json.dumps(found, indent=1))

    def lightning_logger(self, name: str = "train_loss"):
        """A logger for Lightning's Trainer that keeps this metric."""
        from lightning.pytorch.loggers.logger import Logger

        curve = self

        class CurveLogger(Logger):
            name, version = "curve", 0

            def log_metrics(self, metrics, step=None):
                if wanted in metrics:
                    curve.add(metrics[wanted])

            def log_hyperparams(self, params, *args, **kwargs):
                pass

        wanted = name
        return CurveLogger()

    def transformers_callback(self):
        """A callback for transformers' Trainer that keeps the logged losses."""
        from transformers import TrainerCallback

        curve = self

        class CurveCallback(TrainerCallback):
            def on_log(self, args, state, control, logs=None, **kwargs):
                if "loss" in logs:
                    curve.add(logs["loss"])

        return CurveCallback()
