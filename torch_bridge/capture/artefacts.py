"""What capturing leaves at each of its stages, as text: guards, graph, jaxpr. `JAXTRAIN_LOG=guards,graph` prints them."""

import os
import sys
from collections.abc import Callable

from jaxtrain.errors import UserError

STAGES = ("guards", "graph", "jaxpr")

def wanted_stages() -> set[str]:
    """Return the stages that the environment variable JAXTRAIN_LOG names. Raises UserError for one that is none."""
    stages = {name.strip() for name in os.environ.get("JAXTRAIN_LOG", "").split(",")} - {""}
    if stages - set(STAGES):
        raise UserError(f"JAXTRAIN_LOG: {', '.join(sorted(stages - set(STAGES)))}, wanted some of {', '.join(STAGES)}")
    return stages


def show(stage: str, title: str, text: Callable[[], str]) -> None:
    """Print an artefact to stderr if JAXTRAIN_LOG names its stage. text: makes it."""
    if stage in wanted_stages():
        print(f"[jaxtrain {stage}] {title}\n{text()}", file=sys.stderr)
