"""Perplexity of a checkpoint on a dataset, and text from a prompt."""

import argparse
import json
import math
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoTokenizer

from jaxtrain.systems.memory_lm import (
    MemoryAdapter,
    MemoryTransformer,
    configure_tokenizer_special_ids,
    create_dataloader,
    extract_memory_weights,
    generate,
    generate_batch,
    load_config,
    quantize_memory_for_deployment,
)


def load_model(checkpoint, config, device):
    kind = MemoryAdapter if config.model.base_model_name else MemoryTransformer
    model = kind(config)
    state = torch.load(Path(checkpoint) / "model.pt", map_location=device, weights_only=True)
    model.load_state_dict(state)
    return model.to(device).eval()


@torch.no_grad()
def perplexity(model, loader, device, max_samples, use_cache):
    total, tokens, samples = 0.0, 0, 0
    for batch in tqdm(loader, desc="evaluating", disable=None):
        batch = {key: value.to(device) for key, value in batch.items()}
        outputs = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=batch["labels"],
            use_cache=use_cache,
        )
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs.loss
        count = int((batch["labels"][:, 1:] != -100).sum())
        total, tokens, samples = total + loss.item() * count, tokens + count, samples + len(batch["input_ids"])
        if max_samples and samples >= max_samples:
            break
    average = total / max(tokens, 1)
    return {"perplexity": math.exp(min(average, 50)), "avg_loss": average, "num_samples": samples}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--max_samples", type=int)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", required=True)
    parser.add_argument("--use_cache", action="store_true")
    parser.add_argument("--prompt", default="two?")
    args = parser.parse_args()
    config = load_config(args.config or str(Path(args.checkpoint) / "config.yaml"))
    tokenizer = AutoTokenizer.from_pretrained(config.model.tokenizer_name or config.model.base_model_name)
    configure_tokenizer_special_ids(tokenizer, config.model)
    model = load_model(args.checkpoint, config, args.device)
    loader = create_dataloader(
        dataset_name=args.dataset,
        tokenizer=tokenizer,
        batch_size=args.batch_size,
        max_length=config.training.max_length,
        split=args.split,
        text_field=config.training.text_field,
        training_mode=config.training.training_mode,
        num_workers=0,
        shuffle=False,
        num_samples=args.max_samples,
        drop_last=False,
    )
    results = perplexity(model, loader, args.device, args.max_samples, args.use_cache)
    results |= {"dataset": args.dataset, "split": args.split, "checkpoint": args.checkpoint}
    options = {"max_new_tokens": 4, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "device": args.device}
    torch.manual_seed(0)
    results["sampled"] = generate(model, tokenizer, args.prompt, **options)
    results["greedy"] = generate_batch(model, tokenizer, [args.prompt, "one and two?"], do_sample=False, **options)
    weights = extract_memory_weights(model, str(Path(args.output).with_suffix(".pt")))
    results["memory_tensors"] = len(weights)
    quantize_memory_for_deployment(model, bits=8)
    Path(args.output).write_text(json.dumps(results, indent=2))
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
