"""Models of transformers with their own losses."""

import torch

from tests.e2e.certified import SAMPLES, Certified, classes, images, rows, tokens
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()

import transformers  # noqa: E402

WIDTHS = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}
CAUSAL = {**WIDTHS, "num_key_value_heads": 1, "use_cache": False, "pad_token_id": 0, "bos_token_id": 1}


def _text(length: int = 12) -> dict[str, torch.Tensor]:
    ids = tokens(length)
    sizes = torch.randint(length // 2, length + 1, (SAMPLES, 1))
    mask = (torch.arange(length) < sizes).long()
    return {"input_ids": ids * mask, "attention_mask": mask}


def bert():
    config = transformers.BertConfig(**WIDTHS, num_labels=3)
    return transformers.BertForSequenceClassification(config), rows(**_text(), labels=classes(3)), None


def deberta():
    config = transformers.DebertaV2Config(**WIDTHS, num_labels=3, relative_attention=True, pos_att_type=["p2c", "c2p"])
    config.problem_type = "single_label_classification"  # left out, it asks whether any label is known
    return transformers.DebertaV2ForSequenceClassification(config), rows(**_text(), labels=classes(3)), None


def gpt2():
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=32, use_cache=False)
    ids = tokens(12)
    return transformers.GPT2LMHeadModel(config), rows(input_ids=ids, labels=ids), None


def llama():
    ids = tokens(12)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CAUSAL)), rows(input_ids=ids, labels=ids), None


def qwen3():
    config = transformers.Qwen3Config(**CAUSAL, head_dim=8)
    ids = tokens(12)
    return transformers.Qwen3ForCausalLM(config), rows(input_ids=ids, labels=ids), None


def t5():
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0, use_cache=False
    )
    return transformers.T5ForConditionalGeneration(config), rows(**_text(), labels=tokens(6)), None


def vit():
    widths = {key: value for key, value in WIDTHS.items() if key not in ("vocab_size", "max_position_embeddings")}
    config = transformers.ViTConfig(**widths, image_size=32, patch_size=8, num_labels=5)
    return transformers.ViTForImageClassification(config), rows(pixel_values=images(), labels=classes()), None


def whisper():
    side = {
        f"{side}_{what}": size
        for side in ("encoder", "decoder")
        for what, size in (("layers", 1), ("attention_heads", 2), ("ffn_dim", 32))
    }
    config = transformers.WhisperConfig(
        vocab_size=64,
        d_model=16,
        num_mel_bins=6,
        max_source_positions=8,
        max_target_positions=12,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
        **side,
    )
    data = rows(input_features=torch.randn(SAMPLES, 6, 16), labels=tokens(5))
    return transformers.WhisperForConditionalGeneration(config), data, None


MODELS = [
    Certified("BERT, classification", bert),
    Certified("DeBERTa-v3, classification", deberta),
    Certified("GPT-2", gpt2),
    Certified("Llama", llama),
    Certified("Qwen3", qwen3),
    Certified("T5", t5),
    Certified("ViT", vit),
    Certified("Whisper", whisper),
]
