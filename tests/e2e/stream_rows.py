"""One process of several: the rows of memory_lm that it reads of a streamed text in shards, as JSON.

python -m tests.e2e.stream_rows FOLDER STEPS WORKERS...   under any launcher's environment; FOLDER holds train-*.jsonl
"""

import collections
import hashlib
import json
import pathlib
import sys

import jax
import numpy as np

from jaxtrain import config_io
from jaxtrain.runtime import launch
from jaxtrain.systems.memory_lm import text_stream
from jaxtrain.train.trainer import Trainer

CONFIG = pathlib.Path(__file__).parents[2] / "configs/memory_lm_micro.yaml"
SHARDS, FILES, ROWS = 4, 8, 8


def write_files(folder: pathlib.Path, kind: str = "jsonl") -> None:
    """Write eight files of 120 to 190 texts."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in range(FILES):
        words = lambda text: range(8 + (7 * text + file) % 30)
        texts = [" ".join([str(file), *(f"{file}.{i}.{word}" for word in words(i))]) for i in range(120 + 10 * file)]
        path = folder / f"train-{file}.{kind}"
        if kind == "jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=40)


def settings(folder: pathlib.Path) -> list[str]:
    """What makes memory_lm read the files of a folder in shards."""
    return [
        f"data.dataset_name={folder}", "data.streaming=true", "data.eval_split=null", "evaluation.every_steps=null",
        f"data.batch_size={ROWS}", f"data.stream_shards={SHARDS}", "data.shuffle_buffer=6",
        "tracking.tensorboard=false", "optim.schedule.name=constant", "run.quiet=true", "shard.devices=1",
        "train.steps_per_call=1", "train.log_every_steps=1",
    ]  # fmt: skip


def rows(folder: pathlib.Path, steps: int, workers: int) -> list[list[str]]:
    """Hashes of this process's rows of every batch."""
    mine = [f"run.dir={folder / 'run'}", f"data.num_workers={workers}", f"train.steps={steps}"]
    task, config = config_io.load(CONFIG, [*settings(folder), *mine])
    trainer = Trainer(config=config, task=task)
    found = []
    for _, _, batch in trainer.train_loader.batches((step, 1) for step in range(steps)):
        ids = np.asarray(batch["input_ids"].addressable_data(0)).reshape(-1, config.data.max_length)
        found.append([hashlib.sha256(row.tobytes()).hexdigest()[:12] for row in ids])
    trainer.train_loader.close()
    return found


def main(folder: str, steps: str, *workers: str) -> None:
    """Writes FOLDER/<processes>-<process>.json: number of workers -> rows of every batch; texts read here, by file."""
    launch.setup_distributed()
    path, read = pathlib.Path(folder), []
    encode = text_stream.Encoder.encode
    text_stream.Encoder.encode = lambda self, document: (read.append(document["text"]), encode(self, document))[1]
    found = {count: rows(path, int(steps), int(count)) for count in workers}
    told = {"rows": found, "read": collections.Counter(text.split()[0] for text in read)}
    (path / f"{jax.process_count()}-{jax.process_index()}.json").write_text(json.dumps(told))
    launch.wait_for_all("the files")


if __name__ == "__main__":
    main(*sys.argv[1:])
