"""The exceptions whose message is all that the user needs, and how another library's becomes part of one."""


class UserError(ValueError):
    """A mistake in a config, a file or a command line.

    Commands print its message without a traceback and exit with `exit_code`. The message says what, where, got, wanted
    and what to do next.
    """

    exit_code = 2


class NoCounterpart(UserError):
    """An optimizer that follows no rule known here; torch itself can run it."""


class LateEdit(UserError):
    """A constant of a compiled step was changed some steps ago, and steps were made with its old values."""


class DataError(UserError):
    """Reading the data failed while the run was going: a sample raised, a worker process died or hangs."""

    exit_code = 1


def one_line(error: BaseException) -> str:
    """Return what an error says, on one line of at most 400 characters; its kind where it says nothing."""
    return shortened(" ".join(str(error).split()), 400) or type(error).__name__


def shortened(text: object, most: int = 120) -> str:
    """Return the text, or its first characters and how many there are."""
    text = str(text)
    return text if len(text) <= most else f"{text[:most]}... ({len(text):,} characters)"
