"""Who hears the signals of a process."""

import subprocess
import sys

import pytest

BORN_DEAF = """
import os, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.{name}])
from jaxtrain.runtime.preemption import PREEMPTION
assert PREEMPTION.listen()
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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_process_born_with_the_signal_blocked_hears_it(name):
    ended = subprocess.run([sys.executable, "-c", BORN_DEAF.format(name=name)], capture_output=True, timeout=60)
    assert (ended.returncode, name in ended.stderr.decode()) == (75, True)


def test_signals_that_were_blocked_before_are_blocked_again_after():
    subprocess.run([sys.executable, "-c", GIVEN_BACK], check=True, timeout=60)
