"""`torch_bridge.torchrun` ends as its processes do."""

import signal
import subprocess
import sys
import time

import pytest

WRAPPED = [sys.executable, "-m", "torch_bridge.torchrun", "--nproc_per_node=2", "--master_port=0", "--no-python"]


@pytest.mark.parametrize(("ends", "code"), [("exit 0", 0), ("exit 75", 75), ("exit 3", 1)])
def test_the_exit_code_of_the_processes_is_kept_without_a_traceback(ends, code):
    ended = subprocess.run([*WRAPPED, "sh", "-c", ends], capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_signal_is_passed_on_and_told_by_the_exit_code():
    script = "trap 'exit 75' TERM; echo ready; while true; do sleep 0.1; done"
    process = subprocess.Popen([*WRAPPED, "sh", "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
