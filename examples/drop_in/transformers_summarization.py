"""Sequence to sequence with generated evaluation, as run_summarization:
python examples/drop_in/transformers_summarization.py --engine transformers|jaxtrain"""

import common
import numpy as np
from data import reviews, tokenizer
from datasets import Dataset
from transformers import (
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainingArguments,
    T5Config,
    set_seed,
)

args = common.parse_args("transformers")
if args.engine == "jaxtrain":
    from jaxtrain.transformers import Seq2SeqTrainer
else:
    from transformers import Seq2SeqTrainer


def documents(count: int, seed: int) -> Dataset:
    """Sentences, and a summary of their first three words."""
    rows = reviews(count, seed, least=6, most=30)["sentence"]
    return Dataset.from_dict({"document": rows, "summary": [" ".join(row.split()[:3]) for row in rows]})


def main():
    training_args = Seq2SeqTrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=32,
        learning_rate=1e-3,
        label_smoothing_factor=0.1,
        predict_with_generate=True,
        generation_max_length=8,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=args.device == "cpu",
        disable_tqdm=True,
    )
    set_seed(training_args.seed)
    tok = tokenizer()
    config = T5Config(
        vocab_size=len(tok), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=tok.pad_token_id, pad_token_id=tok.pad_token_id, eos_token_id=tok.sep_token_id,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config)

    def preprocess_function(examples):
        model_inputs = tok(examples["document"], max_length=64, truncation=True)
        model_inputs["labels"] = tok(text_target=examples["summary"], max_length=8, truncation=True)["input_ids"]
        return model_inputs

    raw = {"train": documents(480, 0), "validation": documents(64, 1)}
    processed = {
        name: split.map(preprocess_function, batched=True, remove_columns=["document", "summary"])
        for name, split in raw.items()
    }

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        preds = np.where(preds != -100, preds, tok.pad_token_id)
        labels = np.where(labels != -100, labels, tok.pad_token_id)
        decoded = [tok.batch_decode(rows, skip_special_tokens=True) for rows in (preds, labels)]
        exact = np.mean([a == b for a, b in zip(*decoded, strict=True)])
        return {"exact": float(exact), "gen_len": float(np.mean([np.count_nonzero(p) for p in preds]))}

    curve = common.Curve(args)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=processed["train"],
        eval_dataset=processed["validation"],
        processing_class=tok,
        data_collator=DataCollatorForSeq2Seq(tok, model=model, label_pad_token_id=-100),
        compute_metrics=compute_metrics,
        callbacks=[curve.transformers_callback()],
    )
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate(max_length=8, num_beams=2, metric_key_prefix="eval")
    names = ("eval_loss", "eval_exact", "eval_gen_len")
    curve.finish(**{name: metrics[name] for name in names})


if __name__ == "__main__":
    main()
