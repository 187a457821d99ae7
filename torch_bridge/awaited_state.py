"""Torch optimizer state whose newest values are elsewhere: reading or replacing it fetches them first."""

import functools
from collections.abc import Callable
from typing import Any


class AwaitedState:
    """Call `fetch` before `optimizer.state` is used. fetch: must end by calling `release`."""

    def __init__(self, optimizer: Any, fetch: Callable[[], None]):
        self._optimizer, self._fetch = optimizer, fetch
        self._kind: type | None = None

    def hold(self) -> None:
        """Mark the state as out of date from now on."""
        self._kind = type(self._optimizer)
        vars(self._optimizer)["_fetch_state"] = self._fetch
        self._optimizer.__class__ = _awaited(self._kind)

    def release(self) -> None:
        """Mark the state as up to date: restore the optimizer's own class."""
        if self._kind is not None:
            self._optimizer.__class__, self._kind = self._kind, None
            del self._optimizer._fetch_state


@functools.cache
def _awaited(kind: type) -> type:
    def get(self: Any) -> Any:
        self._fetch_state()
        return self.state

    def put(self: Any, value: Any) -> None:
        self._fetch_state()
        self.state = value

    def reduce(self: Any, protocol: Any) -> Any:
        self._fetch_state()
        return self.__reduce_ex__(protocol)

    own = {"__module__": kind.__module__, "state": property(get, put), "__reduce_ex__": reduce}
    return type(kind.__name__, (kind,), own)
