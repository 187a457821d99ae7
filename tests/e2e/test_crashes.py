"""Killed, preempted and damaged runs end as if nothing had happened. In numbers: tests/chaos/."""

import subprocess

import pytest

from tests.chaos import command_lines, config_fuzz, full_disk, kills, terms

pytestmark = pytest.mark.slow


def test_ten_sigkills_leave_the_bits_of_an_uninterrupted_run(capsys):
    assert kills.main(["--kills", "10"]) == 0
    assert "10 of 10 kills survived" in capsys.readouterr().out


def test_signals_in_a_compilation_and_in_an_evaluation_save_and_resume_exactly(capsys):
    assert terms.main(["--terms", "2", "--phases", "rescue", "evaluation"]) == 0
    assert "2 of 2 signals" in capsys.readouterr().out


def test_a_signal_to_one_of_two_processes_saves_the_same_step_on_both(capsys):
    assert terms.main(["--terms", "1", "--phases", "two processes"]) == 0


def test_a_full_disk_costs_no_checkpoint():
    try:
        with full_disk.small_disk():
            pass
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this user may not mount a tmpfs")
    assert full_disk.main(["--cases", "stays_full"]) == 0


def test_generated_configs_are_taken_or_refused_by_name():
    outcomes, failures, longest = config_fuzz.fuzz(40, 1)
    assert failures == []
    assert min(outcomes["taken"], outcomes["refused"]) > 0
    assert longest < 60


def test_generated_command_lines_end_with_one_sentence():
    outcomes, failures = command_lines.attack(20, 1)
    assert failures == []
    assert sum(outcomes.values()) == 20
