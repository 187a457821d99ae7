"""Who hears the signals of a process."""

import subprocess
import sys
import time
import types

import pytest

from jaxtrain.runtime import preemption

BORN_DEAF = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{name}])
from jaxtrain.runtime.preemption import PREEMPTION
assert PREEMPTION.listen(command=True)
os.kill(os.getpid(), signal.{name})
time.sleep(30)
"""
GIVEN_BACK = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
from jaxtrain.runtime.preemption import PREEMPTION
with PREEMPTION.listening():
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == {signal.SIGTERM}
"""


IGNORED = """
import os, signal
signal.signal(signal.{name}, signal.SIG_IGN)
from jaxtrain.runtime.preemption import PREEMPTION
assert PREEMPTION.listen(command=True)
os.kill(os.getpid(), signal.{name})
"""
TWICE = """
import os, signal, time
from jaxtrain.runtime.preemption import PREEMPTION
PREEMPTION.listen(command=True)
with PREEMPTION.attached(30, lambda: time.sleep(30), str):
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
    time.sleep(30)
"""
IN_A_SCRIPT = """
import os, signal, time
from jaxtrain.runtime.preemption import PREEMPTION, Interrupted
try:
    with PREEMPTION.attached(0.1, lambda: os._exit(3), str):
        os.kill(os.getpid(), signal.SIGINT)
        try:
            while True:
                time.sleep(0.3)  # beyond the grace period, which is not the script's
                PREEMPTION.proceed()
        except Interrupted:
            raise PREEMPTION.saved()
except KeyboardInterrupt as stopped:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    print(stopped)
"""


def python(program: str) -> tuple[int, str]:
    """Exit code and what it said, of a program."""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    return ended.returncode, (ended.stdout + ended.stderr).decode()


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGHUP", 75), ("SIGINT", 130)])
def test_a_command_born_with_the_signal_blocked_hears_it_and_says_one_line(name, code):
    word = "interrupted" if name == "SIGINT" else "preempted"
    assert python(BORN_DEAF.format(name=name)) == (code, f"{word} ({name}): nothing to save at this point\n")


@pytest.mark.parametrize("name", ["SIGHUP", "SIGINT"])
def test_a_signal_that_nohup_or_a_script_had_ignored_stays_ignored(name):
    assert python(IGNORED.format(name=name)) == (0, "")


def test_a_second_ctrl_c_leaves_at_once():
    began = time.monotonic()
    assert python(TWICE) == (130, "interrupted again: left at once\n")
    assert time.monotonic() - began < 20


def test_a_script_that_trains_gets_a_keyboard_interrupt_once_its_run_is_saved():
    assert python(IN_A_SCRIPT) == (0, "interrupted (SIGINT)\n")


def test_a_signal_in_the_middle_of_importing_jax_leaves_that_import_alone(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax._src.distributed", types.ModuleType("jax._src.distributed"))
    assert (preemption._processes(), preemption._process()) == (1, 0)


@pytest.mark.parametrize("module", ["jaxtrain.run", "jaxtrain.evaluate", "jaxtrain"])
def test_every_command_hears_its_signals_before_it_imports_anything_large(module):
    program = (
        "import sys, runpy; from jaxtrain.runtime.preemption import PREEMPTION; "
        "PREEMPTION.listen = lambda command: (print(command, 'jax' in sys.modules, 'pydantic' in sys.modules), "
        f"sys.exit()); runpy.run_module('{module}', run_name='__main__')"
    )
    assert python(program) == (0, "True False False\n")


def test_signals_that_were_blocked_before_are_blocked_again_after():
    subprocess.run([sys.executable, "-c", GIVEN_BACK], check=True, timeout=60)
