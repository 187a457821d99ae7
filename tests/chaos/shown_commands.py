"""The commands of README and docs, at small sizes, one after the other: `python -m tests.chaos.shown_commands`."""

import argparse
import contextlib
import io
import os
import sys
import tempfile
import time

from tests.shown_commands import LONG, RUN, in_turn


def main(argv: list[str] | None = None) -> int:
    chains = {**RUN, **LONG}
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--chains", nargs="*", choices=chains, default=list(chains), metavar="NAME")
    failed = count = 0
    for chain in p.parse_args(argv).chains:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            sys.path.insert(0, folder)
            running, said = in_turn(chain, chains[chain]), io.StringIO()
            for _ in chains[chain]:
                started = time.monotonic()
                with contextlib.redirect_stdout(said):
                    command, code = next(running)
                count, failed = count + 1, failed + (code != 0)
                print(f"{chain}: {time.monotonic() - started:5.1f} s, exit code {code}: {command}", flush=True)
            os.chdir("/")
    print(f"{count - failed} of {count} commands end with 0")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
