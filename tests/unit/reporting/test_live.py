"""`report --watch` shows a run that goes on, on this machine alone."""

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from jaxtrain import report
from jaxtrain.errors import UserError
from jaxtrain.reporting import live
from tests.unit.reporting.test_page import write_run


@pytest.fixture
def folder(tmp_path):
    return write_run(tmp_path / "first", lr=1e-3)


@pytest.fixture
def server(folder):
    with live.Server([folder], port=0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def _get(address):
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_has_points_that_were_written_after_the_server_started(server, folder):
    assert "77,0.5" not in _get(server.address)[1]
    point = {"step": 77, "epoch": 77, "split": "train", "values": {"loss": 0.5}}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(point) + "\n")
    assert " 77,0.5" in _get(server.address)[1]


def test_a_browser_loads_the_page_again_until_the_run_has_ended(server, folder):
    assert 'http-equiv="refresh"' not in _get(server.address)[1]
    (folder / "summary.json").unlink()
    page = _get(server.address)[1]
    assert f'<meta http-equiv="refresh" content="{live.REFRESH_S}">' in page
    assert '<td>not finished</td></tr><tr><td>steps</td><td class="n">39</td>' in page


def test_nothing_else_of_the_disk_is_served(server):
    for path in ("config.yaml", "../config.yaml", "%2e%2e/config.yaml", "reports/picture.png"):
        assert _get(server.address + path)[0] == 404
    assert server.address.startswith("http://127.0.0.1:")


def test_a_damaged_file_is_one_sentence_and_the_next_look_is_right_again(server, folder):
    good = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text("{")
    code, text = _get(server.address)
    assert code == 500
    assert "summary.json: cannot be read" in text
    (folder / "summary.json").write_text(good)
    assert _get(server.address)[0] == 200


def test_a_port_in_use_and_a_folder_that_is_no_run_are_told_before_serving(server, folder, tmp_path):
    port = server.server_address[1]
    with pytest.raises(UserError, match=f"--port {port} is in use; give another, or 0"):
        live.Server([folder], port=port)
    with pytest.raises(UserError, match="no run folder"):
        live.Server([tmp_path], port=0)


@pytest.mark.parametrize("words", [["--watch", "--output", "a.html"], ["--port", "80"]])
def test_flags_that_do_not_go_together_are_the_users_mistake(folder, words, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        report.main(["--run", str(folder), *words])
    assert left.value.code == 2


def test_the_command_serves_until_ctrl_c(folder):
    command = [sys.executable, "-m", "jaxtrain.report", "--run", str(folder), "--watch", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        address = re.match(r"(http://127\.0\.0\.1:\d+/) shows the report", process.stdout.readline()).group(1)
        assert _get(address)[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert "Traceback" not in process.stderr.read()
