"""torchvision's CUDA wheel beside a CPU build of torch."""

import subprocess
import sys

import pytest

from torch_bridge import torchvision_operators

pytest.importorskip("timm")  # brings torchvision

SCRIPT = """
from torch_bridge import torchvision_operators
torchvision_operators.declare_at_import()
import torchmetrics, torchvision
import torch
net = torchvision.models.squeezenet1_0(num_classes=2)
print(tuple(net(torch.zeros(1, 3, 64, 64)).shape))
"""


def test_what_imports_torchvision_can_be_imported_and_its_models_compute():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "(1, 2)\n"), done.stderr


def test_the_command_has_help_and_takes_no_argument(capsys):
    for argument, code, output in (("--help", 0, "import torchvision"), ("--all", 2, "unrecognized arguments: --all")):
        with pytest.raises(SystemExit) as stopped:
            torchvision_operators.main([argument])
        assert stopped.value.code == code
        assert output in "".join(capsys.readouterr())
