"""A pure-JAX run works with torch absent."""

import json
import subprocess
import sys

BLOCKED = """
import importlib.machinery, sys
find = importlib.machinery.PathFinder.find_spec
hide = lambda name, *rest: None if name.split(".")[0] == "torch" else find(name, *rest)
importlib.machinery.PathFinder.find_spec = hide
from jaxtrain import run
sys.exit(run.main(sys.argv[1:]))
"""


def test_digits_train_and_export_without_torch(tmp_path):
    arguments = ["--config", "configs/digits_tiny.yaml", "data.source=numpy", f"run.dir={tmp_path}"]
    done = subprocess.run([sys.executable, "-c", BLOCKED, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "exports" / "best.safetensors").is_file()
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] > 0
