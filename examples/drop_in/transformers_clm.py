"""Causal language modelling, as run_clm: python examples/drop_in/transformers_clm.py --engine transformers|jaxtrain"""

import math
from itertools import chain

import common
from data import paragraphs, tokenizer
from datasets import Dataset
from transformers import AutoModelForCausalLM, GPT2Config, TrainingArguments, default_data_collator, set_seed

args = common.parse_args("transformers")
if args.engine == "jaxtrain":
    from jaxtrain.transformers import Trainer
else:
    from transformers import Trainer

BLOCK_SIZE = 64


def main():
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        max_grad_norm=0.5,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=30,
        save_steps=30,
        save_total_limit=1,
        report_to=[],
        use_cpu=args.device == "cpu",
        disable_tqdm=True,
    )
    set_seed(training_args.seed)
    tok = tokenizer()
    config = GPT2Config(
        vocab_size=len(tok), n_embd=64, n_layer=2, n_head=4, n_positions=128, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=tok.cls_token_id, eos_token_id=tok.sep_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)

    def group_texts(examples):
        concatenated = {k: list(chain(*examples[k])) for k in examples}
        total = len(concatenated["input_ids"]) // BLOCK_SIZE * BLOCK_SIZE
        result = {k: [t[i : i + BLOCK_SIZE] for i in range(0, total, BLOCK_SIZE)] for k, t in concatenated.items()}
        result["labels"] = result["input_ids"].copy()
        return result

    def tokenized(count, seed):
        made = Dataset.from_dict(paragraphs(count, seed))
        made = made.map(lambda examples: tok(examples["text"]), batched=True, remove_columns=["text"])
        return made.map(group_texts, batched=True)

    def preprocess_logits_for_metrics(logits, labels):
        return logits.argmax(dim=-1)

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        labels, preds = labels[:, 1:].reshape(-1), preds[:, :-1].reshape(-1)
        return {"accuracy": float((preds == labels).mean())}

    curve = common.Curve(args)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokenized(500, 0),
        eval_dataset=tokenized(60, 1),
        processing_class=tok,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        callbacks=[curve.transformers_callback()],
    )
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    curve.finish(
        eval_loss=metrics["eval_loss"],
        eval_accuracy=metrics["eval_accuracy"],
        perplexity=math.exp(metrics["eval_loss"]),
    )


if __name__ == "__main__":
    main()
