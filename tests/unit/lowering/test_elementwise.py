"""Element-wise lowerings equal torch's operators in dtype, shape, value and gradient."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.lowering import cases_arithmetic, cases_elementwise
from tests.unit.lowering.compare import PROPERTY, Draw, check

CASES = {**cases_elementwise.CASES, **cases_arithmetic.CASES}


@pytest.mark.parametrize("name", CASES)
@PROPERTY
@given(data=st.data())
def test_equals_torch(name, data):
    check(name, CASES[name](Draw(data)))
