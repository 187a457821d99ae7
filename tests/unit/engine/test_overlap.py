"""XLA's options that hide communication."""

from jaxtrain.runtime import overlap


def test_several_gpus_get_all_options_and_one_gets_none():
    assert overlap.options(8, {}) == overlap.OPTIONS
    assert overlap.options(1, {}) == {}


def test_what_xla_flags_sets_wins():
    flags = {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}
    assert set(overlap.OPTIONS) - set(overlap.options(8, flags)) == {"xla_gpu_enable_latency_hiding_scheduler"}
