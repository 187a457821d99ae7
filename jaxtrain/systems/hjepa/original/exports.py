"""Files of an HJEPA's features for other runtimes: TorchScript, ONNX and dynamic int8, as in the original."""

import importlib.util
import pathlib
import warnings
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.systems.hjepa.original.features import OptimizedHJEPA
from torch_bridge.atomic_file import replacing

NAMES = ("images", "features")


def export_to_torchscript(
    model: Any,
    output_path: str | pathlib.Path,
    example_input: torch.Tensor | None = None,
    hierarchy_level: int = 0,
    optimize: bool = True,
) -> torch.jit.ScriptModule:
    """Trace the features of a level for any number of images, write the program and return it.

    model: an HJEPA or an OptimizedHJEPA, whose level stays. example_input: images [batch, channel, S, S], by default
    zeros of the encoder's size. optimize: freeze the weights into the program.
    """
    module, images = _features(model, hierarchy_level, example_input)
    return _traced(module, images, output_path, optimize)


def export_to_onnx(
    model: Any,
    output_path: str | pathlib.Path,
    example_input: torch.Tensor | None = None,
    hierarchy_level: int = 0,
    opset_version: int = 14,
    dynamic_axes: bool = True,
) -> None:
    """Write the features of a level as ONNX: `images` -> `features`. dynamic_axes: of any number of images."""
    if importlib.util.find_spec("onnx") is None:
        raise ImportError("torch writes ONNX files with onnx: pip install onnx")
    module, images = _features(model, hierarchy_level, example_input)
    axes = {name: {0: "batch"} for name in NAMES} if dynamic_axes else None
    with replacing(pathlib.Path(output_path)) as aside, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the exporter that knows opset 14
        torch.onnx.export(
            module,
            (images,),
            str(aside),
            input_names=NAMES[:1],
            output_names=NAMES[1:],
            dynamic_axes=axes,
            opset_version=opset_version,
            dynamo=False,
        )


def quantize_model(
    model: Any,
    output_path: str | pathlib.Path,
    hierarchy_level: int = 0,
    quantization_type: str = "dynamic",
    calibration_data: Any = None,
) -> torch.jit.ScriptModule:
    """Write the features of a level as TorchScript with Linear weights in int8, for CPUs; return the program.

    Raises ValueError for another type than dynamic, which needs no calibration_data.
    """
    if quantization_type != "dynamic" or calibration_data is not None:
        raise UserError(f"quantization_type={quantization_type!r}: known is dynamic, which takes no calibration_data")
    module, images = _features(model, hierarchy_level, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls int8 tensors old
        smaller = torch.ao.quantization.quantize_dynamic(module.cpu(), {torch.nn.Linear}, dtype=torch.qint8)
    return _traced(smaller, images.cpu(), output_path, optimize=False)


def _features(model: Any, level: int, example: torch.Tensor | None) -> tuple[OptimizedHJEPA, torch.Tensor]:
    module = model if isinstance(model, OptimizedHJEPA) else OptimizedHJEPA(model, level)
    if example is None:
        patches = module.encoder.vit.patch_embed
        weight = patches.proj.weight
        example = torch.zeros(1, weight.shape[1], *patches.img_size, dtype=weight.dtype, device=weight.device)
    return module.eval(), example


def _traced(module: torch.nn.Module, images: torch.Tensor, path: Any, optimize: bool) -> torch.jit.ScriptModule:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit's
        program = torch.jit.trace(module, images)
        program = torch.jit.freeze(program) if optimize else program
        with replacing(pathlib.Path(path)) as aside:
            torch.jit.save(program, str(aside))
    return program
