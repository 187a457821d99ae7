"""Sampling rules, ends, batches, multiple choice."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm import decoding, generation
from jaxtrain.systems.memory_lm.decoding import Sampling, filtered, generate_ids
from jaxtrain.systems.memory_lm.evals import multiple_choice
from jaxtrain.systems.memory_lm.tokenizers import ByteTokenizer
from tests.unit.memory_lm.models import small, strategy

LOGITS = jnp.log(jnp.asarray([[0.1, 0.5, 0.15, 0.25]]))
BYTES = {"vocab_size": 258}


def kept(**options) -> list[int]:
    return np.flatnonzero(np.isfinite(filtered(LOGITS, Sampling(temperature=1.0, **options))[0])).tolist()


@pytest.mark.parametrize(("top_k", "wanted"), [(0, [0, 1, 2, 3]), (1, [1]), (2, [1, 3]), (9, [0, 1, 2, 3])])
def test_top_k_keeps_the_likeliest(top_k, wanted):
    assert kept(top_k=top_k, top_p=1.0) == wanted


@pytest.mark.parametrize(("top_p", "wanted"), [(1.0, [0, 1, 2, 3]), (0.01, [1]), (0.6, [1, 3]), (0.8, [1, 2, 3])])
def test_the_nucleus_keeps_tokens_until_their_mass_exceeds_top_p(top_p, wanted):
    assert kept(top_k=0, top_p=top_p) == wanted


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -1}])
def test_impossible_sampling_is_refused(options):
    with pytest.raises(UserError):
        Sampling(**options)


@pytest.mark.parametrize("name", ["token", "prefix"])
def test_a_batch_writes_what_each_prompt_gets_alone(name):
    model, prompts = small(**strategy(name)), [[5, 9, 3, 12], [4], [11, 2, 8, 30, 7, 1]]
    greedy = Sampling(do_sample=False)
    together = generate_ids(model, prompts, 6, greedy)
    for row, prompt in enumerate(prompts):
        assert together.tokens[row].tolist() == generate_ids(model, [prompt], 6, greedy).tokens[0].tolist()


def test_a_row_ends_after_the_end_token_and_is_padded():
    model, greedy = small(**strategy("token")), Sampling(do_sample=False)
    free = generate_ids(model, [[5, 9]], 8, greedy).tokens[0].tolist()
    end = free[3]
    first = free.index(end)
    ended = generate_ids(model, [[5, 9], [7]], 8, greedy, eos_token_id=end, pad_token_id=0)
    assert ended.tokens[0, : first + 1].tolist() == free[: first + 1]
    assert not ended.tokens[0, first + 1 :].any()
    assert ended.lengths[0] == first + 1


def test_no_new_token_gives_the_prompt_back():
    assert generate_ids(small(), [[3, 4]], 0).padded(0).tolist() == [[3, 4]]


def test_the_same_seed_writes_the_same_text():
    model, tokenizer = small(model=BYTES, **strategy("token")), ByteTokenizer()
    texts = [generation.generate(model, tokenizer, "ab", 8, seed=seed) for seed in (1, 1)]
    assert texts[0] == texts[1]


def test_all_bits_of_a_seed_count():
    model, free = small(), Sampling(temperature=5.0, top_p=1.0, top_k=0)
    drawn = [generate_ids(model, [[3, 4]], 24, free, seed=seed).tokens.tolist() for seed in (1, 2**32 + 1, 2**62 + 1)]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]


def test_an_empty_prompt_starts_from_the_end_token():
    assert generation.prompt_ids(ByteTokenizer(), "") == [256]


def test_scores_of_options_are_mean_log_probabilities():
    model, tokenizer = small(model=BYTES, **strategy("token")), ByteTokenizer()
    score = multiple_choice.score_options(model, tokenizer, [("ab", "cd")], 64)[0]
    logits = model.logits(jnp.asarray([[97, 98, 99, 100]]))[0]
    p = logits - jnp.log(jnp.exp(logits).sum(-1, keepdims=True))
    assert score == pytest.approx(float(p[1, 99] + p[2, 100]) / 2, abs=1e-5)


def test_the_likeliest_option_is_the_answer(tmp_path):
    model, tokenizer = small(model=BYTES, **strategy("token")), ByteTokenizer()
    question = {"question": "ab?", "choices": ["x", "yes", "no", "z"], "answer": "C"}
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(question))
    questions = multiple_choice.read_questions(path)
    result = multiple_choice.evaluate(model, tokenizer, questions, 64)
    prompt = multiple_choice.prompt_of(questions[0])
    scores = [multiple_choice.score_options(model, tokenizer, [(prompt, f" {c}")], 64)[0] for c in question["choices"]]
    assert result["predicted"] == [int(np.argmax(scores))]
    assert result["accuracy"] == float(np.argmax(scores) == 2)


def test_a_broken_question_is_reported_with_its_line(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "a", "choices": ["b"], "answer": 0}\n{"question": "a"}')
    with pytest.raises(UserError, match="line 2"):
        multiple_choice.read_questions(path)


def test_a_cached_window_is_pooled_without_its_padding():
    model = small(**strategy("hybrid"), routing_window_size=4)
    tokens, mask = np.array([[5, 9, 3, 0, 0]], np.int32), np.array([[1, 1, 1, 0, 0]], bool)
    padded = decoding.greedy_trace(model, tokens, mask, 3).tokens
    assert padded.tolist() == decoding.greedy_trace(model, tokens[:, :3], mask[:, :3], 3).tokens.tolist()
