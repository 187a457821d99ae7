"""GPUs that programs can be planned for: what XLA's compiler has to know of each, its peaks and its limits.

Peaks are dense (without sparsity) and, where two are told, those that sum in float32. Sources: NVIDIA's data sheets and
architecture papers, named at each GPU; memory is what nvidia-smi shows, as far as known. `measured` is True where a
prediction was compared with a run on the GPU itself; everything else is computed from data sheets alone.
"""

import dataclasses

GB, MIB = 10**9, 1 << 20
PCIE3, PCIE4, PCIE5 = 16e9, 32e9, 64e9  # B/s of 16 lanes in one direction
SHARED = {  # bytes of shared memory of a multiprocessor. Source: CUDA C++ Programming Guide, technical specifications
    (7, 0): 98_304, (7, 5): 65_536, (8, 0): 167_936, (8, 6): 102_400, (8, 9): 102_400, (9, 0): 233_472,
    (10, 0): 233_472, (12, 0): 102_400,
}  # fmt: skip
THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}  # of a multiprocessor; 2048 of all others. As above
UNITS = {(7, 0): 64, (7, 5): 64, (8, 0): 64}  # float32 units of a multiprocessor; 128 of all others. As above


@dataclasses.dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    cores: multiprocessors. memory: bytes. bandwidth: B/s. l2: bytes. clock: GHz. half: FLOP/s of bf16 or fp16 products.
    single: of float32 products (TF32 where there is such). plain: of float32 outside tensor cores. fp8: None without.
    nvlink: B/s in one direction to the other GPUs of the machine; None if PCIe joins them. network: B/s of its share
    between machines. together: GPUs of one machine. bf16: whether it has such products.
    """

    capability: tuple[int, int]
    cores: int
    memory: int
    bandwidth: float
    l2: int
    clock: float
    half: float
    single: float
    plain: float
    fp8: float | None
    nvlink: float | None
    pcie: float
    network: float
    together: int = 8
    bf16: bool = True
    measured: bool = False

    @property
    def link(self) -> float:
        """B/s between the GPUs of one machine; over PCIe, what is left of it in practice."""
        return self.nvlink or 0.875 * self.pcie

    @property
    def shared(self) -> int:
        return SHARED[self.capability]

    @property
    def limits(self) -> str:
        """Describe what it has, in a few words."""
        products = [name for name, has in (("bf16", self.bf16), ("fp8", self.fp8 is not None)) if has]
        joined = f"NVLink {self.nvlink / GB:.0f} GB/s" if self.nvlink else f"PCIe {self.pcie / GB:.0f} GB/s"
        return f"{'+'.join(products) or 'fp16 only'}, {self.memory / 2**30:.0f} GiB, {joined}"


def _of(capability, cores, memory, bandwidth, l2, clock, peaks, nvlink, pcie, network, **further) -> Gpu:
    half, single, plain = (peak * 1e12 for peak in peaks[:3])
    fp8 = None if peaks[3] is None else peaks[3] * 1e12
    links = None if nvlink is None else nvlink * 1e9
    return Gpu(
        capability, cores, memory, bandwidth * 1e9, int(l2 * MIB), clock, half, single, plain, fp8, links, pcie,
        network, **further,
    )  # fmt: skip


GPUS = {
    # NVIDIA Blackwell architecture brief and HGX B200 data sheet: 8 TB/s, 4.5 PFLOP/s dense fp8, NVLink 1.8 TB/s
    "b200": _of((10, 0), 148, 183_359 * MIB, 8000, 126, 1.97, (2250, 1125, 75, 4500), 900, PCIE5, 50e9),
    # GB200 NVL72 data sheet, per GPU: 186 GB, 8 TB/s, 5 PFLOP/s dense fp8; a tray has four GPUs, NVLink joins 72
    "gb200": _of((10, 0), 152, 189_471 * MIB, 8000, 126, 2.06, (2500, 1250, 80, 5000), 900, PCIE5, 50e9, together=72),
    # H200 data sheet; 21.1 ms of the fMRI autoencoder's step were measured on one
    "h200": _of(
        (9, 0), 132, 151_397_597_184, 4800, 50, 1.98, (989.4, 494.7, 66.9, 1978.9), 450, PCIE5, 50e9, measured=True
    ),
    # H100 data sheet: SXM5, PCIe and NVL. Of the two cards, bridges (600 GB/s) join pairs alone, so PCIe counts here
    "h100": _of((9, 0), 132, 85_028_896_768, 3350, 50, 1.98, (989.4, 494.7, 66.9, 1978.9), 450, PCIE5, 50e9),
    "h100-pcie": _of((9, 0), 114, 81_559 * MIB, 2039, 50, 1.755, (756, 378, 51, 1513), None, PCIE5, 25e9),
    "h100-nvl": _of((9, 0), 132, 95_830 * MIB, 3938, 50, 1.785, (835, 417.5, 60, 1671), None, PCIE5, 25e9),
    # A100 data sheet, SXM4 with 80 and with 40 GB
    "a100": _of((8, 0), 108, 85_098_971_136, 2039, 40, 1.41, (312, 156, 19.5, None), 300, PCIE4, 25e9),
    "a100-40": _of((8, 0), 108, 40_960 * MIB, 1555, 40, 1.41, (312, 156, 19.5, None), 300, PCIE4, 25e9),
    # RTX A6000 data sheet
    "a6000": _of((8, 6), 84, 51_041_271_808, 768, 6, 1.80, (154.8, 77.4, 38.7, None), None, PCIE4, 12.5e9),
    # A10G data sheet (AWS g5): 35 TFLOP/s, 600 GB/s
    "a10g": _of((8, 6), 80, 23_028 * MIB, 600, 6, 1.71, (70, 35, 35, None), None, PCIE4, 12.5e9),
    # L4 and L40S data sheets
    "l4": _of((8, 9), 58, 23_034 * MIB, 300, 48, 2.04, (121, 60, 30.3, 242), None, PCIE4, 12.5e9),
    "l40s": _of((8, 9), 142, 47_697_362_944, 864, 96, 2.52, (362, 181, 91.6, 733), None, PCIE4, 12.5e9),
    # Ada GPU architecture paper: tensor cores of GeForce sum fp16 in float32 at half their rate
    "rtx-4090": _of((8, 9), 128, 24_564 * MIB, 1008, 72, 2.52, (165.2, 82.6, 82.6, 330.3), None, PCIE4, 12.5e9),
    # RTX Blackwell GPU architecture paper: GeForce RTX 5090 and RTX PRO 6000
    "rtx-5090": _of((12, 0), 170, 32_607 * MIB, 1792, 96, 2.41, (209.5, 104.8, 104.8, 419), None, PCIE5, 12.5e9),
    "rtx-pro-6000": _of((12, 0), 188, 97_887 * MIB, 1792, 128, 2.6, (503.8, 251.9, 125, 1007.6), None, PCIE5, 25e9),
    # Tesla T4 and V100 data sheets: no bf16, no TF32
    "t4": _of((7, 5), 40, 15_360 * MIB, 320, 4, 1.59, (65, 8.1, 8.1, None), None, PCIE3, 6.25e9, bf16=False),
    "v100": _of((7, 0), 80, 16_384 * MIB, 900, 6, 1.53, (125, 15.7, 15.7, None), 150, PCIE3, 12.5e9, bf16=False),
}
