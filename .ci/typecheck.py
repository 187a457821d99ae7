"""Run pyright: no place may have more type errors than .ci/type_errors.json allows; one without an entry, none.

It also checks what README, docs and examples show as Python (.ci/snippets.py): a name that is misspelt there, or that
the package has no longer, is an error. The examples' allowance is for what the libraries' own types do not know.
`python .ci/typecheck.py --shrink` lowers the allowance to the errors that are left; nothing raises it.
"""

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys

import snippets
import transformers_stub

ROOT = pathlib.Path(__file__).parents[1]
CHECKED = ("jaxtrain", "torch_bridge", "build/snippets")
ALLOWANCE = ROOT / ".ci/type_errors.json"
# Near node's limit of 4 GB pyright drops its cache at every file; larger young generations are collected less often.
MEMORY = "--max-old-space-size=6144 --max-semi-space-size=64"


def errors() -> dict[str, list[str]]:
    """Return pyright's errors by area: jaxtrain/<folder or file>, torch_bridge, or the documentation."""
    snippets.write()
    transformers_stub.write(path for area in CHECKED for path in (ROOT / area).rglob("*.py*") if path.suffix != ".pyc")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *CHECKED]
    memory = {"NODE_OPTIONS": f"{os.environ.get('NODE_OPTIONS', '')} {MEMORY}".strip()}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | memory)
    if done.returncode not in (0, 1):
        sys.exit(f"pyright did not run: {done.stdout}{done.stderr}")
    found = collections.defaultdict(list)
    for error in json.loads(done.stdout)["generalDiagnostics"]:
        if error["severity"] == "error":
            path = pathlib.Path(error["file"]).relative_to(ROOT)
            area = "torch_bridge" if path.parts[0] == "torch_bridge" else "/".join(path.parts[:2])
            line = error["range"]["start"]["line"] + 1
            if area == "build/snippets":
                path = snippets.source(path)
                area = "examples" if path.startswith(("examples", "docs/tutorials")) else "documentation"
            found[area].append(f"{path}:{line}: {error['message'].splitlines()[0]} ({error.get('rule')})")
    return found


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--shrink", action="store_true", help="write the allowance down to what is left")
    arguments = p.parse_args()
    found, allowed = errors(), json.loads(ALLOWANCE.read_text())
    counts = {area: len(lines) for area, lines in found.items()}
    if arguments.shrink:
        allowed = {area: min(most, counts.get(area, 0)) for area, most in allowed.items()}
        ALLOWANCE.write_text(json.dumps({area: most for area, most in allowed.items() if most}, indent=2) + "\n")
        return 0
    too_many = [area for area, count in counts.items() if count > allowed.get(area, 0)]
    for area in too_many:
        print(*found[area], f"{area}: {counts[area]} type errors, {allowed.get(area, 0)} allowed", sep="\n")
    unused = {area: most for area, most in allowed.items() if counts.get(area, 0) < most}
    for area, most in unused.items():
        print(
            f"{area}: {counts.get(area, 0)} type errors are left of {most}: python .ci/typecheck.py --shrink lowers it"
        )
    print(f"{sum(counts.values())} type errors, {sum(allowed.values())} allowed")
    return 1 if too_many else 0


if __name__ == "__main__":
    sys.exit(main())
