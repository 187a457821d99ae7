"""Who hears the signals of a process."""

import signal
import subprocess
import sys
import time
import types

import pytest

from jaxtrain.runtime import preemption

BORN_DEAF = """
import os, signal, time
signal.signal(signal.{name}, signal.SIG_DFL)  # nohup may be around the tests
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
    with PREEMPTION.attached(0.1, lambda: os._exit(3), lambda: "step 3 is saved"):
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


NESTED = """
import os, signal, threading, time
from jaxtrain.runtime.preemption import PREEMPTION, Interrupted
def other():
    with PREEMPTION.attached(30, lambda: os._exit(3), str):
        PREEMPTION.proceed()
with PREEMPTION.attached(30, lambda: os._exit(3), lambda: "the outer one"):
    PREEMPTION.proceed()
    {inner}
    os.kill(os.getpid(), signal.{name})
    try:
        while True:
            time.sleep(0.1)
            PREEMPTION.proceed()
    except Interrupted:
        print(PREEMPTION.saved())
"""
UNCAUGHT = """
import atexit, os, signal, time
from jaxtrain.runtime.preemption import PREEMPTION, Interrupted
atexit.register(print, "at exit")
with PREEMPTION.attached(30, lambda: os._exit(3), lambda: "step 3 is saved"):
    os.kill(os.getpid(), signal.SIGINT)
    try:
        while True:
            time.sleep(0.1)
            PREEMPTION.proceed()
    except Interrupted:
        raise PREEMPTION.saved()
"""
LEFT_ALONE = """
import faulthandler, signal
from jaxtrain.runtime.preemption import PREEMPTION
{before}
with PREEMPTION.listening():
    {within}
signal.raise_signal(signal.SIGUSR1)
print("alive")
"""
FORKED = """
import multiprocessing, time
from jaxtrain.runtime.preemption import PREEMPTION
with PREEMPTION.attached(30, lambda: None, str):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=[30])
    child.start()
    time.sleep(0.3)
    child.terminate()
    child.join(10)
    print(child.exitcode, PREEMPTION.told.wait(0.3))
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
    assert python(IN_A_SCRIPT) == (0, "interrupted (SIGINT): step 3 is saved. Start it again to go on\n")


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


@pytest.mark.parametrize(("name", "told"), [("SIGTERM", "75"), ("SIGINT", "interrupted (SIGINT): the outer one.")])
@pytest.mark.parametrize("inner", ["other()", "t = threading.Thread(target=other); t.start(); t.join()"])
def test_a_run_is_saved_also_after_another_one_has_ended_within_it(name, told, inner):
    code, said = python(NESTED.format(name=name, inner=inner))
    assert (code, said.startswith(told)) == (0, True), said


def test_a_script_ends_by_sigint_after_a_ctrl_c_with_one_line_and_its_own_work_at_exit():
    line = "interrupted (SIGINT): step 3 is saved. Start it again to go on\n"
    assert python(UNCAUGHT) == (-signal.SIGINT, f"at exit\n{line}")


@pytest.mark.parametrize("place", ["before", "within"])
def test_a_handler_that_c_code_set_is_left_alone(place):
    registered = {"before": "pass", "within": "pass", place: "faulthandler.register(signal.SIGUSR1, all_threads=False)"}
    code, said = python(LEFT_ALONE.format(**registered))
    assert (code, said.startswith("alive"), "most recent call first" in said) == (0, True, True), said


def test_a_forked_child_can_be_terminated_and_the_run_is_not_told():
    assert python(FORKED) == (0, "-15 False\n")
