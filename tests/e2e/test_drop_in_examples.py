"""The examples of the drop-ins, the same file under both engines. `python -m benchmarks.drop_in` runs all of them."""

import pytest

from benchmarks import drop_in


def test_there_are_18_examples():
    assert len(drop_in.scripts()) == 18


def test_a_difference_in_length_value_files_or_random_state_is_found():
    base = {"loss": [1.0, 2.0], "seconds": [0.1, 0.2], "metrics": {"a": 1.0}, "files": ["f"]}
    base |= {"processor": [0.1, 0.2], "whole_processor_s": 1.0, "random": ["a", "b"]}
    assert drop_in.equal(drop_in.compare(base, base))
    for other in (
        {"loss": [1.0, 2.001]},
        {"loss": [1.0]},
        {"metrics": {"b": 1.0}},
        {"files": []},
        {"random": ["a", "c"]},
    ):
        assert not drop_in.equal(drop_in.compare(base, base | other))


@pytest.mark.slow
@pytest.mark.parametrize("name", drop_in.scripts())
def test_an_example_is_the_same_under_both_engines(tmp_path, name):
    """Over 60 steps, which cross an epoch's boundary: losses, metrics, files, and the random generators' states, from
    which the next epoch's order is drawn."""
    pytest.importorskip("lightning")
    runs = [drop_in.run(name, engine, tmp_path) for engine in (name.partition("_")[0], "jaxtrain")]
    assert len(set(runs[0]["random"])) > 1  # an epoch's order was drawn
    assert drop_in.equal(drop_in.compare(*runs))
