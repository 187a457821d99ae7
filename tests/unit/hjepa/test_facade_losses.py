"""The original's losses as torch modules: its numbers, gradients, dictionaries and refusals."""

import json
import pathlib
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from jaxtrain.systems import hjepa
from tests.parity.hjepa_parts import _levels, _pick, _views

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "hjepa"
CASES = json.loads((GOLDEN / "losses.json").read_text())["cases"]
NAMES = [name for name, case in CASES.items() if isinstance(case, dict)]
RECORDED = load_file(GOLDEN / "losses.safetensors")


def inputs() -> dict[str, torch.Tensor]:
    found = {key.removeprefix("in/"): torch.from_numpy(x) for key, x in RECORDED.items() if key.startswith("in/")}
    for key, tensor in found.items():
        if key.startswith(("pred", "target", "context")):
            tensor.requires_grad_()
    return found


def call_of(case: dict, given: dict, name: str):
    """The case's loss and its arguments."""
    kind = case["class"]
    levels = (_levels(given, "pred"), _levels(given, "target"))
    if kind == "HJEPALoss":
        options = {key: value for key, value in case.items() if key not in ("class", "masks")}
        return hjepa.HJEPALoss(**options), (*levels, _levels(given, "mask") if case.get("masks") else None), {}
    if kind in ("CombinedLoss", "HierarchicalCombinedLoss"):
        options = {key: value for key, value in case.items() if key not in ("class", "context")}
        context = {"context_features": given["context"]} if case.get("context") else {}
        return getattr(hjepa, kind)(**options), levels, context
    if kind == "ContrastiveJEPALoss":
        base = hjepa.HJEPALoss(hierarchy_weights=[1.0, 0.5, 0.25])
        loss = hjepa.ContrastiveJEPALoss(base, contrastive_weight=0.1, contrastive_temperature=0.1)
        return loss, levels, {"context_features_i": given["context"], "context_features_j": given["context2"]}
    views = [_pick(text, given) for text in _views(case)]
    options = {key: value for key, value in case.items() if key not in ("class", "inputs", "args")}
    loss = getattr(hjepa, kind)(*case.get("args", ()), **options)
    sliced = loss.sigreg_loss if kind.startswith("Hybrid") else loss
    if "slices" in vars(type(sliced)):
        sliced.slices = lambda width: given["sigreg_slices"]
    return loss, views, {}


@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_the_originals(name):
    given = inputs()
    loss, args, kwargs = call_of(CASES[name], given, name)
    terms = loss(*args, **kwargs)
    recorded = {key.removeprefix(f"loss/{name}/"): x for key, x in RECORDED.items() if key.startswith(f"loss/{name}/")}
    for key, value in recorded.items():
        np.testing.assert_allclose(terms[key].detach().numpy(), value, rtol=1e-5, atol=1e-6, err_msg=key)
    extra = set(terms) - set(recorded) - {"negative_similarity", "contrastive_neg_sim"}  # -inf, which is not recorded
    assert not extra
    if not terms["loss"].isfinite():
        return  # a variance of one row
    terms["loss"].backward()
    for key, x in given.items():
        if f"grad/{name}/{key}" in RECORDED:
            np.testing.assert_allclose(
                x.grad.numpy(), RECORDED[f"grad/{name}/{key}"], rtol=1e-4, atol=1e-6, err_msg=key
            )
        else:
            assert x.grad is None, key


@pytest.mark.parametrize("name", [name for name in NAMES if name.count("_") < 3 and "loop" not in name])
def test_jax_arrays_give_jax_arrays_with_the_same_values(name):
    given = {key: x.detach() for key, x in inputs().items()}
    loss, args, kwargs = call_of(CASES[name], given, name)
    convert = lambda x: torch.utils._pytree.tree_map(lambda leaf: None if leaf is None else jnp.asarray(leaf), x)
    torch.manual_seed(0)
    terms = loss(*args, **kwargs)
    torch.manual_seed(0)
    found = loss(*map(convert, args), **{key: convert(x) for key, x in kwargs.items()})
    assert set(found) == set(terms)
    for key, value in terms.items():
        assert not isinstance(found[key], torch.Tensor)
        np.testing.assert_allclose(found[key], value.numpy(), rtol=2e-6, atol=1e-6, err_msg=key)


def levels_of(batch=4, width=8):
    torch.manual_seed(0)
    predictions = [torch.randn(batch, count, width, requires_grad=True) for count in (8, 4, 2)]
    return predictions, [torch.randn_like(x) for x in predictions]


def test_constructor_arguments_are_attributes():
    loss = hjepa.HJEPALoss()
    got = (loss.loss_type, loss.num_hierarchies, loss.reduction, loss.normalize_embeddings, loss.huber_delta, loss.eps)
    assert got == ("smoothl1", 3, "mean", True, 1.0, 1e-8)
    assert hjepa.HJEPALoss(hierarchy_weights=[1.0, 0.5, 0.25]).hierarchy_weights.tolist() == [1.0, 0.5, 0.25]
    assert list(loss.state_dict()) == ["_hierarchy_weights"]
    assert set(hjepa.CombinedLoss().state_dict()) == {"_vicreg_weights", "jepa_loss._hierarchy_weights"}
    sigreg = hjepa.SIGRegLoss(num_slices=8)
    assert list(sigreg.state_dict()) == ["univariate_test.reference_points", "univariate_test.quadrature_points"]
    assert "smoothl1" in repr(loss)
    assert pickle.loads(pickle.dumps(loss)).loss_type == "smoothl1"


def test_sigregs_options_come_from_the_configs_names():
    options = {
        "sigreg_num_slices": 5,
        "sigreg_fixed_slices": True,
        "sigreg_weight": 3.0,
        "sigreg_invariance_weight": 2.0,
        "sigreg_test_method": "char_function",
        "sigreg_char_function_t_min": 0.1,
        "sigreg_char_function_t_max": 3.0,
        "sigreg_char_function_num_quadrature": 12,
        "sigreg_char_function_lambda": 1.5,
    }
    loss = hjepa.create_loss_from_config({"type": "hjepa_sigreg", "sigreg_loss_weight": 0.5, **options})
    sliced, test = loss.sigreg_loss, loss.sigreg_loss.univariate_test
    assert loss.sigreg_weight == 0.5
    assert (sliced.num_slices, sliced.fixed_slices) == (5, True)
    assert (sliced.sigreg_weight, sliced.invariance_weight) == (3.0, 2.0)
    assert (test.test_method, test.char_function_lambda, test.quadrature_points.shape) == ("char_function", 1.5, (12,))
    assert test.quadrature_points[[0, -1]].tolist() == pytest.approx([0.1, 3.0])


def test_a_positional_argument_has_the_originals_meaning():
    loss = hjepa.CombinedLoss("huber", [1.0, 0.5], 2, True, 0.5, 0.3)
    assert (loss.jepa_loss.huber_delta, loss.vicreg_weights.tolist()) == (0.5, pytest.approx([0.3, 0.3]))
    loss = hjepa.HierarchicalCombinedLoss("mse", [1.0, 0.5], 2, True, [0.1, 0.2], [{"eps": 0.5}, {}], huber_delta=0.7)
    assert isinstance(loss, hjepa.CombinedLoss)
    assert loss.vicreg_weights.tolist() == pytest.approx([0.1, 0.2])
    assert [one.eps for one in loss.vicreg_losses] == [0.5, 1e-4]
    base = hjepa.HJEPALoss()
    assert hjepa.HJEPASIGRegLoss(base, hjepa.SIGRegLoss(8), 2.0).sigreg_weight == 2.0
    cjepa = hjepa.ContrastiveJEPALoss(base, 1.0, 0.1, 0.2, False, True, "sum")
    assert (cjepa.contrastive_on_context, cjepa.contrastive.reduction, cjepa.contrastive.temperature) == (
        True,
        "sum",
        0.2,
    )
    hybrid = hjepa.HybridVICRegSIGRegLoss(1.0, 1.0, 25.0, 25.0, 1.0, 8, 17, 0.5)
    assert hybrid.vicreg_loss.variance_threshold == 0.5


def test_views_of_the_context_count_if_they_are_chosen():
    base, (predictions, targets) = hjepa.HJEPALoss(), levels_of()
    views = [torch.randn(4, 9, 8) for _ in range(4)]
    single = lambda *pair: hjepa.ContrastiveJEPALoss(base)(predictions, targets, *pair)["contrastive_loss"]
    for chosen, pair in ((True, views[:2]), (False, views[2:])):
        loss = hjepa.ContrastiveJEPALoss(base, contrastive_on_context=chosen)
        assert loss(predictions, targets, *views)["contrastive_loss"] == single(*pair)


def test_contrastive_losses_are_summed_or_left_by_row():
    x, y = torch.randn(5, 4), torch.randn(5, 4)
    mean, total, rows = (hjepa.NTXentLoss(reduction=one)(x, y)["loss"] for one in ("mean", "sum", "none"))
    assert rows.shape == (10,)
    assert total == pytest.approx(10 * mean.item(), rel=1e-5)
    assert rows.mean() == pytest.approx(mean.item(), rel=1e-5)


def test_a_summary_names_every_term():
    loss = hjepa.CombinedLoss()
    found = loss(*levels_of())
    lines = loss.get_loss_summary(found).splitlines()
    assert [line.split(":")[0] for line in lines] == list(found)
    assert f"loss: {found['loss'].item():.6f}" in lines


def test_targets_get_no_gradient_unless_asked():
    predictions, targets = levels_of()
    targets = [x.requires_grad_() for x in targets]
    hjepa.HJEPALoss()(predictions, targets)["loss"].backward()
    assert targets[0].grad is None
    hjepa.HJEPALoss(detach_targets=False)(predictions, targets)["loss"].backward()
    assert targets[0].grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: hjepa.HJEPALoss(loss_type="l3"), "loss_type='l3' is unknown"),
        (lambda: hjepa.HJEPALoss(reduction="max"), "reduction='max' is unknown"),
        (lambda: hjepa.HJEPALoss(num_hierarchies=0), "num_hierarchies=0 must be at least 1"),
        (lambda: hjepa.HJEPALoss(hierarchy_weights=[1.0, 2.0]), "2 weights for 3 levels"),
        (lambda: hjepa.CombinedLoss(vicreg_weight=[0.1]), "1 weights for 3 levels"),
        (lambda: hjepa.SIGRegLoss(test_method="ks"), "test_method='ks' is unknown"),
        (lambda: hjepa.VICRegLoss()(torch.zeros(3, 4)), "even batch"),
        (lambda: hjepa.NTXentLoss()(torch.zeros(3, 4), torch.zeros(2, 4)), "wanted equal ones"),
        (lambda: hjepa.HJEPALoss()(*(x[:2] for x in levels_of())), "got 2 predictions, 2 targets"),
        (lambda: hjepa.HJEPALoss()(levels_of()[0], [x[:, :1] for x in levels_of()[1]]), "differ in shape"),
        (lambda: hjepa.HJEPALoss()(*levels_of(), [None, torch.ones(4, 5), None]), "level 1: mask"),
        (lambda: hjepa.HJEPALoss(reduction="none")(*levels_of()), "levels of different shapes have no sum"),
        (lambda: hjepa.VICRegLoss()(torch.zeros(4), torch.zeros(4)), "wanted .row, width."),
        (lambda: hjepa.ContrastiveJEPALoss(hjepa.HJEPALoss())(*levels_of()), "wants two views"),
        (lambda: hjepa.VICRegLoss(invariance_weight=-1.0), "invariance_weight=-1.0 must not be negative"),
        (lambda: hjepa.AdaptiveVICRegLoss(covariance_weight=-1.0), "covariance_weight=-1.0 must not be negative"),
        (lambda: hjepa.SIGRegLoss(sigreg_weight=-1), "sigreg_weight=-1 must not be negative"),
        (lambda: hjepa.SIGRegLoss(num_slices=0), "num_slices=0.*wanted at least 1"),
        (lambda: hjepa.HybridVICRegSIGRegLoss(-0.5), "vicreg_weight=-0.5 must not be negative"),
        (lambda: hjepa.CombinedLoss(vicreg_weight=-1), "vicreg_weight=-1 must not be negative"),
        (lambda: hjepa.HJEPALoss(hierarchy_weights=[1, -1, 1]), "hierarchy_weights=-1 must not be negative"),
        (lambda: hjepa.ContrastiveJEPALoss(None, contrastive_weight=-1), "contrastive_weight=-1 must not"),
        (lambda: hjepa.NTXentLoss(reduction="max"), "reduction='max' is unknown"),
        (lambda: hjepa.NTXentLoss()(torch.zeros(2, 4), torch.zeros(2, 4), torch.ones(2)), "mask is not supported"),
        (lambda: hjepa.create_loss_from_config({"loss": {"type": "l3"}}), "'l3' is unknown"),
        (lambda: hjepa.create_loss_from_config({"type": "l3"}), "'l3' is unknown"),
        (lambda: hjepa.create_loss_from_config({"loss": {"herarchy_weights": [1.0]}}), "did you mean 'hierarchy_w"),
        (lambda: hjepa.create_loss_from_config({"type": "mse", "no": 1}), "loss.no: unknown key"),
        (lambda: hjepa.create_loss_from_config({"loss": "mse"}), "wanted a mapping"),
    ],
)
def test_mistakes_are_value_errors(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({}, "CombinedLoss"),
        ({"type": "mse"}, "HJEPALoss"),
        ({"type": "HJEPA", "jepa_loss_type": "huber"}, "HJEPALoss"),
        ({"type": "jepa", "use_contrastive": True}, "ContrastiveJEPALoss"),
        ({"type": "hierarchical_combined"}, "HierarchicalCombinedLoss"),
        ({"type": "vicreg"}, "VICRegLoss"),
        ({"type": "sigreg", "sigreg_num_slices": 8}, "SIGRegLoss"),
        ({"type": "hjepa_sigreg", "sigreg_num_slices": 8}, "HJEPASIGRegLoss"),
        ({"type": "contrastive_jepa"}, "ContrastiveJEPALoss"),
    ],
)
def test_the_registry_gives_a_torch_loss_that_a_trainer_can_call(section, kind):
    loss = hjepa.create_loss_from_config({"loss": section, "model": {"num_hierarchies": 3}})
    assert type(loss).__name__ == kind
    predictions, targets = levels_of()
    context = torch.randn(4, 9, 8, requires_grad=True)
    options = {"target_features": torch.randn(4, 9, 8)} if kind == "ContrastiveJEPALoss" else {}
    found = loss(predictions=predictions, targets=targets, context_features=context, **options)
    found["loss"].backward()
    assert predictions[0].grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("section", "kind"),
    [
        ({"type": "sigreg", "sigreg_num_slices": 512}, "SIGRegLoss"),
        ({"type": "mse", "hierarchy_weights": [1, 0.5, 0.25]}, "HJEPALoss"),
        ({"type": "vicreg"}, "VICRegLoss"),
        ({"num_hierarchies": 2, "vicreg_weight": 0.2}, "CombinedLoss"),
        ({"type": "cjepa", "use_cosine_similarity": False, "jepa_weight": 2.0}, "ContrastiveJEPALoss"),
    ],
)
def test_the_loss_section_alone_is_read_as_the_whole_config(section, kind):
    flat, nested = (hjepa.create_loss_from_config(one) for one in (section, {"loss": section, "training": {}}))
    assert type(flat).__name__ == type(nested).__name__ == kind
    assert repr(flat) == repr(nested)
    assert getattr(flat, "num_hierarchies", 3) == section.get("num_hierarchies", 3)


def test_a_contrastive_loss_is_built_around_ones_own():
    base = hjepa.HJEPALoss("mse")
    config = {"loss": {"contrastive_weight": 0.5, "contrastive_temperature": 0.2, "contrastive_on_context": True}}
    loss = hjepa.create_cjepa_loss_from_config(config, base)
    assert loss.jepa_loss is base
    assert (loss.contrastive_weight, loss.contrastive.temperature, loss.contrastive_on_context) == (0.5, 0.2, True)


def test_a_jepa_type_with_vicreg_keys_is_warned_about():
    with pytest.warns(UserWarning, match="no VICReg term"):
        hjepa.create_loss_from_config({"loss": {"type": "mse", "vicreg_weight": 0.5}})


@pytest.mark.filterwarnings("error")
def test_adaptive_weights_print_without_a_warning():
    assert "invariance_weight=25" in repr(hjepa.AdaptiveVICRegLoss(adaptive_weights=True))


def test_adaptive_weights_move_towards_the_smaller_terms():
    loss = hjepa.AdaptiveVICRegLoss(adaptive_weights=True, weight_momentum=0.5)
    assert len(list(loss.parameters())) == 3
    loss.update_weights({"invariance_loss": 1.0, "variance_loss": 3.0, "covariance_loss": 0.0})
    got = [getattr(loss, f"{name}_weight").item() for name in ("invariance", "variance", "covariance")]
    assert got == pytest.approx([25 / 2 + 22.5 / 2, 25 / 2 + 7.5 / 2, 1.5])
    fixed = hjepa.AdaptiveVICRegLoss()
    fixed.update_weights({"invariance_loss": 1.0, "variance_loss": 3.0, "covariance_loss": 0.0})
    assert (list(fixed.parameters()), fixed.invariance_weight) == ([], 25.0)


def test_fixed_slices_repeat_and_others_follow_torchs_seed():
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    fixed = hjepa.SIGRegLoss(num_slices=4, fixed_slices=True)
    assert fixed(x, y)["loss"] == fixed(x, y)["loss"]
    free = hjepa.SIGRegLoss(num_slices=4)
    torch.manual_seed(1)
    first = free(x, y)["loss"]
    assert free(x, y)["loss"] != first
    torch.manual_seed(1)
    assert free(x, y)["loss"] == first
