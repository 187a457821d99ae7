"""Draw docs/picture.svg, what goes in and what comes out: `python docs/generate_picture.py`."""

import html
import pathlib
import sys

PICTURE = pathlib.Path(__file__).with_name("picture.svg")
WIDTH, HEIGHT, LINE = 880, 236, 21
STYLE = (
    "text{font:14px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:#1c2430}"
    ".head{font-weight:600;font-size:15px}.note{fill:#667085;font-size:12.5px}.box{fill:#fff;stroke:#98a2b3}"
    ".step{fill:#eef4ff;stroke:#2f6fd0;stroke-width:1.6}.arrow{stroke:#667085;stroke-width:1.6;fill:none}"
)
BOXES = (  # left edge, width, class, heading, lines
    (8, 232, "box", "Yours, in PyTorch", (
        "nn.Module", "Dataset or DataLoader", "loss, metrics, callbacks", "optimizer, lr_scheduler")),
    (312, 256, "step", "One compiled step", (
        "forward, loss, backward", "clip, update, buffers", "XLA: 1 to N devices",
        "resumed to the same bits")),
    (640, 232, "box", "Yours again, in PyTorch", (
        "state_dict, strict=True", ".pt, .safetensors, HF folder", "optimizer.state_dict()",
        "the same numbers: verify()")),
)  # fmt: skip
ARROWS = ((240, 312, "TorchDynamo"), (568, 640, "copied back"))


def draw() -> str:
    """The whole picture."""
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#f9fafb"/>']
    for left, width, kind, heading, lines in BOXES:
        parts.append(f'<rect class="{kind}" x="{left}" y="44" width="{width}" height="148" rx="8"/>')
        parts.append(f'<text class="head" x="{left + 16}" y="74">{html.escape(heading)}</text>')
        for row, line in enumerate(lines):
            parts.append(f'<text x="{left + 16}" y="{102 + LINE * row}">{html.escape(line)}</text>')
    for start, end, label in ARROWS:
        parts.append(f'<path class="arrow" d="M{start + 4} 118H{end - 6}m-7 -5l7 5l-7 5"/>')
        parts.append(f'<text class="note" x="{(start + end) / 2}" y="34" text-anchor="middle">{label}</text>')
    parts.append(
        f'<text class="note" x="{WIDTH / 2}" y="216" text-anchor="middle">An operation without a counterpart is '
        "refused by name and line before the first step.</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        'aria-label="A torch module, Dataset, loss and optimizer go in; one compiled step trains them; a state_dict '
        f'comes out"><style>{STYLE}</style>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PICTURE.read_text() != draw())
    PICTURE.write_text(draw())
