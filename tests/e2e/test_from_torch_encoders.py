"""Encoders of transformers in JAX: outputs within 1e-5 of torch, gradients 1e-4, running statistics 1e-5."""

import pytest

from tests.e2e.architectures import check
from tests.e2e.models_transformers import ENCODERS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("architecture", ENCODERS, ids=lambda architecture: architecture.name)
def test_equals_torch(architecture):
    check(architecture)
