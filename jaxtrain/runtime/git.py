"""Find the git revision of the user's code."""

import subprocess


def revision() -> str | None:
    """Return the commit of the working directory; None outside a repository or without git."""
    command = ["git", "rev-parse", "HEAD"]
    try:
        found = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    except OSError:  # no git, or not executable
        return None
    return found.stdout.strip() or None
