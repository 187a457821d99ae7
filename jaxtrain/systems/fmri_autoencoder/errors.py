"""UserErrors that also derive from the exception that the original raises in the same case."""

from jaxtrain.errors import UserError


class UnknownOption(UserError, TypeError):
    """A keyword that a class of the original does not accept."""


class OtherModel(UserError, RuntimeError):
    """A checkpoint whose weights do not fit the model."""


class MissingFile(UserError, FileNotFoundError):
    """A missing file of the recording."""
