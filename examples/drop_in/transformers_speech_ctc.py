"""Speech recognition with CTC on sounds of many lengths, as run_speech_recognition_ctc:
python examples/drop_in/transformers_speech_ctc.py --engine transformers|jaxtrain"""

from dataclasses import dataclass

import common
import numpy as np
import torch
from datasets import Dataset
from transformers import (
    AutoModelForCTC,
    TrainingArguments,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    set_seed,
)

args = common.parse_args("transformers")
if args.engine == "jaxtrain":
    from jaxtrain.transformers import Trainer
else:
    from transformers import Trainer

RATE, LETTERS = 1000, 6


def tones(extractor, count: int, seed: int) -> Dataset:
    """Spoken words: a row of tones, one for each of a word's letters."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        word = rng.integers(1, LETTERS + 1, rng.integers(2, 6))
        time = np.arange(160) / RATE
        sound = np.concatenate([np.sin(2 * np.pi * 40 * letter * time) for letter in word])
        sound = sound + 0.05 * rng.standard_normal(len(sound))
        values = extractor(sound.astype(np.float32), sampling_rate=RATE).input_values[0]
        rows.append({"input_values": values.tolist(), "labels": word.tolist()})
    return Dataset.from_list(rows)


@dataclass
class DataCollatorCTCWithPadding:
    """Pad sounds and labels to the longest of the batch."""

    def __call__(self, features):
        sounds = [np.float32(feature["input_values"]) for feature in features]
        longest = max(map(len, sounds))
        values = np.stack([np.pad(sound, (0, longest - len(sound))) for sound in sounds])
        mask = np.stack([np.arange(longest) < len(sound) for sound in sounds])
        longest = max(len(feature["labels"]) for feature in features)
        labels = np.stack(
            [np.pad(f["labels"], (0, longest - len(f["labels"])), constant_values=-100) for f in features]
        )
        return {
            "input_values": torch.from_numpy(values),
            "attention_mask": torch.from_numpy(mask.astype(np.int64)),
            "labels": torch.from_numpy(labels),
        }


def edits(a: list[int], b: list[int]) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]


def compute_metrics(pred):
    ids = np.argmax(pred.predictions, axis=-1)
    wrong = letters = 0
    for row, labels in zip(ids, pred.label_ids, strict=True):
        said = [x for x, before in zip(row, [0, *row[:-1]], strict=True) if x > 0 and x != before]
        wanted = [x for x in labels if x > 0]
        wrong, letters = wrong + edits(said, wanted), letters + len(wanted)
    return {"cer": wrong / letters}


def main():
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        warmup_steps=10,
        train_sampling_strategy="group_by_length",
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=args.device == "cpu",
        disable_tqdm=True,
    )
    set_seed(training_args.seed)
    config = Wav2Vec2Config(
        vocab_size=LETTERS + 1, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        conv_dim=(32, 32, 32), conv_stride=(4, 2, 2), conv_kernel=(8, 3, 3), num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, mask_time_prob=0.0, apply_spec_augment=False,
        feat_extract_norm="layer", ctc_loss_reduction="mean", ctc_zero_infinity=True, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCTC.from_config(config)
    model.freeze_feature_encoder()
    feature_extractor = Wav2Vec2FeatureExtractor(sampling_rate=RATE)
    curve = common.Curve(args)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tones(feature_extractor, 240, 0),
        eval_dataset=tones(feature_extractor, 48, 1),
        processing_class=feature_extractor,
        data_collator=DataCollatorCTCWithPadding(),
        compute_metrics=compute_metrics,
        callbacks=[curve.transformers_callback()],
    )
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    curve.finish(eval_loss=metrics["eval_loss"], eval_cer=metrics["eval_cer"])


if __name__ == "__main__":
    main()
