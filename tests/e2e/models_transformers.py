"""Small random models of Hugging Face transformers, by family."""

import torch
import transformers

from tests.e2e.architectures import Architecture
from torch_bridge.torchvision_operators import declare_torchvision

declare_torchvision()

WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
VOCABULARY = 40


def _ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, shape)


def _padded(batch: int = 2, length: int = 7) -> dict[str, torch.Tensor]:
    """Tokens and a mask; the second row is shorter."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[1, length - 2 :] = 0
    return {"input_ids": _ids(batch, length), "attention_mask": mask}


def _model(kind: str, head: str, **options):
    """The family's own configuration class with small sizes, and a head by its class name."""
    head_class = getattr(transformers, kind + head)
    return head_class(head_class.config_class(**options))


def _encoder(source: str, kind: str, head: str = "Model", training: bool = False, **options) -> Architecture:
    options = {"vocab_size": VOCABULARY, "max_position_embeddings": 24, **WIDTHS, **options}
    return Architecture(source, "transformers", lambda: (_model(kind, head, **options), _padded()), training)


def _decoder(source: str, kind: str, head: str = "ForCausalLM", **options) -> Architecture:
    """A causal language model with its own loss."""
    options = {"vocab_size": VOCABULARY, "max_position_embeddings": 24, **WIDTHS, "use_cache": False, **options}

    def build():
        inputs = _padded()
        inputs["labels"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
        return _model(kind, head, **options), inputs

    return Architecture(source, "transformers", build)


def _image(source: str, kind: str, head: str = "Model", size: int = 16, **options) -> Architecture:
    def build():
        return _model(kind, head, **options), {"pixel_values": torch.randn(2, 3, size, size)}

    return Architecture(source, "transformers", build)


def _sound(source: str, kind: str, head: str, inputs, **options) -> Architecture:
    return Architecture(source, "transformers", lambda: (_model(kind, head, **options), inputs()))


GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 24, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GQA = {"num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0}

ENCODERS = [
    _encoder("BERT, classification", "Bert", "ForSequenceClassification", training=True, **NO_DROPOUT),
    _encoder("RoBERTa, token classification", "Roberta", "ForTokenClassification", pad_token_id=1),
    _encoder(
        "DistilBERT",
        "DistilBert",
        dim=16,
        n_layers=2,
        n_heads=2,
        hidden_dim=24,
    ),
    _encoder("ALBERT, shared layers", "Albert", embedding_size=8),
    _encoder("ELECTRA", "Electra", "ForPreTraining", embedding_size=8),
    _encoder(
        "DeBERTa-v2",
        "DebertaV2",
        "ForQuestionAnswering",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        position_buckets=4,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    _encoder("MPNet", "MPNet"),
    _encoder(
        "ModernBERT", "ModernBert", "ForMaskedLM", pad_token_id=0, local_attention=4, global_attn_every_n_layers=2
    ),
    _encoder("FNet", "FNet"),
    _encoder("ESM, rotary", "Esm", pad_token_id=1, mask_token_id=2, position_embedding_type="rotary"),
]

DECODERS = [
    _decoder("GPT-2", "GPT2", "LMHeadModel", **GPT2),
    _decoder("GPT-NeoX", "GPTNeoX"),
    _decoder("OPT", "OPT", ffn_dim=24, word_embed_proj_dim=16),
    _decoder("BLOOM, ALiBi", "Bloom", n_layer=2, n_head=2),
    _decoder("Llama, grouped queries", "Llama", **GQA),
    _decoder("Qwen2", "Qwen2", **GQA),
    _decoder("Mixtral, grouped experts", "Mixtral", num_local_experts=4, **{**GQA, "num_hidden_layers": 1}),
    _decoder("Mistral, sliding window", "Mistral", sliding_window=3, **GQA),
    _decoder("Gemma 2, soft caps", "Gemma2", sliding_window=3, **GQA),
    _decoder("Phi-3", "Phi3", num_key_value_heads=1, pad_token_id=0),
    _decoder("Mamba", "Mamba", state_size=4, expand=1, conv_kernel=3),
]


def _t5():
    model = _model(
        "T5",
        "ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return model, {**_padded(), "labels": _ids(2, 5)}


def _bart():
    model = _model(
        "Bart",
        "ForConditionalGeneration",
        vocab_size=VOCABULARY,
        d_model=16,
        max_position_embeddings=24,
        use_cache=False,
        **{f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in _BART_SIDE.items()},
    )
    return model, {**_padded(), "labels": _ids(2, 5)}


_BART_SIDE = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}

ENCODER_DECODERS = [
    Architecture("T5", "transformers", _t5),
    Architecture("BART", "transformers", _bart),
]

VIT = {**WIDTHS, "image_size": 16, "patch_size": 8}
IMAGES = [
    _image("ViT", "ViT", "ForImageClassification", **VIT),
    _image("DINOv2, position resize", "Dinov2", size=24, **VIT),
    _image("BEiT, relative positions", "Beit", use_relative_position_bias=True, use_mask_token=True, **VIT),
    _image(
        "Swin",
        "Swin",
        size=32,
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[2, 2],
        window_size=4,
    ),
    _image("ConvNeXt V2", "ConvNextV2", size=32, hidden_sizes=[4, 8], depths=[1, 1], num_stages=2),
    _image(
        "SegFormer",
        "Segformer",
        "ForSemanticSegmentation",
        size=32,
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 8],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=8,
    ),
]


def _clip():
    text = {**WIDTHS, "vocab_size": VOCABULARY, "max_position_embeddings": 24, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=VIT, projection_dim=8)
    return transformers.CLIPModel(config), {**_padded(), "pixel_values": torch.randn(2, 3, 16, 16), "return_loss": True}


IMAGES.append(Architecture("CLIP, contrastive loss", "transformers", _clip))

WAVE = {
    **WIDTHS,
    "vocab_size": VOCABULARY,
    "conv_dim": (8, 8),
    "conv_kernel": (6, 3),
    "conv_stride": (3, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
WHISPER = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "num_mel_bins": 6,
    "max_source_positions": 8,
    "max_target_positions": 12,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "use_cache": False,
    **{f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in _BART_SIDE.items()},
}

SOUNDS = [
    _sound("wav2vec 2.0, CTC logits", "Wav2Vec2", "ForCTC", lambda: {"input_values": torch.randn(2, 96)}, **WAVE),
    _sound("HuBERT", "Hubert", "Model", lambda: {"input_values": torch.randn(2, 96)}, **WAVE),
    _sound(
        "Whisper",
        "Whisper",
        "ForConditionalGeneration",
        lambda: {"input_features": torch.randn(2, 6, 16), "labels": _ids(2, 5)},
        **WHISPER,
    ),
    _sound(
        "Audio Spectrogram Transformer",
        "AST",
        "ForAudioClassification",
        lambda: {"input_values": torch.randn(2, 24, 16)},
        **WIDTHS,
        patch_size=8,
        max_length=24,
        num_mel_bins=16,
        time_stride=4,
        frequency_stride=4,
    ),
    _sound(
        "PatchTST, forecasting",
        "PatchTST",
        "ForPrediction",
        lambda: {"past_values": torch.randn(2, 16, 3), "future_values": torch.randn(2, 4, 3)},
        num_input_channels=3,
        context_length=16,
        patch_length=4,
        patch_stride=4,
        d_model=8,
        num_attention_heads=2,
        num_hidden_layers=1,
        ffn_dim=12,
        prediction_length=4,
    ),
]

ARCHITECTURES = [*ENCODERS, *DECODERS, *ENCODER_DECODERS, *IMAGES, *SOUNDS]
