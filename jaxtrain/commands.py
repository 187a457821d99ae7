"""Shared code of all commands: arguments, exit codes, and errors without a traceback if the user can fix them."""

import argparse
import contextlib
import errno
import os
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from jaxtrain import redaction, strict_json
from jaxtrain.errors import UserError, file_sentence, install
from jaxtrain.runtime.preemption import INTERRUPTED, PREEMPTION
from jaxtrain.runtime.terminal import is_terminal, take_any_text

COMMANDS = {  # of `jaxtrain COMMAND`
    "run": "train the task of a YAML config",
    "evaluate": "compute the metrics of a checkpoint on a split",
    "export": "write the weights as a torch state dict",
    "report": "write an HTML report of one or more runs",
    "checkpoints": "list, verify or prune a run's checkpoints",
    "debug": "replay a step and name the first module whose result is not finite",
    "tune": "search hyper-parameters",
    "lr_find": "run a learning-rate range test",
    "plan": "predict memory and communication on GPUs you don't have",
    "verify": "compare the export in torch with JAX, layer by layer",
    "generate": "continue a prompt with a trained language model",
    "torchrun": "torchrun with the exit code of its processes",
    "completion": "print a script that completes commands and options in your shell",
    "doctor": "report devices, precision support and versions",
}
ELSEWHERE = {"verify": "torch_bridge.verify", "torchrun": "torch_bridge.torchrun"}
FAILED = 1
MISTAKES = {  # errors of a path the user gave; any other is a fault of the disk or the machine
    errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP,
    errno.ENAMETOOLONG, errno.ENOTEMPTY, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS,
}  # fmt: skip
BARS = ("HF_DATASETS_DISABLE_PROGRESS_BARS", "HF_HUB_DISABLE_PROGRESS_BARS")  # they switch progress bars off
EXTRAS = {  # module -> the extra that installs it
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
    """Return an argument parser for `python -m <module>`. module: a torch_bridge module, else relative to jaxtrain."""
    return argparse.ArgumentParser(
        prog=f"python -m {module if module.startswith('torch_bridge') else f'jaxtrain.{module}'}",
        description=description,
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def start(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` as this process's command and exit with its code. Signals are handled from here on."""
    if sys.getfilesystemencoding().lower() != "utf-8":  # restart in UTF-8 mode: paths may hold any character
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | {"PYTHONUTF8": "1"})
    PREEMPTION.listen(command=True)
    sys.exit(main())


def main(command: Callable[[argparse.Namespace], int | None], arguments: argparse.Namespace) -> int:
    """Run a command; return 0, 1 for a failure, or 2 for the user's mistake, which is reported in one message.

    With --json, only the result that the command leaves in `arguments.found` goes to stdout.
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
        print(f"error: {redaction.mask(_sentence(error))}", file=sys.stderr)
        if os.environ.get("JAXTRAIN_TRACEBACK"):
            raise
        return UserError.exit_code if error.errno in MISTAKES else FAILED
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS or os.environ.get("JAXTRAIN_TRACEBACK"):
            raise
        print(f"error: this needs {module}: {install(EXTRAS[module])}", file=sys.stderr)
        return UserError.exit_code
    except KeyboardInterrupt:  # with `start`, never from a signal: only if code raises it
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _distrusting(arguments: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Return a context that runs no untrusted code named by a run folder, if the command has --trust and it is off."""
    if getattr(arguments, "trust", True):
        return contextlib.nullcontext()
    from jaxtrain import trust  # imports pydantic, which is slow: not before `start` handles signals

    return trust.restricted()


def _sentence(error: OSError) -> str:
    """Return an error of the file system as one sentence."""
    if error.errno == errno.ENOENT and not error.filename and not _in_a_folder():
        return "the working directory is gone; cd to another"
    if error.errno == errno.ENOENT and "temporary directory" in str(error.strerror):  # tempfile's, of all it has tried
        return f"{error.strerror}; make room in one of them, or name another folder in TMPDIR"
    return file_sentence(error)


def _in_a_folder() -> bool:
    """Return True if the working directory still exists."""
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
    """Keep the accelerator libraries' start-up messages off the console."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def add_run(p: argparse.ArgumentParser, builds: bool = True, required: bool = True) -> None:
    """Add --run. builds: the command builds the folder's model, so add --trust for the code that its config may name
    (docs/security.md)."""
    p.add_argument("--run", required=required, metavar="DIR", help="run folder, such as runs/digits")
    if builds:
        p.add_argument("--trust", action="store_true", help="import the code that the run folder's config names")


def count(least: int = 1, most: int = 1_000_000_000) -> Callable[[str], int]:
    """Return the argparse `type` of a whole number from `least` to `most`."""

    def whole_number(text: str) -> int:
        if not re.fullmatch("-?[0-9]{1,18}", text, re.ASCII) or not least <= int(text) <= most:
            shown = text if len(text) <= 40 else f"{text[:40]}..."
            raise argparse.ArgumentTypeError(f"got {shown!r}, wanted a whole number from {least} to {most:,}")
        return int(text)

    return whole_number


def output_file(text: str) -> str:
    """Check an output file's path, as an argparse `type`, so that a bad path is refused before any work is done."""
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
    """Check an output folder's path, as an argparse `type`. The folder need not exist; it will be created."""
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
    """Add --json to a command that leaves its result in `arguments.found`."""
    p.add_argument("--json", action="store_true", help="print one JSON object; messages go to stderr")
    p.set_defaults(found=None)


Arguments = Sequence[str] | None
