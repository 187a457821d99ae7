"""Write an HTML report of one or more runs: `python -m jaxtrain.report --run runs/digits [--run runs/other]`."""

import argparse
import pathlib

from jaxtrain import commands


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "report",
        "Write one self-contained HTML page: curves, speed, config, environment, evaluations and pictures.",
        "python -m jaxtrain.report --run runs/a --run runs/b --output compared.html",
    )
    p.add_argument(
        "--run", required=True, action="append", metavar="DIR", help="run folder; repeat to compare several runs"
    )
    p.add_argument(
        "--output",
        type=commands.output_file,
        metavar="F.html",
        help="output file (default: report.html in the first run's folder)",
    )
    p.add_argument(
        "--watch", action="store_true", help="serve the page on this machine while the runs go on, until Ctrl-C"
    )
    p.add_argument(
        "--port", type=commands.count(0, 65535), metavar="N", help="with --watch: the port (default 6007; 0: any free)"
    )
    commands.add_quiet(p)
    commands.add_json(p)
    arguments = p.parse_args(argv)
    if arguments.watch and arguments.output:
        p.error("--watch writes no file; leave --output out")
    if arguments.port is not None and not arguments.watch:
        p.error("--port is for --watch")
    return commands.main(watch if arguments.watch else run, arguments)


def run(arguments: argparse.Namespace) -> None:
    from jaxtrain.reporting import page, records
    from jaxtrain.runtime import plain_files

    read = [records.read(folder) for folder in arguments.run]
    if not arguments.output:
        plain_files.refuse_links(read[0].folder)
    output = pathlib.Path(arguments.output or read[0].folder / "report.html")
    print(f"wrote {page.write(read, output)}")
    arguments.found = {"runs": [str(record.folder) for record in read], "report": str(output)}


def watch(arguments: argparse.Namespace) -> None:
    from jaxtrain.reporting import live

    with live.Server(arguments.run, live.PORT if arguments.port is None else arguments.port) as server:
        print(f"{server.address} shows the report and follows the runs; end with Ctrl-C", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    commands.start(main)
