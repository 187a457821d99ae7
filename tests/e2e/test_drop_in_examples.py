"""The examples of the drop-ins, the same file under both engines. `python -m benchmarks.drop_in` runs all of them."""

import pytest

from benchmarks import drop_in


def test_there_are_18_examples():
    assert len(drop_in.scripts()) == 18


def test_a_table_counts_what_is_equal_and_what_is_slower():
    row = {"steps": 3, "loss": 1e-6, "metric": 0.0, "files": True, "compile_s": 4.0}
    row |= {"seconds": [0.2, 0.1], "processor": [0.2, 0.1]}
    text = drop_in.table({"a": row, "b": row | {"seconds": [0.1, 0.2], "loss": 2e-4}}, "2 cores")
    assert text.endswith("1 of 2 equal; geometric means of the ratios 1.00 and 2.00; slower: 1 and 0.")


def test_a_difference_in_length_value_or_files_is_found():
    base = {"loss": [1.0, 2.0], "seconds": [0.1, 0.2], "metrics": {"a": 1.0}, "files": ["f"]}
    base |= {"processor": [0.1, 0.2], "whole_processor_s": 1.0}
    assert drop_in.equal(drop_in.compare(base, base))
    for other in ({"loss": [1.0, 2.001]}, {"loss": [1.0]}, {"metrics": {"b": 1.0}}, {"files": []}):
        assert not drop_in.equal(drop_in.compare(base, base | other))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lightning_autoencoder", "transformers_glue", "accelerate_complete_nlp"])
def test_an_example_is_the_same_under_both_engines(tmp_path, name):
    pytest.importorskip("lightning")
    runs = [drop_in.run(name, engine, tmp_path) for engine in (name.partition("_")[0], "jaxtrain")]
    assert drop_in.equal(drop_in.compare(*runs))
