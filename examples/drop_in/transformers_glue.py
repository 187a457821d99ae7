"""Classify sentences, as run_glue: python examples/drop_in/transformers_glue.py --engine transformers|jaxtrain"""

import common
import numpy as np
from data import reviews, tokenizer
from datasets import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    EvalPrediction,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

args = common.parse_args("transformers")
if args.engine == "jaxtrain":
    from jaxtrain.transformers import Trainer
else:
    from transformers import Trainer


def main():
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=16,
        learning_rate=5e-4,
        weight_decay=0.01,
        warmup_steps=10,
        lr_scheduler_type="linear",
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=30,
        save_strategy="steps",
        save_steps=30,
        load_best_model_at_end=True,
        metric_for_best_model="accuracy",
        report_to=[],
        use_cpu=args.device == "cpu",
        disable_tqdm=True,
    )
    set_seed(training_args.seed)
    tok = tokenizer()
    config = BertConfig(
        vocab_size=len(tok), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=2,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)

    def preprocess_function(examples):
        return tok(examples["sentence"], padding="max_length", max_length=32, truncation=True)

    raw = {"train": Dataset.from_dict(reviews(640, 0)), "validation": Dataset.from_dict(reviews(128, 1))}
    processed = {name: split.map(preprocess_function, batched=True) for name, split in raw.items()}

    def compute_metrics(p: EvalPrediction):
        preds = np.argmax(p.predictions, axis=1)
        return {"accuracy": float((preds == p.label_ids).mean())}

    curve = common.Curve(args)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=processed["train"],
        eval_dataset=processed["validation"],
        compute_metrics=compute_metrics,
        processing_class=tok,
        data_collator=default_data_collator,
        callbacks=[curve.transformers_callback()],
    )
    train_result = trainer.train()
    trainer.save_model()
    trainer.save_metrics("train", train_result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    predictions = trainer.predict(processed["validation"]).predictions
    curve.finish(
        train_loss=train_result.metrics["train_loss"],
        eval_loss=metrics["eval_loss"],
        eval_accuracy=metrics["eval_accuracy"],
        mean_logit=np.abs(predictions).mean(),
    )


if __name__ == "__main__":
    main()
