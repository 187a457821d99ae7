"""Write text with a trained language model: `python -m jaxtrain.generate --run runs/memory_lm_tiny --prompt "def "`."""

import argparse
import json
import pathlib

from jaxtrain import commands
from jaxtrain.errors import UserError
from torch_bridge.atomic_file import write_text


def main(argv: commands.Arguments = None) -> int:
    p = commands.parser(
        "generate",
        "Continue prompts with a checkpoint of a language model.",
        'python -m jaxtrain.generate --run runs/memory_lm_tiny --prompt "def main("',
    )
    commands.add_run(p)
    commands.add_checkpoint(p)
    p.add_argument("--prompt", action="append", default=[], help="repeat for several prompts; they run as one batch")
    p.add_argument("--prompts", metavar="F.jsonl", help='a file of prompts: one {"prompt": "..."} per line')
    p.add_argument("--chat", action="store_true", help="apply the tokenizer's chat template to every prompt")
    p.add_argument("--max-new-tokens", type=commands.count(1, 1_000_000), default=256, help="per prompt (default 256)")
    p.add_argument("--temperature", type=float, default=0.7, help="default 0.7")
    p.add_argument(
        "--top-k", type=commands.count(0), default=50, help="sample from the k most likely; 0: all (default 50)"
    )
    p.add_argument("--top-p", type=float, default=0.9, help="sample from this probability mass (default 0.9)")
    p.add_argument("--greedy", action="store_true", help="always take the most likely token")
    p.add_argument("--seed", type=commands.count(0, 2**63 - 1), default=0)
    p.add_argument("--quantize", type=int, choices=(4, 8), help="quantize the memory bank to this many bits")
    p.add_argument(
        "--output", type=commands.output_file, metavar="F.jsonl", help="write prompt and text here, as JSON lines"
    )
    commands.add_json(p)
    return commands.main(run, p.parse_args(argv))


def run(arguments: argparse.Namespace) -> None:
    commands.quiet_jax()
    from jaxtrain.systems.memory_lm import chat, generation
    from jaxtrain.systems.memory_lm.banks import quantize_memory_for_deployment
    from jaxtrain.systems.memory_lm.data import tokenizer_of
    from jaxtrain.train import run_dir

    prompts = _prompts(arguments)
    sampling = generation.Sampling(arguments.temperature, arguments.top_p, arguments.top_k, not arguments.greedy)
    config = run_dir.open_run(arguments.run)[1]
    if config.task is None or not config.task.startswith("memory_lm."):
        raise UserError(f"{arguments.run}: holds a run of {config.task}; only memory_lm models write text")
    model = run_dir.load_model(arguments.run, arguments.checkpoint)[2]
    bits = arguments.quantize or (config.memory.memory_quant_bits if config.memory.quantize_memory else None)
    if bits is not None:
        model = quantize_memory_for_deployment(model, bits)
    tokenizer = tokenizer_of(config)
    given = [chat.prompt(tokenizer, [("user", p)], config.data.chat_template) if arguments.chat else p for p in prompts]
    texts = generation.generate_batch(
        model, tokenizer, given, arguments.max_new_tokens, sampling=sampling, seed=arguments.seed
    )
    written = [{"prompt": p, "text": t} for p, t in zip(prompts, texts, strict=True)]
    arguments.found = {"run": arguments.run, "texts": written}
    if not arguments.json:
        print("\n---\n".join(texts))
    if arguments.output:
        write_text(arguments.output, "".join(json.dumps(line) + "\n" for line in written))


def _prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompt)
    if arguments.prompts:
        path = pathlib.Path(arguments.prompts)
        try:
            prompts += [json.loads(line)["prompt"] for line in path.read_text().splitlines() if line.strip()]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f'--prompts {path}: {error!r}; wanted lines of {{"prompt": "..."}}') from None
    return prompts or [""]


if __name__ == "__main__":
    commands.start(main)
