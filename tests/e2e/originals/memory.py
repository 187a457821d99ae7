"""A tiny Qwen2 folder and a dataset folder under the names of the README's, runs of four steps."""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

BASE = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 264,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
CONFIG = """
model: {base_model_name: base, freeze_base_model: true}
memory: {num_memory_tokens: 8, memory_layer_placement: all, memory_gradient_checkpointing: false}
training:
  dataset_name: HuggingFaceH4/ultrachat_200k
  dataset_split: train_sft
  eval_split: test_sft
  text_field: messages
  training_mode: instruction_finetuning
  max_length: 32
  batch_size: 2
  gradient_accumulation_steps: 1
  max_steps: 4
  warmup_steps: 1
  save_steps: 2
  eval_steps: 4
  mixed_precision: "no"
  gradient_checkpointing: false
"""


def weights() -> dict[str, np.ndarray]:
    """One layer of Qwen2 with random weights."""
    wide, inner, half = BASE["hidden_size"], BASE["intermediate_size"], BASE["hidden_size"] // 2
    shapes = {"mlp.gate_proj": (inner, wide), "mlp.up_proj": (inner, wide), "mlp.down_proj": (wide, inner)}
    shapes |= {f"self_attn.{name}_proj": (size, wide) for name, size in (("q", wide), ("k", half), ("v", half))}
    shapes |= {"self_attn.o_proj": (wide, wide)}
    rng = np.random.default_rng(0)
    found = {f"model.layers.0.{name}.weight": rng.normal(size=shape) * 0.1 for name, shape in shapes.items()}
    found |= {
        f"model.layers.0.self_attn.{name}_proj.bias": np.zeros(shapes[f"self_attn.{name}_proj"][0]) for name in "qkv"
    }
    norms = ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm")
    found |= {f"model.{name}.weight": np.ones(wide) for name in norms}
    found["model.embed_tokens.weight"] = rng.normal(size=(BASE["vocab_size"], wide)) * 0.1
    return {key: value.astype(np.float32) for key, value in found.items()}


def plant(namespace):
    import tokenizers
    import transformers

    characters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: i for i, character in enumerate([*characters, "<|endoftext|>"])}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    special = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.save_pretrained("base")
    pathlib.Path("base/config.json").write_text(json.dumps(BASE))
    save_file(weights(), "base/model.safetensors")

    row = {"messages": [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "three"}]}
    folder = pathlib.Path("HuggingFaceH4/ultrachat_200k/data")
    folder.mkdir(parents=True)
    for split in ("train_sft", "test_sft"):
        (folder / f"{split}-00000-of-00001.jsonl").write_text("\n".join([json.dumps(row)] * 8))
    pathlib.Path("configs").mkdir()
    pathlib.Path("configs/adapter_qwen2.5_1.5b.yaml").write_text(CONFIG)

    from jaxtrain.systems.memory_lm import load_config

    namespace.update(config=load_config("configs/adapter_qwen2.5_1.5b.yaml"), tokenizer=tokenizer)


def trained(namespace):
    assert namespace["trainer"].global_step == 4


def interrupted(namespace):
    """The run of block 2 as it was after two steps, under the name that the snippet gives."""
    pathlib.Path("outputs").rename("earlier")
    pathlib.Path("outputs").mkdir()
    pathlib.Path("earlier/checkpoint-2").rename("outputs/checkpoint-1000")


def went_on(namespace):
    trained(namespace)
    assert len(namespace["trainer"].history["val_history"]) == 1


def rows(namespace):
    item = namespace["dataloader"].dataset[0]
    assert item["input_ids"].shape == (4096,)
    assert (item["labels"] != -100).sum() > 0


def finite(namespace):
    assert 0 < float(np.asarray(namespace["total_loss"])) < 1


BEFORE = {1: plant, 3: interrupted}
AFTER = {2: trained, 3: went_on, 4: rows, 5: finite, 6: trained, 7: trained}
