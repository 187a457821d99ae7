"""Ask datasets and samplers of the user's for their length."""

from typing import Any

from torch_bridge.sources import raised


def length_of(dataset: Any) -> int:
    """Return `len(dataset)`. Raises DataError where that raises."""
    try:
        return len(dataset)
    except BaseException as error:
        raise raised(error, "__len__", _named(dataset)) from error


def promised_length(stream: Any) -> int | None:
    """Return `len(stream)`, or None where it has none: a stream of unknown length often inherits one.

    Raises DataError where it raises anything but that it has none.
    """
    try:
        return len(stream)
    except (TypeError, NotImplementedError, AttributeError):
        return None
    except BaseException as error:
        raise raised(error, "__len__", _named(stream)) from error


def _named(value: Any) -> str:
    return f"the data's {type(value).__name__}"
