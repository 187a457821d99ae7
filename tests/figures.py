"""Figures with a unit of time, memory, speed or share in README and docs, and where each comes from.

A figure is traced to a text of a file of the repository that holds it: a result (benchmarks/results), a constant of
the code, the head of a config (its command, cost and expected result), a test that asserts it. SOURCES has these, page
by page: words with the figure -> the file and its text. STATED has what is no measurement, with the reason.
The pages of GENERATED are written from results by a command, and compared with them by a test.
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
GENERATED = {  # page -> the command that writes it; tests of that page compare the two
    "docs/benchmarks.md": "python -m benchmarks.page",
    "docs/certificates.md": "python -m benchmarks.certificates",
    "docs/public_trainings.md": "python -m benchmarks.public_trainings",
    "docs/drop_in_flags.md": "python docs/generate_drop_in_flags.py",
    "docs/operators.md": "python docs/generate_operators.py",
    "docs/reference.md": "python docs/generate_reference.py",
}
UNIT = (
    "ms|us|s|min|h|%|MB|GB|TB|kB|KB|MiB|GiB|KiB|(?:TB|GB|MB)/s|(?:samples|tokens|steps)/s|times|x(?! ?[0-9])|"
    "milliseconds?|seconds?|minutes?|hours?|days?"
)
NUMBER = r"[0-9][0-9,]*(?:\.[0-9]+)?"
RANGE = rf"(?<![\w.,/:-]){NUMBER}(?:(?:-| to | / ){NUMBER})?"
FIGURE = re.compile(rf"{RANGE}(?: |-)(?:CPU )?(?:{UNIT})(?![\w/])|(?<![\w.])[0-9.]+[%x](?= |,)")


def pages() -> list[pathlib.Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(page: pathlib.Path) -> str:
    """A page without its code, its links' targets and what a command writes into it."""
    text = re.sub(r"^( *)```.*?^\1```", "", page.read_text(), flags=re.S | re.M)
    text = re.sub(r"<!-- (\w+) begins.*?<!-- \1 ends -->", "", text, flags=re.S)
    return re.sub(r"\]\([^)]*\)", "]", text)


def text(page: pathlib.Path) -> str:
    """A page's prose on one line."""
    return " ".join(prose(page).split())


def untraced(page: pathlib.Path) -> list[str]:
    """The figures of a page that no words of SOURCES or STATED hold, with what stands around them."""
    whole, name = text(page), str(page.relative_to(ROOT))
    listed = [*SOURCES.get(name, {}), *STATED.get(name, {})]
    spans = [match.span() for words in listed for match in re.finditer(re.escape(words), whole)]
    return [
        whole[max(0, match.start() - 60) : match.end() + 30]
        for match in FIGURE.finditer(whole)
        if not any(start <= match.start() and match.end() <= end for start, end in spans)
    ]


_LOCK, _WATCH = "jaxtrain/runtime/folder_lock.py", "jaxtrain/runtime/watchdog.py"
_RETRY = "jaxtrain/train/checkpoint/save_failures.py"
_DEVICE = ("jaxtrain/config.py", "device_limit_bytes: int = Field(default=1 << 30")
_LONG = ("jaxtrain/runtime/waits.py", "LONG_S = 5.0")
_CAPTURE = ("jaxtrain/compiled_step/meanwhile.py", "CAPTURE_S, MODULE_S = 3.0, 0.05")
SOURCES: dict[str, dict[str, tuple[str, str]]] = {
    "docs/SKILL.md": {"is captured, 5 s so far": _LONG},
    "docs/backend.md": {
        "1 ms an operator": ("torch_bridge/capture/compiled_graph.py", "TRACE_S = 1e-3  # per operator")
    },
    "docs/checkpoints.md": {
        "up to 300 s; training": (_RETRY, "FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 300.0"),
        "`checkpoint.retry_s` (300 s)": ("jaxtrain/config.py", "retry_s: float = Field(default=300"),
        "heartbeat (every 5 s)": (_LOCK, "ALIVE_S = 5.0"),
        "dead after 20 s": (_LOCK, "SILENT_S = 20.0"),
        "a 4 MB tmpfs": ("tests/chaos/full_disk.py", 'SIZE = "4m"'),
        "leak 100 kB per save": ("jaxtrain/train/checkpoint/orbax_patches.py", "100 kB per save"),
    },
    "docs/engine.md": {
        "within 5 % of bf16": (
            "tests/unit/engine/test_float8.py",
            'abs(ends["fp8"] - ends["bf16"]) < 0.05 * ends["bf16"]',
        ),
    },
    "docs/hjepa.md": {
        "| 81.9 % |": ("configs/hjepa_digits.yaml", "a linear probe is right for 81.9 % of the validation"),
        "| 52.4 % / 95.3 % |": (
            "configs/hjepa_digits.yaml",
            "against 52.4 % on the encoder as initialised and 95.3 % on raw",
        ),
    },
    "docs/launching.md": {
        "notice the loss within 20 s": (_WATCH, "LOST_S = 20.0"),
        "a heartbeat every 2 s": (_WATCH, "HEARTBEAT_S = 2.0"),
        "silent for 20 s": (_WATCH, "LOST_S = 20.0"),
        "20 times its slowest": (_WATCH, "SLACK = 20"),
        "at least 5 minutes": (_WATCH, "LEAST_S = 300.0"),
    },
    "docs/originals/hjepa.md": {
        "at its prompt in 60 s": ("jaxtrain/systems/hjepa/original/metrics_logger.py", "LOGIN_TIMEOUT_S = 60"),
    },
    "docs/own_loop.md": {"Capture over 5 s": _LONG, "a capture takes (3 s, and 50 ms a module)": _CAPTURE},
    "docs/performance.md": {"default up to 1 GiB": _DEVICE},
    "docs/security.md": {"at most 1 MiB": ("jaxtrain/yaml_limits.py", "MOST_BYTES = 1 << 20")},
    "docs/set_completion.md": {
        "3 to 5 % dead": ("configs/splat_sae.yaml", "3 to 5 % dead"),
        "at least 90 % found": ("tests/unit/set_completion/test_sae.py", "assert found[True] >= 0.9"),
    },
    "docs/troubleshooting.md": {"up to 1 GiB": _DEVICE, "more than 5 s is reported": _LONG},
}
STATED: dict[str, dict[str, str]] = {  # what is no measurement
    "README.md": {"first 15 minutes": "a page's title"},
    "docs/SKILL.md": {"is compiled, 10 s so far": "a message, quoted"},
    "docs/engine.md": {"3 to 10 times below AdamW's": "the advice of the paper that the sentence names"},
    "docs/first_15_minutes.md": {"First 15 minutes": "the page's title"},
    "docs/fmri_autoencoder.md": {"volume (1.5 s) of": "the repetition time of the recording"},
    "docs/from_pytorch.md": {"jnp.where(mask, 0, x)": "code"},
    "docs/index.md": {"First 15 minutes": "a page's title"},
    "docs/launching.md": {
        **dict.fromkeys(
            ("179, 185 GiB", "141, 79 GiB", "80, 94 GiB", "79, 40 GiB", "48, 22 GiB", "22, 44, 24 GiB", "32, 96 GiB"),
            "a data sheet; test_figures.py compares the row with jaxtrain/runtime/gpu_cards.py",
        ),
        "15, 16 GiB": "the same",
        **dict.fromkeys(("900 GB/s", "450 GB/s", "300 GB/s", "150 GB/s"), "data sheets, named in gpu_cards.py"),
    },
    "docs/originals/sherlock.md": {"2-3 days on one GPU, 15-20 samples/s": "what the original's README says of itself"},
    "docs/verify.md": {
        "10 times torch's": "the limit of a comparison",
        "3 times `torch.autocast`": "the limit of a comparison",
    },
}
DATED = [  # statements with a date before the newest result, and why that is right
    ("docs/compare.md", "August 2026"),  # when the sources of other libraries were read
    ("docs/compare.md", "September 2025"),  # levanter's last version there
    ("docs/compare.md", "2025-10-22"),  # the newest releases of thunder, torchax, tojax, TorchTPU and NeMo AutoModel
    ("docs/compare.md", "2026-06-17"),
    ("docs/compare.md", "2026-07-01"),
    ("docs/compare.md", "2026-10-19"),
    ("docs/compare.md", "2026-10-21"),
    ("docs/compare.md", "April 2026"),  # TorchTPU's announcement
]
