"""The first-generation autoencoder at its full size, built by its config: `python -m tests.chaos.full_size_model`.

Its 1,974,067,762 parameters, and the process's peak memory against weights and buffers, float32, without an optimizer's
state.
"""

import argparse
import resource
import sys
import tempfile

LIMIT = 1.15
PARAMETERS = 1_974_067_762


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("overrides", nargs="*", metavar="a.b=c")
    arguments = p.parse_args(argv)

    import jax

    from jaxtrain import config_io
    from jaxtrain.train.trainer import Trainer

    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.dir={folder}", "run.quiet=true", "optim.name=sgd", "optim.momentum=0", "data.batch_size=4"]
        settings += [f"data.{key}" for key in ("synthetic=arrays", "synthetic_volumes=20", "synthetic_subjects=1")]
        task, config = config_io.load("configs/sherlock_gen1.yaml", [*settings, *arguments.overrides])
        state = jax.block_until_ready(Trainer(config=config, task=task).state)
        parameters = sum(value.size for value in state.params.values())
        held = sum(value.nbytes for value in (*state.params.values(), *state.buffers.values()))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{parameters:,} parameters, {held / 1e9:.2f} GB; peak memory {peak / 1e9:.2f} GB, {peak / held:.2f} of it")
    return 0 if parameters == PARAMETERS and peak < LIMIT * held else 1


if __name__ == "__main__":
    sys.exit(main())
