"""Decoders and encoder-decoders of transformers in JAX: outputs within 1e-5 of torch, gradients 1e-4."""

import pytest

from tests.e2e.architectures import check
from tests.e2e.models_transformers import DECODERS, ENCODER_DECODERS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("architecture", DECODERS + ENCODER_DECODERS, ids=lambda architecture: architecture.name)
def test_equals_torch(architecture):
    check(architecture)
