"""The revision of the user's code."""

import subprocess


def revision() -> str | None:
    """Return the commit of the working directory; None outside a repository, and where there is no git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    except OSError:  # no git, or none that may be started
        return None
    return found.stdout.strip() or None
