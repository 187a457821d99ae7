"""The one exception that means "the user can mend this"."""


class UserError(ValueError):
    """A mistake in a config, a file or a command line.

    Commands print its message without a traceback and exit with code 2. The message says what, where, got, wanted
    and what to do next.
    """
