"""Bound the memory that every orbax save would otherwise keep for good.

tensorstore (0.1.72 to 0.1.86) never frees the JSON it hands to Python, 260 bytes a call. orbax (0.12) lets it complete
the spec of a local folder, which is complete already, once for every array of a save, and asks four times for its own
count of bytes: 100 kB a save of the digits ViT.
"""

import importlib
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


class _Except:
    """Everything that `original` has, but for these."""

    def __init__(self, original, **replaced):
        self._original = original
        vars(self).update(replaced)

    def __getattr__(self, name: str):
        return getattr(self._original, name)
