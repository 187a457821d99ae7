"""Provide exit codes for all commands, and errors without a traceback if the user can fix them."""

import argparse
import contextlib
import errno
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from jaxtrain import redaction, strict_json
from jaxtrain.errors import UserError
from jaxtrain.runtime.preemption import INTERRUPTED, PREEMPTION
from jaxtrain.runtime.terminal import is_terminal, take_any_text

FAILED = 1
MISTAKES = {  # of a path that was given; anything else is the disk's or the machine's
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP,
    errno.ENAMETOOLONG,
}  # fmt: skip
BARS = ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")  # what switches theirs off
EXTRAS = {  # module -> the extra that brings it
    "torch": "torch",
    "sympy": "torch",
    "PIL": "images",
    "matplotlib": "tune",
    "optuna": "tune",
    "sqlalchemy": "tune",
    "plotly": "tune",
    "datasets": "text",
    "pandas": "text",
    "huggingface_hub": "text",
    "tokenizers": "text",
    "transformers": "text",
    "mlflow": "tracking",
    "wandb": "tracking",
    "lightning": "drop-in",
    "accelerate": "drop-in",
    "hydra": "hydra",
}


def parser(module: str, description: str, example: str) -> argparse.ArgumentParser:
    """An argument parser for `python -m <module>`, named from jaxtrain on where the first part is missing."""
    return argparse.ArgumentParser(
        prog=f"python -m {module if module.startswith('torch_bridge') else f'jaxtrain.{module}'}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def start(main: Callable[[], int | None]) -> NoReturn:
    """End this process with the exit code of `main`, a command of its own: its signals are heard from here on."""
    if sys.getfilesystemencoding().lower() != "utf-8":  # an ASCII locale: paths and settings may hold any letter
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONUTF8": "1"})
    PREEMPTION.listen(command=True)
    sys.exit(main())


def main(command: Callable[[argparse.Namespace], int | None], arguments: argparse.Namespace) -> int:
    """Run a command: 0, 1 for a failure, 2 with one clear message for the user's mistake.

    With --json, what it leaves in `arguments.found` is the one thing that goes to the output.
    """
    output = sys.stdout
    take_any_text()
    if getattr(arguments, "quiet", False) or not is_terminal(sys.stderr):
        os.environ.update(dict.fromkeys(BARS, "1"))  # before those libraries are imported
    try:
        with _elsewhere(arguments), _distrusting(arguments):
            code = command(arguments) or 0
        if getattr(arguments, "found", None) is not None and arguments.json:
            print(strict_json.dumps(arguments.found), file=output)
        return code
    except UserError as error:
        print(f"error: {redaction.mask(str(error))}", file=sys.stderr)
        if os.environ.get("JAXTRAIN_TRACEBACK"):
            raise
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()
        return FAILED
    except OSError as error:
        if error.errno is None or os.environ.get("JAXTRAIN_TRACEBACK"):
            raise
        place = f"{error.filename}: " if error.filename else ""
        gone = error.errno == errno.ENOENT and not place and not _in_a_folder()
        print(
            f"error: {place}{'the working directory is gone; cd to another' if gone else error.strerror}",
            file=sys.stderr,
        )
        return UserError.exit_code if error.errno in MISTAKES else FAILED
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS or os.environ.get("JAXTRAIN_TRACEBACK"):
            raise
        print(f"error: this needs {module}: pip install 'jaxtrain[{EXTRAS[module]}]'", file=sys.stderr)
        return UserError.exit_code
    except KeyboardInterrupt:  # with `start`, only one that somebody raises
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _distrusting(arguments: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Run no code that a stranger's run folder names, where the command has --trust and it is not given."""
    if getattr(arguments, "trust", True):
        return contextlib.nullcontext()
    from jaxtrain import trust  # imports pydantic: not before `start` hears the process's signals

    return trust.restricted()


def _in_a_folder() -> bool:
    """Tell whether the working directory still exists."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def _elsewhere(arguments: argparse.Namespace):
    """Direct a command's messages: discarded with --quiet, to stderr with --json."""
    if getattr(arguments, "quiet", False):
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    elif hasattr(arguments, "found") and arguments.json:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    else:
        yield


def quiet_jax() -> None:
    """Keep the accelerator libraries' start-up chatter off the console."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if not pathlib.Path("/dev/nvidiactl").exists():  # then the traceback of JAX's CUDA plugin tells nothing new
        logging.getLogger("jax._src.xla_bridge").addFilter(lambda record: "plugin" not in record.getMessage())


def add_run(p: argparse.ArgumentParser, builds: bool = True, required: bool = True) -> None:
    """builds: the command builds the folder's model, for which its config may name code (docs/security.md)."""
    p.add_argument("--run", required=required, metavar="DIR", help="run folder, such as runs/digits")
    if builds:
        p.add_argument("--trust", action="store_true", help="import the code that the run folder's config names")


def count(least: int = 1, most: int = 1_000_000_000) -> Callable[[str], int]:
    """The `type` of an argument that counts something."""

    def whole_number(text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,18}", text, re.ASCII) or not least <= int(text) <= most:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise argparse.ArgumentTypeError(f"got {shown!r}, wanted a whole number from {least} to {most:,}")
        return int(text)

    return whole_number


def output_file(text: str) -> str:
    """The `type` of an argument that names a file to write; refused before the work that it is to hold is done."""
    path = pathlib.Path(text)
    try:
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text} is a folder, wanted a file in it")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"there is no folder {path.parent}; make it first")
        path.exists()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{text[:80]}: {why}") from None
    return text


def output_folder(text: str) -> str:
    """The same for an argument that names a folder to write into, which is made where there is none."""
    try:
        place = pathlib.Path(text).expanduser().absolute()
        while not place.exists():
            place = place.parent
        if not place.is_dir():
            raise argparse.ArgumentTypeError(f"{place} is a file, wanted a folder")
        if not os.access(place, os.W_OK | os.X_OK):
            raise argparse.ArgumentTypeError(f"{place}: nothing can be written there")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{text[:80]}: {why}") from None
    return text


def add_checkpoint(p: argparse.ArgumentParser, default: str = "best") -> None:
    p.add_argument("--checkpoint", default=default, help=f"best, last or a step (default {default})")


def add_quiet(p: argparse.ArgumentParser) -> None:
    p.add_argument("--quiet", action="store_true", help="print warnings and errors only")


def add_json(p: argparse.ArgumentParser) -> None:
    """For a command that leaves its result in `arguments.found`."""
    p.add_argument("--json", action="store_true", help="print one JSON object; messages go to stderr")
    p.set_defaults(found=None)


Arguments = Sequence[str] | None
