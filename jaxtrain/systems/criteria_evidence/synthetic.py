"""Synthetic posts from a small vocabulary, in the annotation files' schema, with a signal to learn.

A symptom is present (status 1) if the annotated sentence holds one of the symptom's words and no negation. The
annotated sentence of a post is the one that begins with "honestly". There is no real text in this module.
"""

import functools

import numpy as np

from jaxtrain.systems.criteria_evidence.csv_files import Row

SYMPTOMS = {
    "SLEEP_ISSUES": ("awake", "insomnia", "sleepless"),
    "FATIGUE": ("tired", "exhausted", "drained"),
    "DEPRESSED_MOOD": ("hopeless", "empty", "sad"),
    "APPETITE_CHANGE": ("appetite", "hungry", "weight"),
}
FILLERS = (
    "today",
    "work",
    "friends",
    "walked",
    "reading",
    "music",
    "garden",
    "train",
    "coffee",
    "window",
    "morning",
    "evening",
    "river",
    "letter",
    "kitchen",
    "story",
    "market",
    "phone",
    "summer",
    "winter",
    "table",
    "bridge",
    "photo",
    "ticket",
)
OPENERS = ("then", "later", "maybe", "still")
NEGATIONS = ("never", "not")
COLUMNS = ("post_id", "sentence_id", "sentence_text", "DSM5_symptom", "status", "explanation", "post_text")


def rows(posts: int, seed: int = 0) -> list[Row]:
    """Return `posts` rows: one annotated sentence for each post of three or four sentences."""
    draw = np.random.Generator(np.random.Philox(key=[seed, 7]))
    pick = lambda options: options[int(draw.integers(len(options)))]
    result = []
    for post in range(posts):
        symptom = pick(tuple(SYMPTOMS))
        present = bool(draw.random() < 0.6)
        word, words = pick(SYMPTOMS[symptom]), [pick(FILLERS) for _ in range(int(draw.integers(3, 6)))]
        words.insert(int(draw.integers(len(words) + 1)), word)
        if not present:
            words.insert(words.index(word), pick(NEGATIONS))
        answer = f"honestly {' '.join(words)}."
        sentences = [
            f"{pick(OPENERS)} {' '.join(pick(FILLERS) for _ in range(int(draw.integers(3, 7))))}."
            for _ in range(int(draw.integers(2, 4)))
        ]
        position = int(draw.integers(len(sentences) + 1))
        sentences.insert(position, answer)
        values = (f"s_{post}", f"s_{post}_{position}", answer, symptom, str(int(present)), "", " ".join(sentences))
        result.append(dict(zip(COLUMNS, values, strict=True)))
    return result


def vocabulary() -> list[str]:
    words = {word for words in SYMPTOMS.values() for word in words}
    words |= {part for name in SYMPTOMS for part in name.lower().split("_")}
    words |= {*FILLERS, *OPENERS, *NEGATIONS, "honestly", "."}
    return ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words)]


@functools.cache
def tokenizer():
    """Return a lower-case WordPiece tokenizer of exactly this vocabulary; [PAD] is 0."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors

    from jaxtrain.systems.criteria_evidence.tokenization import Tokenizer

    ids = {word: i for i, word in enumerate(vocabulary())}
    backend = tokenizers.Tokenizer(models.WordPiece(ids, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    backend.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return Tokenizer(backend, "[PAD]", "synthetic")
