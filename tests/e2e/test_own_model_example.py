"""examples/own_model at a small size: the notebook runs from top to bottom, its export is served by plain torch."""

import contextlib
import io
import json
import os
import pathlib
import runpy
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
import torch
from sklearn.datasets import load_digits

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/own_model"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    """(what it printed, its folder) after two epochs."""
    folder, said, before = tmp_path_factory.mktemp("own"), io.StringIO(), os.getcwd()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setenv("EPOCHS", "2")
        patch.syspath_prepend(str(EXAMPLE))
        patch.chdir(folder)
        runpy.run_path(str(EXAMPLE / "train.py"))
    assert os.getcwd() == before
    return said.getvalue(), folder


@pytest.fixture(scope="module")
def server(notebook):
    """Its address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        made = runpy.run_path(str(EXAMPLE / "server.py"))["make_server"]
        running = made(notebook[1] / "runs/own_model/exports/net.pt", "127.0.0.1", 0)
    thread = threading.Thread(target=running.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()
    thread.join()


def post(address: str, body: bytes) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(urllib.request.Request(f"{address}/predict", body), timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_the_notebook_runs_from_top_to_bottom_and_torch_agrees_with_jax(notebook):
    lines = dict(line.rsplit(" ", 1) for line in notebook[0].splitlines())
    assert lines["accuracy in jax:"] == lines["accuracy in torch:"]
    assert float(lines["accuracy in torch:"]) > 0.6
    assert float(lines["largest difference of a logit:"]) < 1e-4


def test_every_cell_of_the_notebook_has_a_title():
    cells = [line for line in (EXAMPLE / "train.py").read_text().splitlines() if line.startswith("# %%")]
    assert len(cells) > 6
    assert all(len(cell) > 10 for cell in cells)


@pytest.mark.slow
def test_sigterm_ends_the_server_within_two_seconds(notebook):
    weights = notebook[1] / "runs/own_model/exports/net.pt"
    command = [sys.executable, str(EXAMPLE / "server.py"), "--weights", str(weights), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        sent = time.monotonic()
        process.terminate()
        assert (process.wait(30), process.stderr.read()) == (0, "")
        assert time.monotonic() - sent < 2


def test_the_server_gives_the_networks_own_answers(server, notebook, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    images = torch.from_numpy(load_digits().images[:5] / 16).float()
    network = runpy.run_path(str(EXAMPLE / "net.py"))["Net"]()
    network.load_state_dict(torch.load(notebook[1] / "runs/own_model/exports/net.pt", weights_only=True), strict=True)
    wanted = network.eval()(images[:, None]).softmax(1)
    status, found = post(server, json.dumps({"images": images.tolist()}).encode())
    assert status == 200
    assert found["labels"] == wanted.argmax(1).tolist()
    torch.testing.assert_close(torch.tensor(found["probabilities"]), wanted.detach(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"no json", "JSONDecodeError"),
        (b"{}", "KeyError"),
        (b"[1]", "TypeError"),
        (b'{"images": []}', "wanted 1 to 1024 of 8 x 8"),
        (b'{"images": [[1, 2, 3]]}', "got images of shape [1, 3]"),
        (b'{"images": 3}', "got images of shape []"),
        (json.dumps({"images": [[float("nan")] * 64]}).encode(), "not a finite number"),
    ],
)
def test_a_clients_mistake_is_answered_with_one_sentence(server, body, sentence):
    status, found = post(server, body)
    assert status == 400
    assert sentence in found["error"]


def test_the_server_is_healthy_after_mistakes_and_knows_no_other_page(server):
    post(server, b"no json")
    with urllib.request.urlopen(f"{server}/health", timeout=30) as answer:
        assert json.load(answer)["ok"]
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{server}/other", timeout=30)


def test_the_server_imports_neither_jax_nor_jaxtrain():
    code = "import sys, server; print(sorted({'jax', 'jaxtrain', 'torch_bridge'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLE, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
