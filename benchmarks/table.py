"""Results of `benchmarks.compare` as a table: `python -m benchmarks.table --output F.md F.json ...`."""

import json
import pathlib
import statistics

from benchmarks import parser

HEAD = "| system | size | precision | batch | processes | against | jaxtrain, samples/s | torch, samples/s | ratio |"
RULE = "|---|---|---|---|---|---|---|---|---|"


def main() -> None:
    p = parser(__doc__, figures=False)
    p.add_argument("results", nargs="+", type=pathlib.Path, help="JSON files that benchmarks.compare wrote")
    p.add_argument("--output", type=pathlib.Path, help="a new results page")
    p.add_argument(
        "--predicted", type=pathlib.Path, help="JSON of benchmarks.predict, to stand beside what was measured"
    )
    arguments = p.parse_args()
    read = [json.loads(path.read_text()) for path in arguments.results]
    results = [result for entry in read for result in (entry if isinstance(entry, list) else [entry])]
    text = table(results)
    print(text)
    if arguments.predicted:
        print("", *beside(results, json.loads(arguments.predicted.read_text())), sep="\n")
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(page(results))


def table(results: list[dict]) -> str:
    return "\n".join([HEAD, RULE, *map(_row, results), *_means(results)])


def beside(results: list[dict], predicted: dict[str, dict]) -> list[str]:
    """Milliseconds of jaxtrain's step, measured and predicted, where there are both."""
    rows = {r["system"]: (r["jaxtrain"]["ms"], predicted[r["system"]]["predicted"]["ms"]) for r in results
            if r["system"] in predicted and "ms" in r.get("jaxtrain", {})}  # fmt: skip
    head = ["| system | measured, ms | predicted, ms |", "|---|---|---|"]
    return [*head, *(f"| {name} | {measured:.2f} | {made:.2f} |" for name, (measured, made) in rows.items())]


def page(results: list[dict]) -> str:
    first = results[0]
    versions = f"{first['device']}; jax {first['jax']}, torch {first['torch']}"
    commands = "\n".join(
        f"python -m benchmarks.compare --system {r['system']} --size {r['size']} --peer {r['peer']} "
        f"--precision {r['precision']} --batch {r['batch']} --devices {r['processes']}"
        for r in results
    )
    note = f"{versions}. Medians of alternating rounds, with the spread."
    return f"# jaxtrain against torch\n\n{note}\n\n{table(results)}\n\n```\n{commands}\n```\n"


def _row(result: dict) -> str:
    head = "| {system} | {size} | {precision} | {batch} | {processes} | {peer} |".format(**result)
    if result["ratio"] is None:
        return f"{head} | | the losses differ by {result['largest_loss_difference']:.1e} |"
    ours, theirs = result["jaxtrain"], result[result["peer"]]
    spread = f"{result['ratio']:.2f} ({result['lowest']:.2f} to {result['highest']:.2f})"
    return f"{head} {ours['median']:,.1f} | {theirs['median']:,.1f} | {spread} |"


def _means(results: list[dict]) -> list[str]:
    """The geometric mean of the ratios against each peer."""
    rows = []
    for peer, processes in dict.fromkeys((r["peer"], r["processes"]) for r in results):
        ratios = [r["ratio"] for r in results if (r["peer"], r["processes"]) == (peer, processes) and r["ratio"]]
        if len(ratios) > 1:
            mean = statistics.geometric_mean(ratios)
            rows.append(f"| geometric mean | | | | {processes} | {peer} | | | {mean:.2f} |")
    return rows


if __name__ == "__main__":
    main()
