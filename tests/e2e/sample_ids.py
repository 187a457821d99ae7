"""One process of several: the samples it reads with each number of workers, as JSON.

python -m tests.e2e.sample_ids FOLDER WORKERS...   under any launcher's environment
"""

import json
import pathlib
import sys

import jax
import numpy as np

from jaxtrain import config_io
from jaxtrain.runtime import launch
from jaxtrain.train.trainer import Trainer

EPOCHS = 2


def samples(folder: pathlib.Path, workers: int) -> list[list[int]]:
    """This process's samples of every global batch, in order."""
    config = {"task": "tests.e2e.counting_task.count", "data": {"batch_size": 8, "num_workers": workers}}
    task, resolved = config_io.check(config | {"run": {"dir": str(folder), "quiet": True}, "shard": {"devices": 1}})
    trainer = Trainer(config=resolved, task=task)
    given = []
    for _, _, batch in trainer.train_loader.batches((step, 1) for step in range(EPOCHS * trainer.steps_per_epoch)):
        ids, valid = (np.asarray(batch[key].addressable_data(0))[0] for key in ("1", "valid"))  # one device each
        given.append(ids[valid].tolist())
    trainer.train_loader.close()
    return given


def main(folder: str, *workers: str) -> None:
    """Writes FOLDER/<processes>-<process>.json: number of workers -> samples of every batch."""
    launch.setup_distributed()
    path = pathlib.Path(folder)
    found = {count: samples(path / "run", int(count)) for count in workers}
    (path / f"{jax.process_count()}-{jax.process_index()}.json").write_text(json.dumps(found))
    launch.wait_for_all("the files")


if __name__ == "__main__":
    main(*sys.argv[1:])
