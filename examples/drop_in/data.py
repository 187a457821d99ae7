"""Small data sets made on the spot: nothing is downloaded."""

import numpy as np
import torch
from torch.utils.data import TensorDataset, random_split

WORDS = ["film", "plot", "actor", "scene", "music", "story", "ending", "script", "camera", "voice"]
GOOD = ["great", "lovely", "clever", "warm", "brilliant"]
BAD = ["dull", "awful", "clumsy", "cold", "boring"]


def digits(size: int = 28, channels: int = 1) -> TensorDataset:
    """scikit-learn's 1797 digits as float [channels, size, size], and their labels.

    With a little noise, as a scanner's: over pixels that are all alike, ties and kinks make any two runs part.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(images.astype(np.float32)).reshape(-1, 1, 8, 8) / 16
    images = torch.nn.functional.interpolate(images, size, mode="bilinear", align_corners=False)
    images = images + 0.1 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return TensorDataset(images.expand(-1, channels, -1, -1).contiguous(), torch.from_numpy(labels))


def split(dataset, first: int, second: int | None = None):
    """Two parts of a data set, drawn at random, always the same."""
    second = len(dataset) - first if second is None else second
    rest = len(dataset) - first - second
    return random_split(dataset, [first, second, rest], torch.Generator().manual_seed(0))[:2]


def reviews(count: int, seed: int = 0, least: int = 5, most: int = 30) -> dict[str, list]:
    """Sentences with a good or a bad word in most places that matter: {"sentence", "label"}."""
    rng = np.random.default_rng(seed)
    rows = {"sentence": [], "label": []}
    for _ in range(count):
        label = int(rng.integers(2))
        words = rng.choice(WORDS, rng.integers(least, most + 1)).tolist()
        for place in rng.choice(len(words), 2, replace=False):
            words[place] = str(rng.choice(GOOD if label else BAD))
        rows["sentence"].append(" ".join(words))
        rows["label"].append(label)
    return rows


def paragraphs(count: int, seed: int = 0) -> dict[str, list]:
    """Text in which every word follows from the one before: {"text"}."""
    rng = np.random.default_rng(seed)
    vocabulary = WORDS + GOOD + BAD
    rows = []
    for _ in range(count):
        place, words = int(rng.integers(len(vocabulary))), []
        for _ in range(int(rng.integers(20, 60))):
            words.append(vocabulary[place])
            place = (3 * place + 1 + int(rng.integers(2))) % len(vocabulary)
        rows.append(" ".join(words))
    return {"text": rows}


def tokenizer():
    """A word-level tokenizer over the sentences' words, as a transformers tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS, *GOOD, *BAD, "what", "was"])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )  # fmt: skip
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=128,
    )  # fmt: skip
