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


def test_sigregs_options_have_a_configs_names_too():
    options = {
        "sigreg_num_slices": 5,
        "sigreg_fixed_slices": True,
        "sigreg_weight": 3.0,
        "sigreg_invariance_weight": 2.0,
    }
    loss = hjepa.HJEPASIGRegLoss(sigreg_loss_weight=0.5, **options).sigreg_loss
    assert (loss.num_slices, loss.fixed_slices, loss.sigreg_weight, loss.invariance_weight) == (5, True, 3.0, 2.0)


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
        (lambda: hjepa.ContrastiveJEPALoss()(*levels_of()), "wants two views"),
        (lambda: hjepa.create_loss_from_config({"loss": {"type": "l3"}}), "'l3' is unknown"),
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


def test_a_jepa_type_with_vicreg_keys_is_warned_about():
    with pytest.warns(UserWarning, match="no VICReg term"):
        hjepa.create_loss_from_config({"loss": {"type": "mse", "vicreg_weight": 0.5}})


@pytest.mark.filterwarnings("error")
def test_adaptive_weights_print_without_a_warning():
    assert "invariance_weight=25" in repr(hjepa.AdaptiveVICRegLoss())


def test_adaptive_weights_move_towards_the_smaller_terms():
    loss = hjepa.AdaptiveVICRegLoss(weight_momentum=0.5)
    assert len(list(loss.parameters())) == 3
    loss.update_weights({"invariance_loss": 1.0, "variance_loss": 3.0, "covariance_loss": 0.0})
    got = [getattr(loss, f"{name}_weight").item() for name in ("invariance", "variance", "covariance")]
    assert got == pytest.approx([25 / 2 + 22.5 / 2, 25 / 2 + 7.5 / 2, 1.5])


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
