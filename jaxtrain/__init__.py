"""Train in JAX, live in PyTorch. The public names load when first used."""

from jaxtrain.lazy import lazy_attributes
from jaxtrain.runtime import plugin_messages

_NAMES = {
    "train.trainer": ("Trainer",),
    "config": ("TrainingConfig",),
    "config_io": ("load_config",),
    "task": ("Task", "Loss", "Statistics"),
    "errors": ("UserError",),
    "compiled_step": ("compile", "compile_many"),
    "metrics": ("WholeSplit",),
    "runtime.launch": ("setup_distributed",),
}
__all__ = [name for names in _NAMES.values() for name in names]
__getattr__ = lazy_attributes(__name__, _NAMES)

plugin_messages.hide_where_no_gpu_is()


def __dir__():
    return __all__
