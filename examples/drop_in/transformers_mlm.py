"""Masked language modelling, as run_mlm: python examples/drop_in/transformers_mlm.py --engine transformers|jaxtrain"""

import math
from itertools import chain

import common
from data import paragraphs, tokenizer
from datasets import Dataset
from transformers import (
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    RobertaConfig,
    TrainingArguments,
    set_seed,
)

args = common.parse_args("transformers")
if args.engine == "jaxtrain":
    from jaxtrain.transformers import Trainer
else:
    from transformers import Trainer

MAX_SEQ_LENGTH = 64


def main():
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        weight_decay=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=6,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        report_to=[],
        use_cpu=args.device == "cpu",
        disable_tqdm=True,
    )
    set_seed(training_args.seed)
    tok = tokenizer()
    config = RobertaConfig(
        vocab_size=len(tok), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=80, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=tok.pad_token_id, bos_token_id=tok.cls_token_id, eos_token_id=tok.sep_token_id,
    )  # fmt: skip
    model = AutoModelForMaskedLM.from_config(config)

    def group_texts(examples):
        concatenated = {k: list(chain(*examples[k])) for k in examples}
        total = len(concatenated["input_ids"]) // MAX_SEQ_LENGTH * MAX_SEQ_LENGTH
        return {
            k: [t[i : i + MAX_SEQ_LENGTH] for i in range(0, total, MAX_SEQ_LENGTH)] for k, t in concatenated.items()
        }

    def tokenized(count, seed):
        made = Dataset.from_dict(paragraphs(count, seed))
        made = made.map(
            lambda examples: tok(examples["text"], return_special_tokens_mask=True), batched=True,
            remove_columns=["text"],
        )  # fmt: skip
        return made.map(group_texts, batched=True)

    curve = common.Curve(args)
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokenized(500, 0),
        eval_dataset=tokenized(60, 1),
        processing_class=tok,
        data_collator=DataCollatorForLanguageModeling(tokenizer=tok, mlm_probability=0.15),
        callbacks=[curve.transformers_callback()],
    )
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    curve.finish(eval_loss=metrics["eval_loss"], perplexity=math.exp(metrics["eval_loss"]))


if __name__ == "__main__":
    main()
