"""The embedded corpus: documentation and sources of the running Python installation, read in place.

Nothing is copied or downloaded. A document is a file of the standard library, or a topic of its language reference as
`pydoc` ships it. Which documents there are depends on the Python version, which is part of the cache's key.
"""

import hashlib
import pathlib
import sys
import sysconfig
from collections.abc import Iterator

HELD_OUT = 10  # one document in ten is for evaluation
SKIPPED = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "pydoc_data")


def documents(split: str, limit_bytes: int) -> list[str]:
    """Texts of a split ("train" or "test"), together at most limit_bytes (a tenth of it for "test") in UTF-8.

    The order is that of a hash of the names: the same on every machine with the same installation.
    """
    limit = limit_bytes if split == "train" else max(limit_bytes // HELD_OUT, 1)
    texts, size = [], 0
    for name, read in sorted(_named(), key=lambda pair: _digest(pair[0])):
        if (_digest(name) % HELD_OUT == 0) != (split == "test"):
            continue
        text = read()
        size += len(text.encode("utf-8", "surrogatepass"))
        if text.strip() and size <= limit:
            texts.append(text)
        if size > limit:
            if not texts:
                texts.append(text[:limit])
            break
    return texts


def identity() -> str:
    """Return the settings that the corpus depends on."""
    return f"python-{sys.version}"


def _named() -> Iterator[tuple[str, object]]:
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not set(relative.parts) & set(SKIPPED):
            yield relative.as_posix(), lambda path=path: path.read_text("utf-8", "replace")
    from pydoc_data.topics import topics

    for name, text in topics.items():
        yield f"topic:{name}", lambda text=text: text


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
