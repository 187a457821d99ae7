"""Classify images, as run_image_classification:
python examples/drop_in/transformers_image_classification.py --engine transformers|jaxtrain"""

import common
import numpy as np
import torch
from data import digits, split
from transformers import AutoModelForImageClassification, TrainingArguments, ViTConfig, set_seed

args = common.parse_args("transformers")
if args.engine == "jaxtrain":
    from jaxtrain.transformers import Trainer
else:
    from transformers import Trainer


class Images(torch.utils.data.Dataset):
    """The examples of an image folder, {"image", "label"}, with transforms applied when they are read."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        image, label = self.dataset[index]
        return {"pixel_values": (image - 0.5) / 0.5, "label": int(label)}


def collate_fn(examples):
    pixel_values = torch.stack([example["pixel_values"] for example in examples])
    labels = torch.tensor([example["label"] for example in examples])
    return {"pixel_values": pixel_values, "labels": labels}


def compute_metrics(p):
    return {"accuracy": float((np.argmax(p.predictions, axis=1) == p.label_ids).mean())}


def main():
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        remove_unused_columns=False,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=1e-3,
        optim="adamw_torch",
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        report_to=[],
        use_cpu=args.device == "cpu",
        disable_tqdm=True,
    )
    set_seed(training_args.seed)
    config = ViTConfig(
        image_size=32, patch_size=8, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=128, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
    )  # fmt: skip
    model = AutoModelForImageClassification.from_config(config)
    train_set, val_set = split(digits(size=32, channels=3), 480, 128)
    curve = common.Curve(args)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=Images(train_set),
        eval_dataset=Images(val_set),
        compute_metrics=compute_metrics,
        data_collator=collate_fn,
        callbacks=[curve.transformers_callback()],
    )
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    curve.finish(eval_loss=metrics["eval_loss"], eval_accuracy=metrics["eval_accuracy"])


if __name__ == "__main__":
    main()
