"""Decoders and encoder-decoders of transformers compute the same in JAX as in torch: outputs 1e-5, gradients 1e-4, running statistics 1e-5 relative."""

import pytest

from tests.e2e.architectures import check
from tests.e2e.models_transformers import DECODERS, ENCODER_DECODERS


@pytest.mark.parametrize("architecture", DECODERS + ENCODER_DECODERS, ids=lambda architecture: architecture.name)
def test_equals_torch(architecture):
    check(architecture)
