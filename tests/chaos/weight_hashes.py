"""Print a hash of the weights that every tiny config trains: `python -m tests.chaos.weight_hashes [NAME ...]`.

Run it before and after a change that is to leave training as it is, on the same machine, and compare the lines.
"""

import argparse
import hashlib
import pathlib
import sys
import tempfile

import jax
import numpy as np

from jaxtrain import Trainer, config_io

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SETTINGS = ("tracking.tensorboard=false", "run.quiet=true", "shard.devices=1", "train.log_every_steps=1")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="configs without _tiny.yaml (default: all)")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (default 12)")
    arguments = parser.parse_args(argv)
    names = arguments.names or sorted(path.stem.removesuffix("_tiny") for path in CONFIGS.glob("*_tiny.yaml"))
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            settings = [f"run.dir={folder}", f"train.steps={arguments.steps}", *SETTINGS]
            task, config = config_io.load(CONFIGS / f"{name}_tiny.yaml", settings)
            trainer = Trainer(config=config, task=task)
            history = trainer.train()
        print(f"{name} {digest(trainer.state)} {history['best_val_loss']!r}", flush=True)
    return 0


def digest(state) -> str:
    """Of parameters, buffers and moments, in the order of their names."""
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_flatten_with_path(
        (state.params, state.frozen, state.buffers, state.opt_state, state.ema)
    )[0]:
        found.update(jax.tree_util.keystr(path).encode())
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
