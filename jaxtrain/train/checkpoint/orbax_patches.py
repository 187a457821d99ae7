"""Limit the memory that every orbax save would otherwise leak, and silence errors of late writes.

tensorstore (0.1.72 to 0.1.86) never frees the JSON that it returns to Python, 260 bytes per call. orbax (0.12) asks it
to complete the spec of a local folder, which is already complete, once for every array of a save, and asks four times
for its byte count: 100 kB per save of the digits ViT.
"""

import importlib
import pathlib
import sys
import traceback
import types


def spare() -> None:
    """Patch orbax not to ask tensorstore for known values. An orbax with other internals is left unpatched."""
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
    """Hide the tracebacks that tensorstore prints for writes still in progress when orbax closes its event loop after a
    failed write. The caller receives and reports the failed write's own error."""
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
    """Proxy of `original` with some attributes replaced."""

    def __init__(self, original, **replaced):
        self._original = original
        vars(self).update(replaced)

    def __getattr__(self, name: str):
        return getattr(self._original, name)
