"""XLA's options that hide communication."""

from jaxtrain.runtime import xla_flags


def test_several_gpus_get_all_options_and_one_gets_none():
    assert xla_flags.options(8, {}) == xla_flags.OPTIONS
    assert xla_flags.options(1, {}) == {}


def test_what_xla_flags_sets_wins():
    flags = {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}
    assert set(xla_flags.OPTIONS) - set(xla_flags.options(8, flags)) == {"xla_gpu_enable_latency_hiding_scheduler"}
