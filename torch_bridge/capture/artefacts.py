"""Print what the stages of a capture have made: `JAXTRAIN_LOG=guards,graph,jaxpr python script.py`.

guards: what torch checks before it takes a captured program again, and why it captures anew. graph: each ATen graph,
with the user's lines. jaxpr: each program of JAX.
"""

import logging
import os

import torch

from jaxtrain.errors import UserError

VARIABLE, STAGES = "JAXTRAIN_LOG", ("guards", "graph", "jaxpr")

log = logging.getLogger("jaxtrain.artefacts")
_chosen: frozenset[str] | None = None


def chosen() -> frozenset[str]:
    """Return the stages to print. Raises UserError for a word in JAXTRAIN_LOG that is none of them."""
    global _chosen
    if _chosen is None:
        words = {word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()}
        if wrong := sorted(words - set(STAGES)):
            raise UserError(f"{VARIABLE}={','.join(wrong)}: no such stage; wanted a list of {', '.join(STAGES)}")
        if words:
            log.addHandler(logging.StreamHandler())
            log.setLevel(logging.INFO)
            log.propagate = False
        if "guards" in words:
            torch._logging.set_logs(guards=True, recompiles=True)
        _chosen = frozenset(words)
    return _chosen


def show(stage: str, name: str, text: object) -> None:
    """Print what a stage has made, if it is chosen. text: anything; str(text) is taken only then."""
    if stage in chosen():
        log.info("[%s] %s\n%s", stage, name, text)


def show_graph(name: str, module: torch.fx.GraphModule) -> None:
    """Print a graph with shapes and source lines, if graphs are chosen."""
    if "graph" in chosen():
        show("graph", name, module.print_readable(print_output=False))
