"""The table names operators that torch has, and every one of them is tested."""

import torch

from tests.unit.lowering import (
    cases_arithmetic,
    cases_creation,
    cases_elementwise,
    cases_indexing,
    cases_layers,
    cases_linalg,
    cases_reductions,
    cases_views,
    cases_windows,
)
from tests.unit.lowering import test_backward as backward_cases
from tests.unit.lowering.compare import installed, operator
from tests.unit.lowering.test_corners import CORNERS, MASKED, ZERO_DIMENSIONAL
from tests.unit.lowering.test_further import FURTHER
from tests.unit.lowering.test_randomness import SAMPLES
from tests.unit.lowering.test_special import FUNCTIONS
from torch_bridge.lowering.operators import TABLE

CASES = (
    cases_arithmetic,
    cases_creation,
    cases_elementwise,
    cases_indexing,
    cases_layers,
    cases_linalg,
    cases_reductions,
    cases_views,
    cases_windows,
)
UNDEFINED_VALUES = {  # torch leaves their memory as it is, so there is nothing to compare
    f"aten.{name}"
    for name in (
        "empty.memory_format",
        "empty_permuted.default",
        "empty_strided.default",
        "empty_like.default",
        "new_empty.default",
        "new_empty_strided.default",
    )
}
NO_VALUES = {  # checks, and numbers read out of tensors
    name for name, function in TABLE.items() if function.__name__ in ("no_check", "item")
}
IN_MODELS = {  # compared as parts of models: tests/e2e/models_transformers.py
    "transformers.grouped_mm_fallback.default",
    "torch_bridge.recurrent.default",  # tests/unit/capture/test_module_call.py
    "torch_bridge.recurrent_backward.default",
    "torch_bridge.one_hot.default",  # tests/unit/capture/test_saved_results.py
    "aten._native_multi_head_attention.default",  # tests/unit/lowering/test_encoder_layers.py
    "aten._transformer_encoder_layer_fwd.default",
}
BY_ITSELF = {
    *backward_cases.NAMES,
    "aten.cauchy.default",  # it has no mean
}


def test_every_name_is_an_operator_of_torch():
    names = {name for name in TABLE if name.startswith("aten.")}
    assert {name for name in names if not installed(name)} <= {"aten.cholesky.default"}  # torch 2.14 has none
    assert all(isinstance(operator(name), torch._ops.OpOverload) for name in names if installed(name))


def test_every_lowering_is_compared_with_torch():
    tested = set().union(*(module.CASES for module in CASES), {f"aten.{name}" for name in SAMPLES})
    tested |= {f"aten.{case[0]}" for case in (*CORNERS, *ZERO_DIMENSIONAL, *MASKED, *FURTHER)} | FUNCTIONS.keys()
    assert TABLE.keys() - tested - UNDEFINED_VALUES - NO_VALUES - IN_MODELS - BY_ITSELF == set()
    assert tested - TABLE.keys() == set()
