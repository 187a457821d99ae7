"""Import torchvision's wheel from PyPI, which is built for CUDA, beside a CPU build of torch.

Its kernels do not load there, and `import torchvision` (so timm, lightning, torchmetrics, transformers) fails because
two operators are missing. `declare_torchvision` declares them, without kernels; models do without. The better cure is
torchvision's own CPU wheel: pip install torchvision --index-url https://download.pytorch.org/whl/cpu
"""

import argparse
import importlib.util
import pathlib
import re
import sys
import sysconfig
from collections.abc import Sequence
from typing import Any

PTH = "torchvision_operators.pth"  # in an environment's site-packages: every Python that starts there runs its line
_declared: list[Any] = []


def declare_torchvision() -> None:
    """Declare torchvision's two operators, unless its build is that of torch, or there is none."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _declared or not _is_for_cuda(pathlib.Path(spec.origin)):
        return
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    _declared.append(torch.library.Library("torchvision", "FRAGMENT"))
    for name in ("nms", "qnms"):
        _declared[0].define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _is_for_cuda(package: pathlib.Path) -> bool:
    """Return True for torchvision's CUDA build. package: its __init__.py."""
    version = package.with_name("version.py")
    return version.is_file() and re.search(r"__version__ = '[^']*\+cu", version.read_text()) is not None


class _BeforeTorchvision:
    """Finder that declares the operators when torchvision is about to be imported, and finds nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision" and self in sys.meta_path:
            sys.meta_path.remove(self)
            declare_torchvision()


def declare_at_import() -> None:
    """Declare the operators once torchvision is imported; costs nothing before."""
    sys.meta_path.insert(0, _BeforeTorchvision())


def main(argv: Sequence[str] | None = None) -> int:
    """Let every Python of this environment declare them if torchvision is not torch's build (`make` calls this)."""
    argparse.ArgumentParser(
        prog="python -m torch_bridge.torchvision_operators",
        description="Let `import torchvision` work in every Python of this environment where torchvision's build is "
        "for CUDA and torch's is not: declare the two operators that it lacks. Elsewhere, take the declaration back.",
    ).parse_args(argv)
    file = pathlib.Path(sysconfig.get_path("purelib")) / PTH
    declare_torchvision()
    if _declared:
        file.write_text("import torch_bridge.torchvision_operators as t; t.declare_at_import()\n")
        print(f"torchvision is a CUDA build beside a CPU build of torch: {file} declares its operators")
    else:
        file.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
