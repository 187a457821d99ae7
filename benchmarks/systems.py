"""What is compared: each system at a size for two CPU cores and at its original's size, by config and overrides."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

CONSTANT_RATE = (  # both sides step with the same rate; schedules cost nothing on either
    "optim.schedule.name=constant",
    *(f"optim.schedule.warmup_{unit}=null" for unit in ("steps", "epochs", "ratio")),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """data: number of samples -> columns that stand in for data to be downloaded; None: the task's own data.
    split: of that; "validation" where only its items hold the inputs that both sides are to see.
    feed: (config, batch) -> the DataLoader that a torch user of the system trains from, for `--fed`.
    """

    config: str
    overrides: tuple[str, ...] = ()
    batch: int = 16
    split: str = "train"
    data: Callable[[Any, int], Mapping[str, np.ndarray]] | None = None
    feed: Callable[[Any, int], Any] | None = None


def random_images(config: Any, samples: int) -> dict[str, np.ndarray]:
    size, rng = config.data.image_size, np.random.default_rng(0)
    patches = (size // 16) ** 2
    order = np.argsort(rng.uniform(size=(samples, patches)), axis=1)
    return {
        "image": rng.normal(size=(samples, 3, size, size)).astype(np.float32),  # prepared: no augmentation in the step
        "mask": order < int(0.4 * patches),
    }


def random_text(config: Any, samples: int) -> dict[str, np.ndarray]:
    shape = (samples, config.data.max_length)
    ids = np.random.default_rng(0).integers(5, 30_000, shape, np.int32)
    lengths = np.full(samples, config.data.max_length, np.int32)  # as the systems' own data tells them
    return {"input_ids": ids, "attention_mask": np.ones(shape, np.int32), "labels": ids, "lengths": lengths}


def random_sentences(config: Any, samples: int) -> dict[str, np.ndarray]:
    labels = np.random.default_rng(1).integers(0, 2, samples).astype(np.int32)
    return random_text(config, samples) | {"labels": labels}


def masked_sets(config: Any, batch: int) -> Any:
    """The original's way: every access to a set hides some of its tokens anew, in Python; padded at the right."""
    import torch

    from jaxtrain.systems.set_completion.data import corpus_of
    from jaxtrain.systems.set_completion.masking import PADDING, SetDataset

    def collate(items: list) -> dict[str, torch.Tensor]:
        inputs, weapon, targets = zip(*(tuple(map(torch.from_numpy, item)) for item in items), strict=True)
        pad = lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
        valid = torch.ones(len(items), dtype=torch.bool)
        return {"inputs": pad(inputs), "weapon": torch.stack(weapon), "targets": pad(targets), "valid": valid}

    corpus = corpus_of(config, "train")
    rows = [
        {"ability_tags": tokens[tokens != PADDING].tolist(), "weapon_id": int(weapon)}
        for tokens, weapon in zip(corpus.tokens, corpus.weapons.reshape(-1), strict=True)
    ]
    dataset = SetDataset(rows, None, config.data.masks_per_set, config.data.skew_factor)
    return torch.utils.data.DataLoader(dataset, batch, shuffle=True, collate_fn=collate, drop_last=True)


BERT = (
    "model.encoder={vocab_size: 30522, hidden_size: %d, num_hidden_layers: %d, num_attention_heads: %d, "
    "intermediate_size: %d, max_position_embeddings: 512, pad_token_id: 0}"
)
QWEN2 = (
    "model.base_config={model_type: qwen2, hidden_size: %d, intermediate_size: %d, num_hidden_layers: %d, "
    "num_attention_heads: %d, num_key_value_heads: %d, vocab_size: %d, rms_norm_eps: 1.0e-6, rope_theta: 1.0e+6, "
    "tie_word_embeddings: true, max_position_embeddings: 32768}"
)
SAE_FROM_THE_START = (  # every step updates, with the coefficients that the schedules end at, and revives nothing
    "sae.primary=null",
    "sae.steps_before_train=16",
    "sae.l1_warmup_steps=0",
    "sae.resample_steps=[]",
)
CASES: dict[str, dict[str, Case]] = {
    "fmri_autoencoder": {
        "small": Case(
            "configs/sherlock_gen1_tiny.yaml",
            ("model.video_height=18", "model.video_width=32", "model.n_voxels=206", "model.bottleneck_dim=256",
             "model.video_features=128", "model.audio_features=96", "model.text_features=96",
             "model.decoder_hidden_dim=128", "model.text_dim=96",
             "model.widths={16384: 512, 4096: 384, 512: 192}",
             "model.channel_widths={32: 16, 64: 32, 128: 48, 256: 64}"),
            32,
        ),
        "reference": Case("configs/sherlock_gen1.yaml", ("data.synthetic=arrays", "data.synthetic_volumes=128"), 32),
    },
    "set_completion": {
        "small": Case("configs/splat_small.yaml", (), 32, "validation", feed=masked_sets),
        "reference": Case("configs/splat_production.yaml", ("data.synthetic.sets=100000",), 1024, "validation"),
    },
    "sparse_autoencoder": {
        "small": Case("configs/splat_sae.yaml", SAE_FROM_THE_START, 16, "validation", feed=masked_sets),
        "reference": Case(
            "configs/splat_sae.yaml",
            (*SAE_FROM_THE_START, "model.vocab_size=140", "model.weapon_vocab_size=130", "model.hidden_dim=512",
             "model.num_layers=3", "model.num_heads=8", "model.num_inducing_points=32",
             "sae.expansion_factor=48", "sae.buffer_size=100000", "sae.batch_size=1024",
             "data.synthetic.sets=20000", "data.synthetic.weapons=130"),
            32,
            "validation",
        ),
    },
    "hjepa": {
        "small": Case("configs/hjepa_digits.yaml", ("masking.where=loader",), 128),
        "reference": Case(
            "configs/hjepa_vit_base.yaml",
            ("masking.kind=ragged", "model.drop_masked=false", "model.gradient_checkpointing=false"),
            64,
            data=random_images,
        ),
    },
    "criteria_evidence": {
        "small": Case(
            "configs/criteria_tiny.yaml",
            (BERT % (256, 4, 4, 1024), "data.max_length=128"),
            16,
            data=random_sentences,
        ),
        "reference": Case(
            "configs/criteria_bert.yaml",
            ("model.pretrained=null", BERT % (768, 12, 12, 3072), "data.max_length=512", "data.padding=fixed"),
            32,
            data=random_sentences,
        ),
    },
    "memory_lm": {
        "small": Case("configs/memory_lm_tiny.yaml", ("data.corpus_bytes=300000",), 16),
        "reference": Case(
            "configs/memory_lm_paper.yaml",
            ("memory.use_load_balance_loss=false", "memory.use_z_loss=false", "loss.chunk_tokens=0",
             "train.accumulate_steps=1"),
            16,
            data=random_text,
        ),
    },
    "memory_adapter": {
        "small": Case("configs/memory_lm_adapter_tiny.yaml", (QWEN2 % (128, 512, 4, 4, 2, 258),), 16),
        "reference": Case(
            "configs/memory_lm_qwen_lora.yaml",
            ("model.base_model_name=null", QWEN2 % (1536, 8960, 28, 12, 2, 151_936), "loss.chunk_tokens=0",
             "data.max_length=512", "train.accumulate_steps=1", "train.remat=none"),
            4,
            data=random_text,
        ),
    },
}  # fmt: skip
