"""Read the lengths of a user's datasets and samplers."""

from typing import Any

from torch_bridge.sources import raised


def length_of(dataset: Any) -> int:
    """Return `len(dataset)`. Raises DataError if that raises."""
    try:
        return len(dataset)
    except BaseException as error:
        raise raised(error, "__len__", _named(dataset)) from error


def promised_length(stream: Any) -> int | None:
    """Return `len(stream)`, or None if it has no length: a stream of unknown length often inherits a `__len__`.

    Raises DataError if `len` raises anything but TypeError, NotImplementedError or AttributeError.
    """
    try:
        return len(stream)
    except (TypeError, NotImplementedError, AttributeError):
        return None
    except BaseException as error:
        raise raised(error, "__len__", _named(stream)) from error


def _named(value: Any) -> str:
    return f"the data's {type(value).__name__}"
