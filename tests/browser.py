"""A headless browser that opens a page of ours, where this machine has one."""

import pathlib
import re
import shutil
import subprocess
import tempfile

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine to open the page with")


def open_page(page: pathlib.Path | str, width: int = 1100, height: int = 1600) -> tuple[str, list[str]]:
    """(the document after its scripts ran, complaints of its console). page: a file, or an address of this machine;
    every network name is unreachable."""
    address = page if isinstance(page, str) else page.as_uri()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        result = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", f"--user-data-dir={profile}",
             "--disable-background-networking", "--disable-component-update", f"--window-size={width},{height}",
             "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--enable-logging=stderr", "--v=0",
             "--dump-dom", address],
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    return result.stdout, re.findall(r".*CONSOLE.*", result.stderr)


def requests_of(page: str) -> list[str]:
    """What a page would fetch: addresses in its links to resources, scripts and styles."""
    return re.findall(r"""(?:src|href|url\()\s*=?\s*["']?((?:https?:)?//[^"')\s]+)""", page)
