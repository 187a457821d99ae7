"""Lowerings of layers equal torch's operators in dtype, shape, value and gradient."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.lowering import cases_layers, cases_linalg
from tests.unit.lowering.compare import PROPERTY, Draw, check, installed

CASES = {name: case for name, case in {**cases_layers.CASES, **cases_linalg.CASES}.items() if installed(name)}


@pytest.mark.parametrize("name", CASES)
@PROPERTY
@given(data=st.data())
def test_equals_torch(name, data):
    check(name, CASES[name](Draw(data)))
