"""Exceptions whose message is all that the user needs, and helpers that shorten other libraries' messages."""


class UserError(ValueError):
    """A mistake in a config, a file or a command line.

    Commands print its message without a traceback and exit with `exit_code`. The message says what is wrong and where,
    what was found and wanted, and what to do next.
    """

    exit_code = 2


class NoCounterpart(UserError):
    """An optimizer without a counterpart in JAX; torch itself can run it."""


class LateEdit(UserError):
    """A constant of a compiled step was changed some steps ago, so steps have run with its old value."""


class DataError(UserError):
    """Reading the data failed during the run: a sample raised, or a worker process died or hangs."""

    exit_code = 1


def one_line(error: BaseException) -> str:
    """Return an error's message on one line of at most 400 characters, or its class name if the message is empty."""
    return shortened(" ".join(str(error).split()), 400) or type(error).__name__


def shortened(text: object, most: int = 120) -> str:
    """Return the text, or its first `most` characters and its full length if it is longer."""
    text = str(text)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
