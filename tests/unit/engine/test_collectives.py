"""Bytes of collectives, read from a compiled program's text."""

import pytest

from jaxtrain.runtime.collectives import collectives, summary

PROGRAM = """HloModule jit_step

ENTRY %main (p: f32[1000]) -> f32[1000] {{
  %p = f32[1000]{{0}} parameter(0)
  %start = {result} {kind}-start(%p), replica_groups=mesh['replica'=8,'fsdp'=1] {{'replica'}}, to_apply=%add
  ROOT %done = f32[1000]{{0}} {kind}-done(%start)
}}
"""


@pytest.mark.parametrize(
    ("kind", "result", "sent"),
    [
        ("all-reduce", "f32[1000]{0}", 7000),  # jax 0.10
        ("all-reduce", "((f32[1000]{0}), f32[1000]{0})", 7000),  # jax 0.11
        ("all-reduce", "(f32[600]{0}, f32[400]{0})", 7000),
        ("all-reduce", "((f32[600]{0}, f32[400]{0}), (f32[600]{0}, f32[400]{0}))", 7000),
        ("all-gather", "(f32[125]{0}, f32[1000]{0})", 3500),
    ],
    ids=["one", "with_operand", "several", "several_with_operands", "gather"],
)
def test_a_started_collective_counts_once(kind, result, sent):
    text = PROGRAM.format(kind=kind, result=result)
    assert summary(collectives(text)) == {kind: {"count": 1, "bytes": sent}}
