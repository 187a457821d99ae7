"""Libraries that come with the extra `jaxtrain[fmri]`."""

import importlib
from types import ModuleType

from jaxtrain.errors import UserError, install


def require(module: str, purpose: str) -> ModuleType:
    """Import a module. Raises UserError that names the extra to install if it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise UserError(
            f"{module} is needed {purpose} and is not installed; install the extra: {install('fmri')}"
        ) from None
