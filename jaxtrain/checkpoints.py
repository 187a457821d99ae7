"""List, verify or prune checkpoints: `python -m jaxtrain.checkpoints list|verify|prune --run runs/digits`."""

import argparse
import datetime
import json
import pathlib

from jaxtrain import commands


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "checkpoints",
        "List the checkpoints of a run, verify every byte of them, or delete what is not to be kept.",
        "python -m jaxtrain.checkpoints verify --run runs/digits",
    )
    p.add_argument("action", choices=("list", "verify", "prune"))
    commands.add_run(p, builds=False)
    p.add_argument(
        "--keep-last", type=commands.count(), metavar="N", help="prune: newest to keep (default checkpoint.keep_last)"
    )
    p.add_argument(
        "--keep-best", type=commands.count(0), metavar="N", help="prune: best to keep (default checkpoint.keep_best)"
    )
    p.add_argument("--json", action="store_true", help="print one JSON object per line")
    return commands.main(run, p.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    commands.quiet_jax()
    from jaxtrain.train import run_dir

    folder = pathlib.Path(arguments.run)
    checkpoints = run_dir.open_checkpoints(folder)
    if arguments.action == "prune":
        rows = _prune(folder, checkpoints, arguments.keep_last, arguments.keep_best)
    else:
        rows = _rows(checkpoints, verified=arguments.action == "verify")
    for row in rows:
        print(json.dumps(row) if arguments.json else row["line"])
    if not rows and not arguments.json:
        print("nothing to delete" if arguments.action == "prune" else f"{checkpoints.folder}: no checkpoint yet")
    return commands.FAILED if any(row.get("problems") for row in rows) else 0


def _rows(checkpoints, verified: bool) -> list[dict]:
    from jaxtrain.errors import UserError

    rows, best = [], checkpoints.best()
    for step in checkpoints.steps():
        folder = checkpoints.folder / str(step)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        saved = datetime.datetime.fromtimestamp(folder.stat().st_mtime).isoformat(" ", "seconds")
        row = {"step": step, "bytes": size, "saved": saved, "best": step == best}
        try:
            row["metrics"] = checkpoints.meta(step)["metrics"]
        except UserError as error:
            row["problems"] = [str(error)]
        if verified:
            row["problems"] = checkpoints.problems(step)
        rows.append(row | {"line": _line(row, verified)})
    unfinished = [path for path in sorted(checkpoints.folder.glob("*.*")) if path.is_dir()]
    return rows + [{"folder": path.name, "line": f"{path.name:>10}  unfinished or set aside"} for path in unfinished]


def _line(row: dict, verified: bool) -> str:
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in row.get("metrics", {}).items())
    line = f"{row['step']:>10}  {row['bytes'] / 1e6:>10.2f} MB  {row['saved']}  {metrics}"
    if row["best"]:
        line += "  (best)"
    if row.get("problems"):
        return line + "  DAMAGED: " + "; ".join(row["problems"])
    return line + ("  whole" if verified else "")


def _prune(folder: pathlib.Path, checkpoints, keep_last: int | None, keep_best: int | None) -> list[dict]:
    from jaxtrain.errors import UserError
    from jaxtrain.runtime.folder_lock import FolderLock

    for name, value, least in (("--keep-last", keep_last, 1), ("--keep-best", keep_best, 0)):
        if value is not None and value < least:
            raise UserError(f"{name} {value}: wanted at least {least}")
    with FolderLock(folder):  # not while a run saves here
        return [
            {"folder": name, "line": f"deleted {checkpoints.folder / name}"}
            for name in checkpoints.prune(keep_last, keep_best)
        ]


if __name__ == "__main__":
    commands.start(main)
