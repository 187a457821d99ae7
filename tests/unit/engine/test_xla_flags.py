"""XLA's options for GPUs: what hides communication, what makes a step repeat itself."""

from jaxtrain.runtime import xla_flags


def test_several_gpus_hide_their_communication_and_one_has_none_to_hide():
    assert xla_flags.options(8, False, {}) == xla_flags.OVERLAP
    assert xla_flags.options(1, False, {}) == {}


def test_a_deterministic_program_leaves_its_products_to_cublas():
    assert xla_flags.options(1, True, {}) == {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


def test_what_xla_flags_sets_wins():
    flags = {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}
    left_out = set(xla_flags.OVERLAP) - set(xla_flags.options(8, False, flags))
    assert left_out == {"xla_gpu_enable_latency_hiding_scheduler"}
