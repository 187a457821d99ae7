"""XLA's options for GPUs: what hides communication, what makes a step repeat itself."""

from jaxtrain.runtime import xla_flags


def test_several_gpus_hide_their_communication_and_one_has_none_to_hide():
    assert xla_flags.options(8, False, {}) == {n: v for n, v in xla_flags.OVERLAP.items() if xla_flags.is_offered(n)}
    assert xla_flags.options(1, False, {}) == {}


def test_a_deterministic_program_leaves_its_products_to_cublas():
    assert xla_flags.options(1, True, {}) == {"xla_gpu_deterministic_ops": True, "xla_gpu_enable_triton_gemm": False}


def test_what_xla_flags_sets_wins():
    flags = {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=false"}
    left_out = set(xla_flags.options(8, False, {})) - set(xla_flags.options(8, False, flags))
    assert left_out == {"xla_gpu_enable_latency_hiding_scheduler"}


def test_an_option_that_xla_does_not_have_is_left_out(monkeypatch):
    monkeypatch.setattr(xla_flags, "OVERLAP", {"xla_gpu_of_another_version": True})
    assert xla_flags.options(8, True, {}) == xla_flags.DETERMINISTIC


def test_xla_flags_say_what_is_deterministic():
    said = lambda flags, wanted=False: xla_flags.is_deterministic(wanted, {"XLA_FLAGS": flags})
    assert said("", True)
    assert not said("")
    assert said("--xla_gpu_deterministic_ops")
    assert said("--xla_gpu_exclude_nondeterministic_ops=true")
    assert not said("--xla_gpu_deterministic_ops=false", True)
