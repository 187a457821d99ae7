"""Bound the memory that every orbax save would otherwise keep for good.

tensorstore (0.1.72 to 0.1.86) never frees the JSON it hands to Python, 260 bytes a call. orbax (0.12) lets it complete
the spec of a local folder, which is complete already, once for every array of a save, and asks four times for its own
count of bytes: 100 kB a save of the digits ViT.
"""

import importlib
import pathlib
import sys
import traceback
import types


def spare() -> None:
    """Not to ask tensorstore for what is known. An orbax that asks in another way is left as it is."""
    try:
        orbax = importlib.import_module("orbax.checkpoint._src.serialization.tensorstore_utils")
        tensorstore = orbax.ts
        orbax.get_tensorstore_raw_bytes  # noqa: B018
    except (ImportError, AttributeError):
        return
    if isinstance(tensorstore, types.ModuleType):
        orbax.ts = _Except(tensorstore, KvStore=_Except(tensorstore.KvStore, Spec=_spec(tensorstore.KvStore.Spec)))
        orbax.get_tensorstore_raw_bytes = lambda *_: 0  # for a log line only


def _spec(original):
    local = lambda spec: isinstance(spec, dict) and spec.keys() == {"driver", "path"} and spec["driver"] == "file"
    return lambda spec: types.SimpleNamespace(to_json=lambda: dict(spec)) if local(spec) else original(spec)


def hush_late_writes() -> None:
    """After a write that failed, orbax ends its event loop while others are under way; tensorstore then shows one
    traceback for each of them, after the error that the caller gets and reports."""
    if getattr(sys.unraisablehook, "hushes", None) is not None:
        return
    shown = sys.unraisablehook

    def hook(told):
        error, frames = told.exc_value, traceback.extract_tb(told.exc_traceback)
        late = isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
        if not (late and all(pathlib.Path(frame.filename).parent.name == "asyncio" for frame in frames)):
            shown(told)

    hook.hushes = shown
    sys.unraisablehook = hook


class _Except:
    """Everything that `original` has, but for these."""

    def __init__(self, original, **replaced):
        self._original = original
        vars(self).update(replaced)

    def __getattr__(self, name: str):
        return getattr(self._original, name)
