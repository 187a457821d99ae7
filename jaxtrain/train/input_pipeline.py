"""Data of a run: its sources, the workers that read them, and how batches are placed on the devices."""

import copy
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np

from jaxtrain.config import MOST_STEPS, TrainingConfig
from jaxtrain.data import row_keys, sharded_loader
from jaxtrain.data.batch_shapes import (
    MOST_EXACT,
    MOST_SIZES,
    PROBED,
    Axis,
    NotPadded,
    PaddingCollate,
    collate_of,
    probe,
)
from jaxtrain.data.example import first_samples
from jaxtrain.data.index_stream import FirstBatches, IndexStream, IterableStream, SamplerStream
from jaxtrain.data.loader import Loader, Stream, make_pool, make_reader, make_stream, own_batch_size
from jaxtrain.data.peek import read_by
from jaxtrain.data.sample_reader import beside, raw_items
from jaxtrain.data.sources import ArraySource, ForeignSource, SequentialSource, as_source, batch_shapes
from jaxtrain.data.stream_shards import Sharding
from jaxtrain.data.workers import WorkerPool, warm_up
from jaxtrain.errors import UserError
from jaxtrain.runtime.mesh import Layout, check_batch, local_rows
from jaxtrain.task import Task
from jaxtrain.train.step.short_batches import ShortBatches, put


class InputPipeline:
    """Loaders over the given datasets, or over the task's own if none are given.

    config: the given one, with the batch size of a source that decides it. Create it before JAX's backend starts, so
    that worker processes can even be forked; then call `lay_out` with the devices, which sets `train_loader`,
    `total_steps` and `steps_per_epoch`. interrupted: polled while waiting; once it returns True, batches end. Raises
    UserError if there is no training data.
    """

    def __init__(
        self,
        task: Task,
        config: TrainingConfig,
        train_dataset: Any,
        val_dataset: Any,
        interrupted: Callable[[], bool],
    ):
        self.task, self.config, self.interrupted = task, config, interrupted
        datasets = {"train": train_dataset, "validation": val_dataset}
        self._given = {n: None if value is None else as_source(value, n) for n, value in datasets.items()}
        self._sources = dict(self._given)
        self._pools: dict[str, WorkerPool] = {}
        self.pads = True  # lengths may be rounded up, unless the program finds that it changes results
        self.notes: list[str] = []  # about batch shapes, for the run's log
        self.warnings: list[str] = []  # about differences from the dataset's own library
        source = self.source("train")
        if source is None:
            raise UserError("there is no training data: the task has no `train` split and no dataset was given")
        validation = self._given["validation"]
        self.shares_order = (
            isinstance(source, ForeignSource) and validation is not source and source.shares_order(validation)
        )
        read_by(source, self._workers(source), config.data.stream_shards is not None)
        epochs, steps = config.train.epochs or 1, config.train.steps
        own_size = own_batch_size(source, config.seed, epochs, steps, config.data.batch_size)
        if own_size is not None:
            data = config.data.model_copy(update={"batch_size": own_size})
            self.config = config.model_copy(update={"data": data})
        if self._workers(source):
            self._start_workers(source)

    def lay_out(self, layout: Layout) -> None:
        """Place batches on these devices from now on. Raises UserError if the devices cannot divide the batch."""
        self.layout = layout
        config, data = self.config, self.config.data
        accumulate = config.train.accumulate_steps
        check_batch(data.batch_size, accumulate, layout)
        source = self.source("train")
        epochs, steps = config.train.epochs or 1, config.train.steps
        shuffle = data.shuffle and config.train.overfit_batches is None
        sharding = self._sharding(source)
        stream = make_stream(source, data.batch_size, config.seed, True, shuffle, data.drop_last, epochs, steps)
        if sharding is not None:
            stream = IterableStream(source, data.batch_size, sharding=sharding)
        if config.train.overfit_batches is not None:
            if isinstance(stream, IterableStream):
                raise UserError("train.overfit_batches: an iterable dataset gives no batch twice; give a map-style one")
            stream = FirstBatches(stream, config.train.overfit_batches)
        if stream.steps_per_epoch is None and config.train.steps is None:
            raise UserError("train.steps: wanted, because the dataset does not say how long an epoch is (no __len__)")
        self.total_steps = cast(int, steps or stream.steps_of(epochs))
        if self.total_steps > MOST_STEPS:
            raise UserError(
                f"train.epochs: {config.train.epochs:,} of {stream.steps_per_epoch:,} steps are more than the "
                f"{MOST_STEPS:,} steps that a run may take"
            )
        self.steps_per_epoch = stream.steps_per_epoch or self.total_steps
        self.train_loader = self._loader("train", source, stream, accumulate)

    def expect_evaluations(self, due: Callable[[int], bool]) -> None:
        """Reproduce torch's training order if it shares a generator with the validation DataLoader, which draws from it
        at every evaluation. due: step -> True if an evaluation follows. Raises UserError if it cannot be reproduced."""
        if not self.shares_order or not isinstance(self.train_loader.stream, SamplerStream):
            return
        source, each = self.source("train"), self.steps_per_epoch
        known = getattr(source, "draws_at_once", None)
        inside = known is False and any(due(step) for step in range(1, self.total_steps) if step % each)
        if known is None or inside:
            raise UserError(
                "the training and the validation DataLoader share a generator, from which the training order is drawn "
                "while evaluations move it on: give each a generator of its own"
                + (", or evaluate at the ends of epochs only (evaluation.every_epochs)" if inside else "")
            )
        source.interleave(
            self._given["validation"],
            lambda epoch: sum(due(step) for step in range((epoch - 1) * each + 1, epoch * each + 1)),
        )
        self.train_loader.stream.draw_anew()

    def variant(self, config: TrainingConfig, train: Any = None, validation: Any = None) -> "InputPipeline":
        """Return a pipeline with the same data for another config; another seed builds the datasets anew, as they may
        depend on it. train, validation: sources in place of the given ones."""
        train, validation = train or self._given["train"], validation or self._given["validation"]
        if config.seed != self.config.seed or train is not self._given["train"]:
            other = InputPipeline(self.task, config, train, validation, self.interrupted)
        else:
            other = copy.copy(self)
            other.config = config
        other.lay_out(self.layout)
        return other

    def source(self, split: str) -> Any:
        """Return the dataset of a split: the given one, else the task's; None if there is none. Raises UserError if it
        is empty."""
        if self._sources.get(split) is None:
            built = self.task.build_data(self.config, split)
            self._sources[split] = None if built is None else as_source(built, split)
        source: Any = self._sources[split]
        if split != "train":
            read_by(source, self._workers(source))
        if split != "train" and source is not None and not isinstance(source, SequentialSource) and not len(source):
            raise UserError(f"the {split} dataset is empty: give it samples, or None to train without an evaluation")
        return source

    def evaluation(self, split: str) -> tuple[Any, Stream, Loader]:
        """Return source, index stream and loader of a split, unshuffled and complete. Raises UserError without data."""
        source = self.source(split)
        if source is None:
            raise UserError(f"there is no `{split}` data to evaluate on")
        if self.config.train.overfit_batches is not None and split == "validation":
            stream = self.train_loader.stream
            return self.source("train"), stream, self._loader("train", self.source("train"), stream, 1)
        size = self._evaluation_size(source)
        if self.task.pads_batches:
            unit = self.layout.batch_devices
            size = -(-size // unit) * unit
        stream = make_stream(source, size, self.config.seed, False, False, False)
        return source, stream, self._loader(split, source, stream, 1)

    def shapes(self, source: Any, stream: Stream, loader: Loader) -> int:
        """Return the largest number of shapes that a source's batches may have, uneven batches included."""
        if self.task.pads_batches:
            return batch_shapes(source)
        if loader.batch_shapes is not None and loader.batch_shapes.exact:
            return MOST_EXACT
        if isinstance(stream, IndexStream):
            if self.config.data.shapes != "one" and self._may_vary(source):
                return self._most_shapes
            count, size = stream.size, stream.batch_size
            uneven = count > size and count % size and not stream.drop_last
            return batch_shapes(source) * (2 if uneven else 1)
        return self._most_shapes

    @property
    def _most_shapes(self) -> int:
        if self.config.data.shapes == "one":
            return 2  # the last batch of an epoch may be short
        return MOST_SIZES if self.config.data.shapes == "auto" and self.pads else MOST_EXACT

    def find_axes(self, split: str, loader: Loader) -> list[Axis] | None:
        """Return the axes of a split's batches whose length varies; None if some may vary and the padding values are
        not known."""
        source = self.source(split)
        if self.config.data.shapes == "one" or self.task.pads_batches or not self._may_vary(source):
            return []
        stream = loader.stream
        if isinstance(stream, IterableStream):
            positions = np.arange(PROBED)
        else:
            steps = np.unique(np.linspace(0, stream.steps_per_epoch - 1, PROBED).astype(int))
            own = [stream.batch(int(step))[0] for step in steps]
            positions = np.array([indices[0] for indices in own] + [indices[-1] for indices in own])[:PROBED]
        if isinstance(source, SequentialSource) and source.ready_made:
            return []
        items = lambda: raw_items(loader.reader, positions)
        try:
            return probe(source, beside(loader.reader.collate, source), items, self.config.data.pad_values)
        except NotPadded as reason:
            self.pads = False
            self.notes.append(f"data.shapes: {reason}; until then every length is compiled in its own shape")
            return None

    def _may_vary(self, source: Any) -> bool:
        """Return True if a user's collate function, or one that pads, makes the batches."""
        return getattr(source, "collate", None) is not None or isinstance(self._collate(source), PaddingCollate)

    def _collate(self, source: Any) -> Callable | None:
        return collate_of(self.task.collate, source, self.config)

    def example(self) -> dict[str, Any]:
        """Return two samples of the first training batch, in numpy."""
        source, stream = self.source("train"), self.train_loader.stream
        collate = self._collate(source)
        loader = self._kind(stream)(
            source, stream, lambda batches: batches[0], np.arange(2), collate, seed=self.config.seed, keep_texts=True
        )
        return first_samples(loader)

    def columns(self, loader: Loader) -> dict[str, jax.Array]:
        """Return the dataset's columns on the devices, after checking them; {} if it stays on the host."""
        if not loader.on_device:
            return {}
        columns, size = loader.source.columns, loader.stream.batch_size
        total = len(jax.tree.leaves(columns)[0])  # the source may be a part of the rows
        for first in range(0, total, size):
            rows = np.arange(first, min(first + size, total))
            batch = jax.tree.map(lambda column, rows=rows: column[rows], columns)
            self.task.check_batch(row_keys.join(row_keys.rows(rows, rows >= 0, columns), batch), self.config)
        place = lambda column: jax.make_array_from_process_local_data(self.layout.replicated, column, column.shape)
        return jax.tree.map(place, loader.source.columns)

    def in_workers(self, split: str) -> bool:
        """Return True if worker processes hold a copy of a split's dataset that must be refreshed when it changes."""
        source = self.source(split)
        return source is not None and self._workers(source) > 0 and not getattr(source, "persistent", False)

    def restart_workers(self, split: str) -> None:
        """End a split's worker processes; new ones read the next batches, with the dataset as it is by then."""
        self._pool(split).close()

    def changed_by_resume(self, step: int) -> str | None:
        """Return a warning if resuming at `step` changes random numbers of the training data; None if it does not."""
        source = self.source("train")
        if not isinstance(source, ForeignSource) or isinstance(source, SequentialSource):
            return None
        begins = not self.train_loader.stream.place(step)[1] and hasattr(getattr(source, "dataset", None), "set_epoch")
        names = [] if begins else source.unkept_generators()
        if not names:
            return None
        return (
            f"the data hold random generators of their own ({', '.join(names[:3])}), which start anew: the samples "
            "from here on differ from those of a run without the stop. Draw from torch's, numpy's or Python's global "
            "generator, which is seeded for every sample"
        )

    def close(self) -> None:
        """End the worker processes; the next iteration would start new ones."""
        for pool in self._pools.values():
            pool.close()

    def _sharding(self, source: Any) -> Sharding | None:
        """Return how processes and workers divide the training stream; None without data.stream_shards. Raises
        UserError if that setting does not fit."""
        config, count = self.config, self.config.data.stream_shards
        if count is None:
            return None
        if not isinstance(source, SequentialSource):
            raise UserError(
                f"data.stream_shards: {count}, but the training data are no stream: samples that are found by position "
                "are divided over processes and workers already; leave it out"
            )
        if config.train.steps is None:
            raise UserError(
                "train.steps: wanted beside data.stream_shards: shards differ in length, and each begins again as it "
                "ends, so there is no end of an epoch"
            )
        source.shard(count, 0)  # so that an error is raised here, not in a worker
        return Sharding(count, config.data.batch_size, config.data.shuffle_buffer, config.train.accumulate_steps)

    # --- workers ------------------------------------------------------------------------------------------------

    def _workers(self, source: Any) -> int:
        wanted = source.workers_wanted if isinstance(source, ForeignSource) else 0
        return self.config.data.num_workers or wanted

    def _start_method(self, source: Any) -> str:
        own = source.start_method if isinstance(source, ForeignSource) else None
        return own or self.config.data.start_method

    def _start_workers(self, source: Any) -> None:
        if self._start_method(source) == "forkserver":
            warm_up(source)
        elif self._start_method(source) == "fork":
            for split in ("train", "validation"):
                if self.source(split) is not None:
                    self._pool(split).start()

    def _pool(self, split: str) -> WorkerPool:
        """Return the worker pool of a split, which lives as long as the run."""
        if split not in self._pools:
            source, data = self.source(split), self.config.data
            size = data.batch_size if split == "train" else self._evaluation_size(source)
            reader = make_reader(source, self._collate(source), size, self.config.seed)
            make = make_pool if split != "train" or data.stream_shards is None else sharded_loader.make_pool
            self._pools[split] = make(reader, self._workers(source), data.timeout_s, self._start_method(source))
        return self._pools[split]

    def _evaluation_size(self, source: Any) -> int:
        wanted = self.config.data.eval_batch_size or self.config.data.batch_size
        return own_batch_size(source, least=wanted) or wanted

    # --- how batches reach the devices --------------------------------------------------------------------------

    def _loader(self, split: str, source: Any, stream: Stream, accumulate: int) -> Loader:
        micro = stream.batch_size // accumulate
        rows = np.concatenate([i * micro + local_rows(micro, self.layout) for i in range(accumulate)])
        loader = self._kind(stream)(
            source,
            stream,
            lambda batches: put([self._unreserved(batch) for batch in batches], accumulate, micro, self.layout),
            rows,
            self._collate(source),
            self._on_device(source),
            self.config.data.prefetch_batches,
            self._pool(split),
            self.config.data.timeout_s,
            self.config.seed,
            self.interrupted,
            keep_texts=True,
            short=None if self.task.pads_batches else ShortBatches(self.layout, micro),
        )
        if not loader.on_device:
            loader.check = lambda batch: self.task.check_batch(batch, self.config)
        return loader

    def _kind(self, stream: Stream) -> type[Loader]:
        divided = isinstance(stream, IterableStream) and stream.sharding is not None
        return sharded_loader.ShardedLoader if divided else Loader

    def _unreserved(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch. Raises UserError if the task would mistake a dataset's entry for the loader's own."""
        taken = row_keys.reserved(batch) if self.task.pads_batches else []
        if taken:
            raise UserError(
                f"the dataset has an entry `{taken[0]}`, which in a task's batches names the loader's own "
                "(jaxtrain/task.py); give it another name in the Dataset"
            )
        return batch

    def _on_device(self, source: Any) -> bool:
        placement = self.config.data.placement
        columnar = isinstance(source, ArraySource)
        if placement == "device" and not columnar:
            raise UserError("data.placement: device needs a dataset of arrays (ArraySource or a mapping of arrays)")
        fits = columnar and source.nbytes <= self.config.data.device_limit_bytes
        ready = columnar and (source.batched or self._collate(source) is None)
        return placement == "device" or (placement == "auto" and fits and ready)
