"""The documentation builds without a broken link, and its reference is that of the settings as they are."""

import functools
import html
import http.server
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
import threading

import pytest

import jaxtrain
from jaxtrain import Trainer, TrainingConfig, load_config, report
from tests.browser import needs_browser, open_page
from torch_bridge import files

ROOT = pathlib.Path(__file__).parents[1]
FILES = {".lock", ".json", ".log", ".pt", ".pth", ".py", ".safetensors"}


@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_docs_build_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "page", ["reference", "operators", "picture", "gallery", "drop_in_flags", "config_stub", "config_schema"]
)
def test_the_tables_and_the_picture_are_as_the_code_has_them(page):
    if page == "drop_in_flags":
        pytest.importorskip("lightning", reason="its flags are read from it")
    if page == "operators":
        pytest.importorskip("torch", reason="the operators are torch's")
    command = [sys.executable, f"docs/generate_{page}.py", "--check"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, f"run `python docs/generate_{page}.py` {result.stderr}"


def test_the_messages_that_troubleshooting_quotes_are_those_of_the_code():
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [*re.findall(r"^\| `([^`]+)`", page, re.M), *re.findall(r"```text\n(.*?)```", page, re.S)]
    files = [path for package in ("jaxtrain", "torch_bridge") for path in (ROOT / package).rglob("*.py")]
    code = _words("".join(path.read_text() for path in files))
    parts = {part.strip() for text in quoted for part in _words(text).split("|")}
    put_together = {"Unable to load cuDNN", "the training step would compile again"}  # by a library, from a name
    put_together |= {"operator torchvision", "nms does not exist"}  # by torch
    wanted = {part for part in parts if len(part) > 17} - put_together
    assert len(wanted) >= 30
    assert {part for part in wanted if part not in code} == set()


def _words(text: str) -> str:
    """Runs of words, with | for all else: numbers, names, braces. The parts of a broken string are joined."""
    joined = re.sub(r'"\s*\n\s*f?"', "", text).replace("`", "")
    return re.sub(r"[^A-Za-z' ]+", "|", " ".join(joined.split(" ")))


def test_the_python_of_readme_and_jax_model_runs_as_it_stands(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    from jaxtrain.systems.digits.torch_twin import DigitsViT

    monkeypatch.chdir(tmp_path)
    python = lambda page: re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    torchs, (flaxs, back) = python("README.md")[0], python("docs/jax_model.md")[:2]
    namespace: dict = {}
    torch.manual_seed(0)
    for folder, own in (("torchs", torchs), ("flaxs", flaxs)):
        (tmp_path / folder).mkdir()
        monkeypatch.chdir(tmp_path / folder)
        exec(own, namespace)
        assert namespace["trainer"].evaluate()["loss"] < 0.1
    with torch.no_grad():
        assert torch.nn.MSELoss()(namespace["model"](namespace["x"])[:, 0], namespace["x"].sum(1)) < 0.1
    weights = pathlib.Path("runs/digits/exports/best.pt")  # the quick start writes it; here a twin's own
    weights.parent.mkdir(parents=True)
    torch.save(DigitsViT(load_config("configs/digits.yaml").model).state_dict(), weights)
    exec(back, namespace)
    assert namespace["module"](torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_nothing_advises_to_install_from_an_index_where_the_project_is_not():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    advice = re.compile(r"(?:pip|uv)[^\n]* (?:install|add) [^\n]*['\" ]jaxtrain(?![\w/.-])")
    wrong = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.is_file() and path.suffix in (".md", ".py", ".yaml", ".yml", ".ipynb", ".toml", ".sh", ""):
            wrong += [f"{name}: {line.group()}" for line in advice.finditer(path.read_text(errors="replace"))]
    assert wrong == []


def test_the_api_page_has_every_public_name():
    page = (ROOT / "docs/api.md").read_text()
    described = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)", page, re.M)}
    assert set(jaxtrain.__all__) - described == set()


def test_every_setting_that_a_page_names_exists():
    keys, section = set(), ""
    for line in (ROOT / "docs/reference.md").read_text().splitlines():
        if line.startswith("#"):
            heading = re.match(r"#+ `([\w.]+)`", line)
            section = f"{heading.group(1)}." if heading else ""
        elif key := re.match(r"\| `([\w.]+)`", line):
            keys.add(section + key.group(1))
    sections = {key.partition(".")[0] for key in keys if "." in key}
    known = lambda key: key in keys or any(other.startswith(f"{key}.") for other in keys)
    wrong = []
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.S | re.M)
        for span in re.findall(r"`([^`\n]+)`", text):
            found = re.findall(r"(?:^|[ {])([a-z_]+\.[a-z_.]*[a-z_])(?=$|[:= ,])", span)
            found = [
                key for key in found if key.partition(".")[0] in sections and pathlib.Path(key).suffix not in FILES
            ]
            wrong += [f"{page.name}: {key}" for key in found if not known(key)]
    assert wrong == []


def test_what_replaces_torchs_code_runs_as_the_page_shows_it(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(# jaxtrain\n.*?)```", (ROOT / "docs/from_pytorch.md").read_text(), re.S)
    assert len(blocks) == 6
    data = torch.utils.data.TensorDataset(torch.randn(64, 3), torch.zeros(64, 1))
    namespace = {
        "DataLoader": torch.utils.data.DataLoader,
        "TrainingConfig": lambda **given: TrainingConfig(**given | {"num_epochs": 1}),
        "Trainer": Trainer,
        "jaxtrain": jaxtrain,
        "collate": torch.utils.data.default_collate,
        "dataset": data,
        "files": files,
        "loss": torch.nn.MSELoss(),
        "model": torch.nn.Linear(3, 1),
        "torch": torch,
        "train_dataset": data,
        "val_dataset": data,
    }
    for block in blocks:
        exec(block, namespace)
    assert namespace["history"]["best_val_loss"] > 0
    assert torch.load("mine.pt", weights_only=True).keys() == namespace["model"].state_dict().keys()


WIDE = """<script>
addEventListener("load", () => {
  const root = (frame) => frame.contentDocument.documentElement;
  const widths = (frame) => [frame.getAttribute("src"), [root(frame).clientWidth, root(frame).scrollWidth]];
  document.body.dataset.seen = JSON.stringify(Object.fromEntries([...document.querySelectorAll("iframe")].map(widths)));
});
</script>"""


@needs_browser
@pytest.mark.skipif(importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_no_page_is_wider_than_a_phone(tmp_path):
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(site)]
    subprocess.run(command, cwd=ROOT, capture_output=True, timeout=300, check=True)
    pages = sorted(str(path.parent.relative_to(site)) + "/" for path in site.rglob("index.html"))
    frames = "".join(f'<iframe src="{page}" style="width: 390px; height: 800px; border: 0"></iframe>' for page in pages)
    (site / "frames.html").write_text(f"<!doctype html><body>{WIDE}{frames}</body>")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        document, _ = open_page(f"http://127.0.0.1:{server.server_address[1]}/frames.html")
        server.shutdown()
    seen = json.loads(html.unescape(re.search(r'data-seen="([^"]*)"', document).group(1)))
    assert len(seen) == len(pages) >= 50
    assert {
        page: w for page, w in seen.items() if not 370 <= w[0] <= 390 or w[1] > w[0]
    } == {}  # w[0]: less a scroll bar


@pytest.mark.parametrize("parts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_first_15_minutes_run_as_the_page_shows_them(parts, tmp_path, monkeypatch, capfd):
    """Train and use the best weights; the third part, which verifies, takes a minute."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/first_15_minutes.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 3
    namespace: dict = {}
    for block in blocks[:parts]:
        exec(block, namespace)
    assert namespace["right"] > 0.95 * len(namespace["y"])
    assert pathlib.Path("runs/digits_cnn/exports/best.pt").is_file()
    if parts == 3:
        assert "Sequential in JAX equals torch in " in capfd.readouterr().out
    assert report.main(["--run", "runs/digits_cnn"]) == 0
    assert pathlib.Path("runs/digits_cnn/report.html").is_file()


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda page: page.name
)
def test_a_pages_sentences_have_at_most_45_words_and_25_in_the_mean(page):
    lengths = {sentence: len(sentence.split()) for sentence in _sentences(page.read_text())}
    assert [sentence for sentence, words in lengths.items() if words > 45] == []
    assert sum(lengths.values()) <= 25 * max(len(lengths), 1)


def _sentences(page: str) -> list[str]:
    """Return the sentences of a page's paragraphs and lists, with one word for code spans in a row, and no address."""
    text = re.sub(r"^ *```.*?^ *```", "", page, flags=re.S | re.M)
    text = re.sub(r"`[^`]*`", "`", re.sub(r"\]\([^)]*\)", "]", text))
    text = re.sub(r"`(?:(?:, | and | or )`)+", "`", text)  # a list of names
    kept = [line.strip() for line in text.splitlines()]
    kept = ["" if line.startswith(("#", "|", "!", "[!", ":::", "options:", "<")) else line for line in kept]
    begun = re.sub(r"\n(?=(?:[-*]|\d+\.) )", "\n\n", "\n".join(kept))
    paragraphs = [" ".join(part.split()) for part in begun.split("\n\n")]
    return [s for part in paragraphs for s in re.split(r"(?<=[.!?]) +(?=[A-Z`*(\[])", part) if s]
