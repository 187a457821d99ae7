"""Peak FLOP/s of accelerators (dense), from the vendors' data sheets, as the reference for utilisation."""

import jax.numpy as jnp

# part of jax's device_kind -> TFLOP/s in (bfloat16 or float16, TF32, float32 without tensor cores). First match wins.
_PEAKS = {
    "H100 PCIe": (756.0, 378.0, 51.0),
    "H100 NVL": (835.0, 417.5, 60.0),
    "H100": (989.4, 494.7, 66.9),
    "H200": (989.4, 494.7, 66.9),
    "GH200": (989.4, 494.7, 66.9),
    "B200": (2250.0, 1125.0, 75.0),
    "A100": (312.0, 156.0, 19.5),
    "RTX A6000": (154.8, 77.4, 38.7),
    "A10G": (70.0, 35.0, 35.0),
    "A10": (125.0, 62.5, 31.2),
    "L40S": (362.0, 181.0, 91.6),
    "L40": (181.0, 90.5, 90.5),
    "L4": (121.0, 60.0, 30.3),
    "RTX 5090": (209.5, 104.8, 104.8),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 3090": (71.0, 35.6, 35.6),
    "V100": (125.0, 15.7, 15.7),
    "T4": (65.0, 8.1, 8.1),
    "TPU v4": (275.0, None, None),
    "TPU v5 lite": (197.0, None, None),
    "TPU v5": (459.0, None, None),
    "TPU v6 lite": (918.0, None, None),
}


def peak_flops(device_kind: str, compute: jnp.dtype, matmul: str = "default") -> float | None:
    """Return the FLOP/s of one device for products in dtype `compute`, None if unknown.

    matmul: `precision.matmul`; float32 products use TF32 unless it is "highest".
    """
    for part, (half, tf32, full) in _PEAKS.items():
        if part in device_kind:
            peak = half if jnp.dtype(compute).itemsize == 2 else full if matmul == "highest" else tf32
            return peak * 1e12 if peak else None
    return None
