"""The exceptions whose message is all that the user needs."""


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
