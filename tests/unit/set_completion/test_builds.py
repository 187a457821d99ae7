import re

import pytest
from safetensors.numpy import load_file

from jaxtrain.systems.set_completion import builds, reconstruct
from jaxtrain.systems.set_completion.prediction import Predictor
from tests.parity import set_training as parity
from tests.unit.set_completion.golden import FOLDER, table

CASE = table("reconstruct")


def as_recorded(build):
    if build is None:
        return None
    points = {"total_ap": build.total_ap, "achieved_ap": build.achieved_ap}
    return {"mains": dict(build.mains), "subs": dict(build.subs), **points}


@pytest.fixture(scope="module")
def predictor():
    params = parity.group(load_file(FOLDER / "reconstruct.safetensors"), "param/")
    return Predictor(parity.build_model(CASE["config"], params), CASE["vocab"], CASE["weapon_vocab"])


def test_the_allocator_finds_the_originals_builds():
    for case in CASE["allocator"]:
        build, overshoot = builds.allocate(case["capstones"])
        assert (as_recorded(build), overshoot) == (case["build"], case["penalty"])


@pytest.mark.parametrize("number", range(len(CASE["cases"])))
def test_greedy_closure_equals_the_original(predictor, number):
    case = CASE["cases"][number]
    state = reconstruct.greedy_closure(predictor.for_weapon(case["weapon"]), case["context"])
    assert list(state.tokens) == case["greedy_capstones"]
    assert state.score == pytest.approx(case["greedy_score"], abs=1e-5)
    assert builds.expand(state.tokens) == case["expanded_context"]


@pytest.mark.parametrize("number", range(len(CASE["cases"])))
def test_beam_search_equals_the_original(predictor, number):
    case = CASE["cases"][number]
    predict = predictor.for_weapon(case["weapon"])
    for key in (key for key in case if key.startswith("builds")):
        found = reconstruct.reconstruct(predict, case["context"], *map(int, re.findall(r"=(\d+)", key)))
        assert [as_recorded(candidate.build) for candidate in found] == case[key]


def test_most_likely_tokens_equal_the_original(predictor):
    for case in CASE["cases"]:
        probabilities = predictor.predict(case["context"], case["weapon"])
        best = sorted(probabilities.items(), key=lambda item: -item[1])[:8]
        assert [token for token, _ in best] == [token for token, _ in case["top8"]]
