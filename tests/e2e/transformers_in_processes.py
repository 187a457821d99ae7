"""A small Llama under transformers' Trainer with fsdp, in one of several processes: its losses as a line of JSON.
`python -m tests.e2e.transformers_in_processes FOLDER [resume]` under a launcher."""

import json
import os
import sys

import torch
import transformers

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STEPS, ROWS = 20, 8


def data() -> list[dict]:
    """Return token ids, of which each row's loss counts another number."""
    draw, rows = torch.Generator().manual_seed(0), []
    for _ in range(64):
        ids = torch.randint(0, 64, (12,), generator=draw)
        labels = ids.clone()
        labels[: int(ids[0]) % 8] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def trained(engine, folder: str, **options) -> tuple[list[float], dict[str, list]]:
    """Return the losses of 20 updates of two batches each, and the weights."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=32,
        )
    )  # fmt: skip
    arguments = transformers.TrainingArguments(
        folder, max_steps=STEPS, per_device_train_batch_size=ROWS // WORLD, gradient_accumulation_steps=2,
        learning_rate=1e-2, report_to=[], logging_steps=1, use_cpu=True, save_steps=10, disable_tqdm=True, **options,
    )  # fmt: skip
    trainer = engine.Trainer(model, arguments, train_dataset=data())
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, {name: value.tolist() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    import jaxtrain.transformers

    losses, state = trained(jaxtrain.transformers, sys.argv[1], fsdp="full_shard")
    print(json.dumps({"losses": losses, "state": state}), flush=True)
