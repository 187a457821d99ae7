"""Backend of torch.compile: `torch.compile(model, backend="jaxtrain")`. XLA computes forward and backward.

    model = torch.compile(model, backend="jaxtrain")
    for batch, target in loader:
        loss = loss_fn(model(batch), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

The loop, its optimizer, hooks and schedulers stay torch's. TorchDynamo captures the code and guards what it has seen,
in pieces where it has to; AOTAutograd splits each piece into a forward and a backward graph.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jaxtrain.errors import UserError
from jaxtrain.runtime import compile_cache, gpus, host_memory
from jaxtrain.runtime.waits import Waits
from torch_bridge.capture import artefacts, decompositions, torch_api, unreached
from torch_bridge.capture.attention import one_operator
from torch_bridge.capture.compiled_graph import CompiledGraph, Halves
from torch_bridge.capture.reasons import reason_of, stopped_by
from torch_bridge.capture.replay import check_values
from torch_bridge.lowering.errors import StaysInTorch

log = logging.getLogger(__name__)
_CAPTURES = Waits("TorchDynamo", torch_api.line_in)
torch_api.announce(lambda: _CAPTURES.during("captures code of the model"))


def jaxtrain(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], *, mode: Any = None, options: Any = None
) -> Callable:
    """Compile a graph of TorchDynamo's: what `torch.compile(backend="jaxtrain")` calls.

    Results and gradients are torch's, up to rounding. XLA compiles in the background, and torch computes until a
    program is there. A graph that AOTAutograd refuses, and one with an operator that has no lowering, runs in torch,
    and a line in the log says why.

    Args:
        gm: the graph.
        example_inputs: its inputs' shapes.
        mode: refused: XLA does all its optimizations.
        options: {"wait": True}, as JAXTRAIN_WAIT=1 in the environment and torch.use_deterministic_algorithms(True),
            waits for each program. Random numbers (dropout) are then JAX's in every call, seeded by torch's
            generator, and the same torch.manual_seed gives the same run.

    Raises:
        UserError: for `mode` and for options other than `wait`.

    Examples:
        >>> import torch
        >>> module = torch.nn.Linear(3, 1)
        >>> compiled = torch.compile(module, backend="jaxtrain", options={"wait": True})
        >>> x = torch.randn(4, 3)
        >>> torch.allclose(compiled(x), module(x), atol=1e-6)
        True
    """
    if mode:
        raise UserError(
            f"torch.compile(backend='jaxtrain', mode={mode!r}): this backend has none to choose from, as XLA does all "
            "its optimizations; leave mode out"
        )
    wait = (options or {}).get("wait", False)
    if set(options or ()) - {"wait"} or type(wait) is not bool:
        raise UserError(
            f"torch.compile(backend='jaxtrain', options={options!r}): the one option is 'wait', True or False: wait "
            "for each program instead of computing in torch while XLA compiles it"
        )
    gpus.share_memory()
    host_memory.keep()
    compile_cache.enable()
    artefacts.show_graph("captured", gm)
    halves = Halves(wait)

    def compiler(kind: str) -> Callable:
        def compile(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> CompiledGraph:
            fixed = frozenset() if kind == "backward" else torch_api.fixed_inputs()
            with torch_api.outside_capture():
                return CompiledGraph(graph, kind, fixed, halves)

        return compile

    backend = torch_api.autograd_backend(
        compiler("forward"), compiler("backward"), compiler("inference"), decompositions.rules_with_factors()
    )
    try:
        check_values(gm)
        with one_operator():
            run = backend(gm, example_inputs)
    except torch_api.CAPTURE_ERRORS:
        raise
    except StaysInTorch as error:
        log.warning("a part of the model runs in torch: %s", error)
        return gm.forward
    except Exception as error:  # whatever AOTAutograd cannot trace, and what torch refuses to differentiate
        why = reason_of(error) or f"{type(error).__name__}: {stopped_by(error)}"
        log.warning("a part of the model runs in torch, which cannot trace it: %s", why)
        return gm.forward  # gm(...) would print its generated code where torch raises

    def call(*arguments: Any) -> Any:
        results = run(*arguments)
        unreached.watch(results)
        return results

    return call
