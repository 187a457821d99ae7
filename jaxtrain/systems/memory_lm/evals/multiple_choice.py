"""Score multiple-choice questions by the mean log-probability of each option after the question."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtrain.errors import UserError
from jaxtrain.systems.memory_lm.losses import IGNORE, token_losses

BUCKET = 64  # tokens; lengths are rounded up to a multiple, so that few shapes are compiled


def read_questions(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """Read JSON lines with `question` (text), `choices` (texts) and `answer` (index, or a letter from A).

    Raises UserError for a missing file or an invalid line.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise UserError(f"data.multiple_choice: {path} does not exist")
    questions = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            answer = row["answer"]
            answer = ord(answer.upper()) - ord("A") if isinstance(answer, str) and answer.isalpha() else int(answer)
            question = {"question": str(row["question"]), "choices": [str(c) for c in row["choices"]]}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{path}, line {number}: {type(error).__name__}: {error}; wanted "
                '{"question": "...", "choices": ["...", "..."], "answer": 0}'
            ) from None
        if not 0 <= answer < len(question["choices"]):
            raise UserError(f"{path}, line {number}: answer {answer} is none of {len(question['choices'])} choices")
        questions.append({**question, "answer": answer})
    return questions


def prompt_of(question: Mapping[str, Any], shots: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return `Question: ...\\nAnswer:` after the solved examples `shots`."""
    solved = [f"Question: {s['question']}\nAnswer: {s['choices'][s['answer']]}\n\n" for s in shots]
    return "".join(solved) + f"Question: {question['question']}\nAnswer:"


def score_options(
    model: nnx.Module, tokenizer, pairs: Sequence[tuple[str, str]], max_length: int, batch_size: int = 16
):
    """Return the mean log-probability per token of each option after its prompt, float64 [pair].

    Prompts are truncated on the left to fit max_length. An option without tokens scores -inf.
    """
    encoded = []
    for prompt, option in pairs:
        after = tokenizer.encode(option, special=False).ids[-(max_length - 1) :]
        before = tokenizer.encode(prompt).ids or [tokenizer.eos_token_id or 0]
        encoded.append((before[-(max_length - len(after)) :], after))
    scorer = _scorer(model)
    scores = np.zeros(len(pairs))
    order = np.argsort([len(before) + len(after) for before, after in encoded], kind="stable")
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        longest = max(len(encoded[i][0]) + len(encoded[i][1]) for i in chosen)
        width = min(max_length, -(-longest // BUCKET) * BUCKET)
        ids = np.full((batch_size, width), tokenizer.pad_token_id, np.int32)
        mask, labels = np.zeros((batch_size, width), bool), np.full((batch_size, width), IGNORE, np.int32)
        for row, i in enumerate(chosen):
            before, after = encoded[i]
            total = len(before) + len(after)
            ids[row, :total], mask[row, :total] = [*before, *after], True
            labels[row, len(before) : total] = after
        sums = np.asarray(scorer(ids, mask, labels), np.float64)[: len(chosen)]
        counts = np.array([len(encoded[i][1]) for i in chosen])
        scores[chosen] = np.where(counts > 0, sums / np.maximum(counts, 1), -np.inf)
    return scores


def _scorer(model: nnx.Module):
    graphdef, state = nnx.split(model)

    @jax.jit
    def score(state, ids, mask, labels):
        model = nnx.merge(graphdef, state)
        hidden = model(ids, mask).hidden
        return -token_losses(hidden[:, :-1], model.head_weight, labels[:, 1:], 1024).sum(1)

    return lambda ids, mask, labels: score(state, jnp.asarray(ids), jnp.asarray(mask), jnp.asarray(labels))


def evaluate(
    model: nnx.Module,
    tokenizer,
    questions: Sequence[Mapping[str, Any]],
    max_length: int,
    *,
    shots: Sequence[Mapping[str, Any]] = (),
    mode: str = "choice_text",
) -> dict[str, Any]:
    """Return accuracy, count and the predicted index per question.

    mode: choice_text scores " " + the option's text; label lists the options first and scores " A", " B", ... Raises
    UserError for another mode.
    """
    if mode not in ("choice_text", "label"):
        raise UserError(f"scoring mode {mode!r}, wanted choice_text or label")
    pairs, owner = [], []
    for number, question in enumerate(questions):
        prompt = prompt_of(question, shots)
        if mode == "label":
            listed = "".join(f"{chr(65 + i)}. {text}\n" for i, text in enumerate(question["choices"]))
            prompt = prompt.removesuffix("Answer:") + listed + "Answer:"
        for i, text in enumerate(question["choices"]):
            pairs.append((prompt, f" {chr(65 + i)}" if mode == "label" else f" {text}"))
            owner.append(number)
    scores = score_options(model, tokenizer, pairs, max_length) if pairs else np.zeros(0)
    owner = np.array(owner)
    predicted = [int(np.argmax(scores[owner == number])) for number in range(len(questions))]
    right = [p == q["answer"] for p, q in zip(predicted, questions, strict=True)]
    return {"accuracy": float(np.mean(right)) if right else 0.0, "count": len(questions), "predicted": predicted}
