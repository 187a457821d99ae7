"""Built-in corpus: sources and documentation of the running Python installation, read in place.

Nothing is copied or downloaded. A document is a file of the standard library, or a topic of the language reference
that `pydoc` ships. The documents depend on the Python version, which is therefore part of the cache key.
"""

import hashlib
import pathlib
import sys
import sysconfig
from collections.abc import Iterator

HELD_OUT = 10  # one document in ten goes to the evaluation split
SKIPPED = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "pydoc_data")


def documents(split: str, limit_bytes: int) -> list[str]:
    """Return the texts of a split ("train" or "test"), at most limit_bytes of UTF-8 (a tenth of it for "test").

    They are ordered by a hash of their names, so the order is the same on every machine with the same installation.
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
    """Return a text that identifies the corpus: the Python version."""
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
