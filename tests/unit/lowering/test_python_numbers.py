"""A plain number that changes from call to call: a tensor with tensors, conditions of a record with Python."""

import math

import pytest
import torch

from jaxtrain import UserError
from torch_bridge.lowering.python.numbers import MOST_PATHS, Number, Paths


def number(value: int, paths: Paths | None = None) -> Number:
    paths = Paths("f") if paths is None else paths
    values = {"n": value}
    return paths.known[paths.of(values)].number("n", values, torch.tensor(value, dtype=torch.int32))


def test_with_tensors_it_computes_as_the_plain_number():
    x = torch.tensor([1.0, -2.0, 3.5])
    for compute in (
        lambda n: x * n, lambda n: n * x + n, lambda n: x / (n + 1), lambda n: (2 * n - 1) % 5 + x, lambda n: x**n,
        lambda n: -n // 4 * x, lambda n: n / 8 - x, lambda n: torch.pow(x, n), lambda n: abs(n - 9) * x,
        lambda n: torch.where(x > n, x, n * x), lambda n: x.clamp(max=n),
    ):  # fmt: skip
        torch.testing.assert_close(compute(number(7)), compute(7))


def test_what_python_asks_is_kept_as_a_condition():
    paths = Paths("f")
    asked = number(7, paths)
    assert asked % 7 == 0
    assert min(asked / 100, 0.5) is not asked
    assert paths.of({"n": 14}) == 0
    assert paths.of({"n": 15}) == 1  # another answer to the first question
    assert Paths("f").of({"n": 70}) == 0


@pytest.mark.parametrize("ask", [int, float, str, hash, round, bool, range, math.cos, lambda n: [1, 2, 3][n]])
def test_a_plain_value_holds_for_that_value_alone_unless_only_its_truth_is_asked(ask):
    paths = Paths("f")
    ask(number(2, paths))
    assert paths.of({"n": 2}) == 0
    assert (paths.of({"n": 1}) == 0) is (ask is bool)


def test_more_paths_than_eight_are_refused_with_the_line():
    paths = Paths("f")
    for value in range(MOST_PATHS):
        int(number(value, paths))
    with pytest.raises(UserError, match=rf"f asks .* {MOST_PATHS} programs already, at .*test_python_numbers.py:\d+"):
        paths.of({"n": MOST_PATHS})
