"""Start-up: lazy imports, the compile cache, the doctor."""

import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import pytest

from jaxtrain import doctor
from jaxtrain.runtime import compile_cache

HEAVY = ("jax", "flax", "torch", "numpy", "pydantic", "wandb", "mlflow", "matplotlib", "tensorboardX")


def loaded_after(statement):
    code = f"import sys; {statement}; print([m for m in {HEAVY!r} if m in sys.modules])"
    return eval(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def test_import_jaxtrain_loads_nothing_heavy():
    assert loaded_after("import jaxtrain") == []


@pytest.mark.parametrize("name", ["compile", "Trainer"])
def test_the_first_use_of_a_name_draws_no_random_numbers(name):
    """A loop sets its seeds before: flax's imports draw from Python's and NumPy's generators."""
    code = """import random, numpy, jaxtrain
random.seed(0), numpy.random.seed(0)
{}
print(random.random(), numpy.random.rand())"""
    drawn = [
        subprocess.run([sys.executable, "-c", code.format(use)], capture_output=True, text=True, check=True).stdout
        for use in ("", f"jaxtrain.{name}")
    ]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("command", ["run", "evaluate", "export", "lr_find", "doctor"])
def test_help_loads_nothing_heavy(command):
    code = f"""try:
    from jaxtrain import {command}; {command}.main(['--help'])
except SystemExit: pass
import sys; print([m for m in {HEAVY!r} if m in sys.modules])"""
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    listed = ["pydantic"] if command == "run" else []  # its help lists every setting
    assert output.splitlines()[-1] == str(listed)


def test_the_trainer_loads_no_tracker_until_it_is_asked_for():
    heavy = {"torch", "wandb", "mlflow", "matplotlib", "tensorboardX"}
    assert heavy & set(loaded_after("import jaxtrain.train.trainer")) == set()


def test_the_digits_are_scikit_learns_without_importing_it():
    """Its import takes a second, a fifth of the quick start's time to its first step."""
    from sklearn import datasets

    from jaxtrain.data.digits import load_digits

    code = "import sys; from jaxtrain.data import digits; digits.load_digits(); print('sklearn' in sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    images, labels = load_digits()
    expected = datasets.load_digits()
    assert output.strip() == "False"
    assert len(labels) == 1797
    assert (images == expected.images).all()
    assert (labels == expected.target).all()


def test_import_takes_half_a_second_at_most():
    """Processor time, which a busy machine does not stretch."""
    code = "import time; t = time.process_time(); import jaxtrain; print(time.process_time() - t)"
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    assert min(times) < 0.5


def test_a_second_process_compiles_nothing_anew(tmp_path):
    code = """
import jax, jax.numpy as jnp
from jaxtrain.runtime import compile_cache
compile_cache.enable()
count = compile_cache.watch()
jax.jit(lambda x: jnp.tanh(x @ x).sum())(jnp.ones((8, 8))).block_until_ready()
print(count.requests, count.hits, count.misses)
"""
    environ = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache")}
    run = lambda: [
        int(word)
        for word in subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ
        ).stdout.split()
    ]
    cold, warm = run(), run()
    assert cold[1] == 0
    assert warm[0] == warm[1] == cold[0] > 0
    assert warm[2] == 0


def test_counts_begin_at_watch():
    jax.jit(lambda x: x + 1.25)(jnp.ones(3))
    count = compile_cache.watch()
    assert (count.requests, count.hits) == (0, 0)
    jax.jit(lambda x: x * 1.75)(jnp.ones(3))
    assert count.requests >= 1
    assert "from the cache" in str(count)


def test_the_doctor_reports_devices_precision_versions_and_launcher(capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    assert doctor.main(["--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"]["backend"] == "cpu"
    assert found["precision"]["bf16"].startswith("works")
    assert found["versions"]["jax"] == jax.__version__
    assert found["launch"]["SLURM_JOB_NAME"] == "train"
    assert found["launch"]["recognised"].startswith("single process")


def test_the_doctor_prints_for_people_too(capsys):
    started = time.perf_counter()
    assert doctor.main([]) == 0
    assert "compile cache" in capsys.readouterr().out
    assert time.perf_counter() - started < 30


def test_a_script_configures_its_own_log_after_the_trainer_is_imported(tmp_path):
    code = f"""import logging
from jaxtrain import Trainer
assert (logging.root.handlers, logging.root.level) == ([], logging.WARNING)
logging.basicConfig(filename={str(tmp_path / "log")!r}, level=logging.INFO)
logging.info("epoch 1")
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert "epoch 1" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("command", ["jaxtrain.doctor", "jaxtrain.run"])
def test_a_platform_that_is_not_here_is_one_sentence(command, tmp_path):
    arguments = ["--config", "configs/digits_tiny.yaml", "--dry-run", f"run.dir={tmp_path}"]
    told = subprocess.run(
        [sys.executable, "-m", command, *(arguments if command == "jaxtrain.run" else [])],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "tpu"},
    )
    assert told.returncode == 2
    assert told.stderr.count("error: JAX_PLATFORMS=tpu: JAX finds no such device here") == 1
    assert "unset JAX_PLATFORMS, or set it to cpu" in told.stderr
    assert "Traceback" not in told.stderr
