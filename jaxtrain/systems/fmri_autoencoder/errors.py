"""UserErrors that are also what the original raises in their place."""

from jaxtrain.errors import UserError


class UnknownOption(UserError, TypeError):
    """A keyword that a class of the original does not take."""


class OtherModel(UserError, RuntimeError):
    """A checkpoint whose weights do not fit the model."""


class MissingFile(UserError, FileNotFoundError):
    """A file of the recording that is not there."""
