"""A headless browser that opens a page of ours, where this machine has one."""

import pathlib
import re
import shutil
import subprocess

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine to open the page with")


def open_page(path: pathlib.Path, width: int = 1100, height: int = 1600) -> tuple[str, list[str]]:
    """(the document after its scripts ran, complaints of its console). Every network name is unreachable."""
    result = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--window-size={width},{height}",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--v=0", "--dump-dom", path.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return result.stdout, re.findall(r".*CONSOLE.*", result.stderr)


def requests_of(page: str) -> list[str]:
    """What a page would fetch: addresses in its links to resources, scripts and styles."""
    return re.findall(r"""(?:src|href|url\()\s*=?\s*["']?((?:https?:)?//[^"')\s]+)""", page)
