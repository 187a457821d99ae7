"""Extractive question answering, as run_qa, with a Trainer of its own for the evaluation:
python examples/drop_in/transformers_qa.py --engine transformers|jaxtrain"""

import common
import numpy as np
from data import WORDS, tokenizer
from datasets import Dataset
from scipy.special import softmax
from transformers import (
    AutoModelForQuestionAnswering,
    BertConfig,
    DataCollatorWithPadding,
    TrainingArguments,
    set_seed,
)

args = common.parse_args("transformers")
if args.engine == "jaxtrain":
    from jaxtrain.transformers import Trainer
else:
    from transformers import Trainer

ANSWERS = ["great", "lovely", "clever", "warm", "dull", "awful", "clumsy", "cold"]


def questions(count: int, seed: int) -> Dataset:
    """`what was film` over a context in which `film was great` stands somewhere."""
    rng = np.random.default_rng(seed)
    rows = {"question": [], "context": [], "answer": [], "answer_start": []}
    for _ in range(count):
        subjects = rng.permutation(WORDS)[:3]
        answers = rng.choice(ANSWERS, 3)
        parts = [f"{subject} was {answer}" for subject, answer in zip(subjects, answers, strict=True)]
        filler = [" ".join(rng.choice(WORDS[5:], rng.integers(1, 5))) for _ in parts]
        context = " ".join(f"{part} {words}" for part, words in zip(parts, filler, strict=True))
        rows["question"].append(f"what was {subjects[1]}")
        rows["context"].append(context)
        rows["answer"].append(str(answers[1]))
        rows["answer_start"].append(context.index(parts[1]) + len(f"{subjects[1]} was "))
    return Dataset.from_dict(rows)


class QuestionAnsweringTrainer(Trainer):
    """Trainer that turns logits into answers before it computes metrics."""

    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples = eval_examples
        self.post_process_function = post_process_function

    def evaluate(self, eval_dataset=None, eval_examples=None, ignore_keys=None, metric_key_prefix="eval"):
        eval_dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.evaluation_loop(
                self.get_eval_dataloader(eval_dataset), description="Evaluation", ignore_keys=ignore_keys,
                prediction_loss_only=False, metric_key_prefix=metric_key_prefix,
            )  # fmt: skip
        finally:
            self.compute_metrics = compute_metrics
        metrics = {f"{metric_key_prefix}_{k}": v for k, v in self.post_process_function(output, eval_dataset).items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def main():
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=16,
        learning_rate=1e-3,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        report_to=[],
        use_cpu=args.device == "cpu",
        disable_tqdm=True,
    )
    set_seed(training_args.seed)
    tok = tokenizer()
    config = BertConfig(
        vocab_size=len(tok), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = AutoModelForQuestionAnswering.from_config(config)

    def prepare_features(examples):
        tokenized = tok(
            examples["question"], examples["context"], truncation="only_second", max_length=48, padding="max_length",
            return_offsets_mapping=True,
        )  # fmt: skip
        starts = []
        for i, offsets in enumerate(tokenized.pop("offset_mapping")):
            wanted = examples["answer_start"][i]
            sequence = tokenized.sequence_ids(i)
            starts.append(next(k for k, (s, _) in enumerate(offsets) if sequence[k] == 1 and s == wanted))
        tokenized["start_positions"] = starts
        tokenized["end_positions"] = starts
        return tokenized

    columns = ["question", "context", "answer", "answer_start"]
    train = questions(480, 0).map(prepare_features, batched=True, remove_columns=columns)
    validation = questions(96, 1).map(prepare_features, batched=True, remove_columns=columns)

    def post_process(output, dataset):
        starts, ends = (np.argmax(logits, axis=1) for logits in output.predictions[:2])
        exact = (starts == dataset["start_positions"]) & (ends == dataset["end_positions"])
        return {
            "exact_match": 100 * float(exact.mean()),
            "confidence": float(softmax(output.predictions[0], axis=1).max(axis=1).mean()),
        }

    curve = common.Curve(args)
    trainer = QuestionAnsweringTrainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tok,
        data_collator=DataCollatorWithPadding(tok),
        post_process_function=post_process,
        callbacks=[curve.transformers_callback()],
    )
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    curve.finish(exact_match=metrics["eval_exact_match"], confidence=metrics["eval_confidence"])


if __name__ == "__main__":
    main()
