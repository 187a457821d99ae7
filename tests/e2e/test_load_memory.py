"""A checkpoint streams in: beside the model there is never more than one of its arrays in memory."""

import sys

import pytest

from benchmarks.load_memory import ALLOWED, ALLOWED_ON_DEVICES, of_kind

pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_loading_takes_the_largest_tensor_and_at_most_10_percent_more(kind):
    """420 MB in four matrices and four vectors; the safetensors are a Hugging Face folder of shards."""
    figures = of_kind(kind, layers=4, side=5120)
    assert figures["model_mb"] > 400
    assert figures["ratio"] <= ALLOWED, figures


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_module_on_the_meta_device_loads_onto_eight_devices_within_four_of_its_largest_tensors():
    """420 MB of Hugging Face shards, beside the devices' arrays; the step that follows runs."""
    figures = of_kind("devices", layers=4, side=5120)
    assert figures["model_mb"] > 400
    assert figures["ratio"] <= ALLOWED_ON_DEVICES, figures
