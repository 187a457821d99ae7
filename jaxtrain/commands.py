"""What every command shares: exit codes, and errors without tracebacks where the user can mend them."""

import argparse
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Sequence

from jaxtrain.errors import UserError

FAILED = 1


def parser(module: str, description: str, example: str) -> argparse.ArgumentParser:
    """An argument parser for `python -m jaxtrain.<module>`."""
    return argparse.ArgumentParser(
        prog=f"python -m jaxtrain.{module}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def main(command: Callable[[argparse.Namespace], int | None], arguments: argparse.Namespace) -> int:
    """Run a command: 0, 1 for a failure, 2 with one clear message for the user's mistake."""
    try:
        return command(arguments) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        if os.environ.get("JAXTRAIN_TRACEBACK"):
            raise
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return FAILED


def quiet_jax() -> None:
    """Keep the accelerator libraries' start-up chatter off the console."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not pathlib.Path("/dev/nvidiactl").exists():  # then the traceback of JAX's CUDA plugin tells nothing new
        logging.getLogger("jax._src.xla_bridge").addFilter(lambda record: "plugin" not in record.getMessage())


def add_run(p: argparse.ArgumentParser) -> None:
    p.add_argument("--run", required=True, metavar="DIR", help="a run folder, as runs/digits")


def add_checkpoint(p: argparse.ArgumentParser, default: str = "best") -> None:
    p.add_argument("--checkpoint", default=default, help=f"best, last or a step (default {default})")


Arguments = Sequence[str] | None
