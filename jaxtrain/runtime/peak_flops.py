"""Peak FLOP/s of accelerators (dense), from the vendors' data sheets, as the reference for utilisation."""

import jax.numpy as jnp

from jaxtrain.runtime.gpu_cards import GPUS

# part of jax's device_kind -> kind in gpu_cards. First match wins.
_KINDS = {
    "H100 PCIe": "h100-pcie",
    "H100 NVL": "h100-nvl",
    "H100": "h100",
    "H200": "h200",
    "GB200": "gb200",
    "B200": "b200",
    "A100": "a100",
    "RTX A6000": "a6000",
    "A10G": "a10g",
    "L40S": "l40s",
    "RTX 5090": "rtx-5090",
    "RTX PRO 6000": "rtx-pro-6000",
    "RTX 4090": "rtx-4090",
    "V100": "v100",
    "T4": "t4",
}
# of further ones: TFLOP/s in (bfloat16 or float16, TF32, float32 without tensor cores)
_PEAKS = {
    "A10": (125.0, 62.5, 31.2),
    "L40": (181.0, 90.5, 90.5),
    "L4": (121.0, 60.0, 30.3),
    "RTX 3090": (71.0, 35.6, 35.6),
    "TPU v4": (275.0, None, None),
    "TPU v5 lite": (197.0, None, None),
    "TPU v5": (459.0, None, None),
    "TPU v6 lite": (918.0, None, None),
}


def peak_flops(device_kind: str, compute: jnp.dtype, matmul: str = "default") -> float | None:
    """Return the FLOP/s of one device for products in dtype `compute`, None if unknown.

    matmul: `precision.matmul`; float32 products use TF32 unless it is "highest".
    """
    for half, single, plain in _peaks(device_kind):
        return half if jnp.dtype(compute).itemsize == 2 else plain if matmul == "highest" else single
    return None


def _peaks(device_kind: str) -> list[tuple[float | None, ...]]:
    known: list[tuple[float | None, ...]] = [
        (gpu.half, gpu.single, gpu.plain)
        for part, name in _KINDS.items()
        if part in device_kind
        for gpu in [GPUS[name]]
    ]
    own = [peaks for part, peaks in _PEAKS.items() if part in device_kind]
    return known or [tuple(peak and peak * 1e12 for peak in peaks) for peaks in own]
