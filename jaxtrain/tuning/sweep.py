"""`sweep`: train many runs of one torch module, which differ in numbers, in one compiled program."""

import csv
import dataclasses
import inspect
import io
import json
import math
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxtrain import config_io
from jaxtrain.config import FLAT_NAMES, TrainingConfig
from jaxtrain.data.sources import ArraySource, PickedRows, as_source
from jaxtrain.errors import UserError
from jaxtrain.reporting import charts, frame
from jaxtrain.train.search.vmap_trainer import Member, Population
from jaxtrain.train.user.resolve_task import task_of_module
from jaxtrain.tuning import draws, lanes
from jaxtrain.tuning.pruning import Pruning
from jaxtrain.tuning.space import Pruner, apply
from torch_bridge import state_dict as bridge
from torch_bridge.atomic_file import write_text

LANES = 64  # runs in one program, unless `lanes` says otherwise
SHOWN = 8  # runs whose curves the picture has


@dataclasses.dataclass
class SweepRun:
    """One run of a sweep.

    Attributes:
        number: its position in the draw.
        values: its settings.
        score: its best value of evaluation.metric (of the training loss in the last epoch, without validation data);
            NaN if it never had one.
        history: as from Trainer.train.
        state: "complete", "pruned" or "failed".
        error: why it failed.
        steps: updates that its weights have had.
    """

    number: int
    values: dict[str, Any]
    score: float
    history: dict[str, Any]
    state: str
    error: str
    steps: int
    weights: Callable[[], dict[str, np.ndarray]] = dataclasses.field(repr=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the weights at its best evaluation (the last ones, without validation data) as a torch state dict, for
        `make_module(...).load_state_dict(...)`."""
        return lanes.as_tensors(self.weights())


@dataclasses.dataclass
class SweepResult:
    """The runs of a sweep.

    Attributes:
        runs: in the order of the draw.
        metric: what `score` is.
        mode: which end of it is better.
        programs: training steps that were compiled.
        notes: why runs did not share a program.
    """

    runs: list[SweepRun]
    metric: str
    mode: str
    programs: int
    notes: list[str]

    @property
    def ranked(self) -> list[SweepRun]:
        """The runs from the best to the worst score; failed ones last."""
        sign = -1 if self.mode == "max" else 1
        return sorted(self.runs, key=lambda run: (math.isnan(run.score), sign * run.score))

    @property
    def best(self) -> SweepRun:
        """The run with the best score. Raises UserError if every run has failed."""
        run = self.ranked[0]
        if math.isnan(run.score):
            raise UserError(f"sweep: no run has a score; the first one {run.state}: {run.error}")
        return run

    def state_dict(self) -> dict[str, Any]:
        """Return the best run's weights as a torch state dict."""
        return self.best.state_dict()

    def table(self) -> str:
        """Return the runs as text, the best first."""
        head, rows = self._rows()
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        )

    def means(self) -> list[dict[str, Any]]:
        """Return mean and standard deviation of the scores over seeds and folds, one for each other setting, best
        first."""
        alike: dict[str, list[SweepRun]] = {}
        for run in self.runs:
            own = {name: value for name, value in run.values.items() if name not in ("seed", "fold")}
            alike.setdefault(json.dumps(own, sort_keys=True, default=str), []).append(run)
        found = []
        for runs in alike.values():
            scores = [run.score for run in runs]
            values = {name: value for name, value in runs[0].values.items() if name not in ("seed", "fold")}
            found.append(
                {
                    "values": values,
                    "mean": statistics.fmean(scores),
                    "std": statistics.pstdev(scores),
                    "runs": len(runs),
                }
            )
        sign = -1 if self.mode == "max" else 1
        return sorted(found, key=lambda each: (math.isnan(each["mean"]), sign * each["mean"]))

    def page(self) -> str:
        """Return an HTML page with the best runs' curves, the score over every setting that varies, and the table."""
        curves = [
            (f"run {run.number}", i % 8, False, list(enumerate(self._curve(run), start=1)))
            for i, run in enumerate(self.ranked[:SHOWN])
        ]
        parts = [frame.section("best runs", charts.line_chart(f"{self.metric} by evaluation", curves))]
        for name in self._varied():
            points = sorted((float(run.values[name]), run.score) for run in self.runs if _is_number(run.values[name]))
            dots = [("", 0, False, [point]) for point in points]
            if len(points) == len(self.runs):
                parts.append(frame.section(f"{self.metric} over {name}", charts.line_chart(self.metric, dots)))
        head, rows = self._rows()
        return frame.document("sweep", [*parts, frame.section("runs", frame.table(head, rows))])

    def save(self, folder: str | pathlib.Path) -> pathlib.Path:
        """Write runs.csv, sweep.html and best.pt into a folder; return it."""
        from torch_bridge.files import save

        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        head, rows = self._rows(exact=True)
        table = io.StringIO()
        csv.writer(table).writerows([head, *rows])
        write_text(folder / "runs.csv", table.getvalue())
        write_text(folder / "sweep.html", self.page())
        save(self.best.weights(), folder / "best.pt")
        return folder

    def _curve(self, run: SweepRun) -> list[float]:
        return [metrics[self.metric] for metrics in run.history["val_history"] or run.history["train_history"]]

    def _varied(self) -> list[str]:
        return [name for name in self.runs[0].values if len({repr(run.values[name]) for run in self.runs}) > 1]

    def _rows(self, exact: bool = False) -> tuple[list[str], list[list[str]]]:
        shown = str if exact else lambda value: f"{value:.5g}" if isinstance(value, float) else str(value)
        names = list(self.runs[0].values)
        head = [
            "run",
            self.metric,
            *names,
            "state",
            "steps",
            *(["error"] if any(run.error for run in self.runs) else []),
        ]
        rows = [
            [
                str(run.number),
                shown(run.score),
                *(shown(run.values[n]) for n in names),
                run.state,
                str(run.steps),
                run.error,
            ]
            for run in self.ranked
        ]
        return head, [row[: len(head)] for row in rows]


def sweep(
    make_module: Callable[..., Any],
    data: Any,
    loss: Any = None,
    space: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    runs: int | None = None,
    *,
    validation: Any = None,
    config: TrainingConfig | Mapping[str, Any] | None = None,
    folds: int | None = None,
    pruner: str | Mapping[str, Any] = "none",
    lanes_per_program: int = LANES,
    devices: Sequence[Any] | None = None,
    draw_seed: int = 0,
) -> SweepResult:
    """Train many runs of a torch module at once; return their scores, curves and weights.

    Runs whose floats differ (rates, decay, dropout, smoothing, factors) share one program. A setting that changes the
    code (a width) makes one program for each value, and so does a number that an operator takes when it is compiled;
    `notes` says which. Every run equals `Trainer` on its own module and settings to 1e-5.

    Args:
        make_module: a function (or class) that returns the module; it is called once per run, after
            torch.manual_seed(seed), with the settings that it names.
        data: the training data, a torch Dataset or a dict of arrays.
        loss: as for Trainer; with settings `loss.NAME`, a class or function that makes one of them.
        space: name -> list of choices, {"type": "loguniform", "low": ..., "high": ...} or a fixed value; or a list with
            each run's settings. A name is an argument of make_module, `loss.` and an argument of the loss, or a setting
            of the config: seed, lr, weight_decay, optim.schedule.warmup_ratio, ...
        runs: how many to draw; all combinations of lists if left out.
        validation: data that runs are scored on.
        config: everything else, as for Trainer; `evaluation.metric` and `mode` decide the best.
        folds: instead of `validation`, train each run once per fold of the data and score it on that fold; needs
            columns (a dict of arrays or a TensorDataset).
        pruner: "asha", "median" or a study's `pruner` section: ends runs early and frees their lanes.
        lanes_per_program: most runs at a time.
        devices: default: all GPUs, or the CPU; each has programs of its own.
        draw_seed: of the draw.

    Raises:
        UserError: for everything that the user can fix, before the first step.

    Examples:
        >>> import torch, jaxtrain
        >>> x = torch.randn(64, 3, generator=torch.Generator().manual_seed(0))
        >>> data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
        >>> result = jaxtrain.sweep(
        ...     lambda: torch.nn.Linear(3, 1), data, torch.nn.MSELoss(), {"lr": [1e-3, 1e-1], "seed": [0, 1]},
        ...     validation=data, config={"num_epochs": 5},
        ... )
        >>> len(result.runs), result.programs, result.best.values["lr"]
        (4, 1, 0.1)
    """
    from torch_bridge.training import module_runs

    base = _config(config)
    source = _columns(as_source(data, "data"))
    scored = None if validation is None else _columns(as_source(validation, "validation"))
    chosen = draws.draw(space or {}, runs, draw_seed)
    plans = [plan for values in chosen for plan in _folded(values, folds, source, scored, base)]
    metric, mode = base.evaluation.metric, base.evaluation.mode
    plans = [_settled(plan, number, make_module, base) for number, plan in enumerate(plans)]
    places = list(devices or _all_devices())
    make = lambda plan: module_runs.make_run(make_module, loss, plan.config.seed, plan.module, plan.loss)
    recorded = lambda plan, run: task_of_module(run.module, plan.train, plan.config, run.loss, None)
    prepared = lanes.programs(plans, make, recorded, places, lanes_per_program)
    settings = config_io.validate(Pruner, {"name": pruner} if isinstance(pruner, str) else pruner, "pruner")
    pruning = settings if scored is not None or folds else settings.model_copy(update={"name": "none"})
    if settings.name != "none" and pruning.name == "none":
        raise UserError(f"pruner: {settings.name} compares evaluations, and there is no validation data")

    def train(batch: lanes.Batch) -> list[SweepRun]:
        population = Population(batch.programs, Member, Pruning(pruning, metric, mode))
        outcomes = population.train()
        return [
            _run(plan, m, o, metric, mode) for plan, m, o in zip(batch.plans, population.members, outcomes, strict=True)
        ]

    by_device = [[batch for batch in prepared.batches if batch.device is place] for place in places]
    in_turn = lambda batches: [run for batch in batches for run in train(batch)]
    if sum(bool(batches) for batches in by_device) > 1:
        with ThreadPoolExecutor(len(places)) as pool:
            found = [run for own in pool.map(in_turn, by_device) for run in own]
    else:
        found = in_turn(prepared.batches)
    compiled = {id(b.programs[0]._programs): b.programs[0].compilations for b in prepared.batches}
    return SweepResult(sorted(found, key=lambda run: run.number), metric, mode, sum(compiled.values()), prepared.notes)


def _all_devices() -> list[Any]:
    devices = jax.local_devices()
    return devices if devices[0].platform != "cpu" else devices[:1]  # several would share the same cores


def _config(config: Any) -> TrainingConfig:
    if config is None or isinstance(config, Mapping):
        config = TrainingConfig(**(config or {}))
    if not isinstance(config, TrainingConfig):
        raise UserError(f"config: got {type(config).__name__}, wanted a TrainingConfig or a dict of settings")
    if config.lora.rank:
        raise UserError("lora: sweep trains modules whole; put the adapters into make_module, or use Trainer")
    return config


def _columns(source: Any) -> Any:
    """Return a TensorDataset's tensors as columns, which are read without a call for each sample; other data as they
    are."""
    tensors = getattr(getattr(source, "dataset", None), "tensors", None)
    plain = type(getattr(source, "dataset", None)).__name__ == "TensorDataset" and not getattr(source, "collate", None)
    if tensors is None or not plain:
        return source
    return ArraySource({str(i): tensor.numpy() for i, tensor in enumerate(tensors)}, batched=True)


def _folded(values: dict, folds: int | None, source: Any, scored: Any, config: TrainingConfig) -> list[lanes.Plan]:
    if folds is None:
        return [lanes.Plan(values, source, scored)]
    if scored is not None:
        raise UserError("folds: each fold of the data is scored on in turn; leave `validation` out")
    if not isinstance(source, ArraySource):
        raise UserError("folds: want columns, a dict of arrays or a TensorDataset; give the runs' data otherwise")
    if not 2 <= folds <= len(source):
        raise UserError(f"folds: {folds}, wanted 2 to {len(source)}, the number of samples")
    order = np.random.default_rng(config.seed).permutation(len(source))
    parts = [np.sort(part) for part in np.array_split(order, folds)]
    rest = lambda k: np.sort(np.concatenate(parts[:k] + parts[k + 1 :]))
    return [
        lanes.Plan({**values, "fold": k}, PickedRows(source, rest(k)), PickedRows(source, parts[k]))
        for k in range(folds)
    ]


def _settled(plan: lanes.Plan, number: int, make_module: Any, base: TrainingConfig) -> lanes.Plan:
    """Return the plan with its settings sorted into those of module, loss and config."""
    try:
        parameters = dict(inspect.signature(make_module).parameters)
    except (TypeError, ValueError):  # C code tells no signature
        parameters = {}
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    taken = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    changed: dict[str, Any] = {"run.dir": f"sweep/{number}"}
    for name, value in plan.values.items():
        if name == "fold":
            continue
        if name in taken:
            plan.module[name] = value
        elif name.startswith("loss."):
            plan.loss[name.removeprefix("loss.")] = value
        elif draws.is_setting(FLAT_NAMES.get(name, name)):
            changed[FLAT_NAMES.get(name, name)] = value
        elif anything:
            plan.module[name] = value
        else:
            known = ", ".join(sorted(taken)) or "none"
            raise UserError(
                f"space: {name} is no argument of make_module (it has {known}), no `loss.` argument and no setting of "
                "the config (docs/reference.md)"
            )
    values = apply(base.model_dump(exclude_unset=True), changed)
    plan.number, plan.config = number, config_io.validate(TrainingConfig, values, f"run {number}")
    return plan


def _run(plan: lanes.Plan, member: Member, outcome: Any, metric: str, mode: str) -> SweepRun:
    history, pick = outcome.history, max if mode == "max" else min
    scored = history["val_history"] or history["train_history"][-1:]
    found = [metrics[metric] for metrics in scored if metric in metrics and math.isfinite(metrics[metric])]
    if history["train_history"] and not history["val_history"] and metric not in history["train_history"][-1]:
        raise UserError(f"evaluation.metric: {metric} needs validation data; without, the training loss is the score")
    error = "" if outcome.error is None else " ".join(str(outcome.error).split())
    state = "failed" if outcome.error is not None or not found else "pruned" if member.pruned else "complete"
    kept = member.best[0] if member.best is not None else member.state
    program, steps = outcome.program, member.record.step

    def weights() -> dict[str, np.ndarray]:
        if kept is None:
            raise UserError(f"run {plan.number} has failed before it had weights to keep: {error}")
        program.state = kept
        return bridge.state_dict(program.model())

    return SweepRun(plan.number, plan.values, pick(found) if found else math.nan, history, state, error, steps, weights)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
