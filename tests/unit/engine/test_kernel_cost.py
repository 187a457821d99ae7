"""Predicted times of programs on a GPU, kernel by kernel."""

import pytest

from jaxtrain.runtime import kernel_cost, topology

CARD = topology.card("h200", 1)
COMPARE = """
%compare (a: s32[], b: s32[], c: bf16[], d: bf16[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  %c = bf16[] parameter(2)
  %d = bf16[] parameter(3)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}
"""


def sort(elements: int, rows: int = 0) -> str:
    """A sort of (int32, bfloat16) pairs along the last axis, `rows` of them."""
    dims = f"{rows},{elements}" if rows else f"{elements}"
    pair = f"(s32[{dims}], bf16[{dims}])"
    return f"""HloModule sorted, is_scheduled=true
{COMPARE}
ENTRY %main (p0: s32[{dims}], p1: bf16[{dims}]) -> {pair} {{
  %p0 = s32[{dims}] parameter(0)
  %p1 = bf16[{dims}] parameter(1)
  ROOT %s = {pair} sort(%p0, %p1), dimensions={{{1 if rows else 0}}}, is_stable=true, to_apply=%compare
}}
"""


def looped(elements: int, turns: int) -> str:
    """The same sort, `turns` times in a loop."""
    pair = f"(s32[{elements}], bf16[{elements}])"
    return f"""HloModule looped, is_scheduled=true
{COMPARE}
%body (p: {pair}) -> {pair} {{
  %p = {pair} parameter(0)
  %k = s32[{elements}] get-tuple-element(%p), index=0
  %v = bf16[{elements}] get-tuple-element(%p), index=1
  ROOT %s = {pair} sort(%k, %v), dimensions={{0}}, is_stable=true, to_apply=%compare
}}

ENTRY %main (p0: {pair}) -> {pair} {{
  %p0 = {pair} parameter(0)
  ROOT %w = {pair} while(%p0), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"{turns}"}}}}
}}
"""


def bytes_per_s() -> float:
    return CARD.memory * kernel_cost.REACHED["memory"] * kernel_cost.COPIED


def predicted(text: str) -> tuple[kernel_cost.Kernel, kernel_cost.Prediction]:
    (kernel,) = (each for each in kernel_cost.kernels(kernel_cost.Program(text), CARD) if each.kind == "sort")
    return kernel, kernel_cost.predict(text, CARD, sent=0)


def test_a_sort_costs_all_its_launches():
    kernel, step = predicted(sort(12 << 20))
    pass_s = 2 * 6 * (12 << 20) / bytes_per_s()  # each launch reads and writes every pair of 6 bytes
    assert kernel.launches == step.launches == 90
    assert kernel.seconds == pytest.approx(pass_s) == pytest.approx(35.6e-6, rel=1e-3)
    assert step.compute_s == pytest.approx(90 * (pass_s + kernel_cost.GAP_S))  # 3.28 ms


def test_many_short_sorts_are_one_launch():
    kernel, step = predicted(sort(1024, rows=12 << 10))
    assert step.launches == 1
    assert step.compute_s == pytest.approx(kernel.seconds + kernel_cost.GAP_S)


def test_a_sort_too_small_to_fill_the_gpu_costs_its_launches_too():
    _, step = predicted(sort(1 << 14))  # 0.2 MB: each launch takes the least time of a kernel
    assert step.compute_s == pytest.approx(step.launches * (kernel_cost.LEAST_S + kernel_cost.GAP_S))
    assert step.launches == 5


def test_a_sort_in_a_loop_costs_every_turn():
    one, _ = predicted(sort(12 << 20))
    kernel, step = predicted(looped(12 << 20, turns=7))
    assert kernel.total == pytest.approx(7 * one.total)
    assert step.dearest[0]["launches"] == 7 * 90
    assert step.dearest[0]["ms"] == pytest.approx(7e3 * one.total)


def test_the_dearest_kernels_add_up_to_the_step():
    _, step = predicted(looped(1 << 20, turns=3))
    assert sum(row["ms"] for row in step.dearest) == pytest.approx(1e3 * step.compute_s)
