"""Small data in the originals' forms, written into a folder for the scripts beside this file."""

import csv
import json
import pathlib
import pickle
import random

import numpy as np
import yaml
from PIL import Image

WORDS = (
    "i feel sad and tired all day can not sleep at night my friends are kind today work is fine no hope left".split()
)
HJEPA = """
seed: 7
model:
  encoder_type: vit_tiny_patch16_224
  embed_dim: 192
  num_hierarchies: 2
  predictor: {depth: 1, num_heads: 3, mlp_ratio: 2.0}
  ema: {momentum: 0.996, momentum_end: 1.0, momentum_warmup_epochs: 1}
data: {dataset: imagenet, data_path: images, image_size: 32, batch_size: 4, num_workers: 0, pin_memory: true}
masking: {num_masks: 2, mask_scale: [0.1, 0.3], aspect_ratio: [0.75, 1.5]}
training:
  epochs: 2
  warmup_epochs: 1
  lr: 1.5e-4
  min_lr: 1.0e-6
  weight_decay: 0.05
  optimizer: adamw
  betas: [0.9, 0.95]
  lr_schedule: cosine
  clip_grad: 3.0
  use_amp: true
  accumulation_steps: 1
  early_stopping: {enabled: true, patience: 3}
  online_eval: {enabled: true, frequency: 1, k: 3, max_samples: 8}
loss: {type: smoothl1, hierarchy_weights: [1.0, 0.5], normalize_embeddings: true}
checkpoint: {save_frequency: 1, keep_best_n: 1, checkpoint_dir: results/checkpoints}
logging: {experiment_name: small, log_dir: results/logs, log_frequency: 1, wandb: {enabled: false}}
evaluation: {eval_frequency: 1}
"""
SHERLOCK = """
learning_rate: 1.0e-3
batch_size: 8
num_epochs: 2
warmup_epochs: 1
scheduler_type: 'cosine'
use_mixed_precision: true
num_workers: 0
checkpoint_dir: 'checkpoints'
log_dir: 'logs'
save_every: 1
data: {data_dir: 'data/', subjects: 'all', apply_hrf: true, mode: 'per_subject', train_split: 0.8}
model: {video_height: 90, video_width: 160, audio_mels: 16, text_dim: 12, n_voxels: 20, bottleneck_dim: 24,
        decoder_hidden_dim: 8}
distributed: {backend: nccl}
"""
PSY = {
    "project": "criteria",
    "output_dir": "outputs",
    "dataset": {
        "path": "annotations.csv",
        "text_column": "sentence_text",
        "label_column": "status",
        "max_length": 16,
        "num_workers": 0,
        "pin_memory": True,
        "persistent_workers": True,
        "prefetch_factor": 4,
    },
    "model": {
        "pretrained_model": "encoder",
        "classifier_dropout": 0.1,
        "classifier_layer_num": 1,
        "classifier_hidden_dims": [],
    },
    "training": {
        "epochs": 2,
        "learning_rate": 2e-3,
        "train_batch_size": 8,
        "eval_batch_size": 8,
        "gradient_accumulation": 1,
        "max_grad_norm": 1.0,
        "logging_steps": 2,
        "seed": 42,
        "deterministic": False,
        "cudnn_benchmark": True,
        "amp_dtype": "float16",
        "tf32_enabled": True,
        "optimizer": {"name": "adamw", "weight_decay": 0.01},
        "scheduler": {"name": "linear", "warmup_steps": 0},
        "monitor_metric": "val_f1_macro",
        "monitor_mode": "max",
    },
    "mlflow": {"tracking_uri": "sqlite:///mlflow.db", "artifact_location": None, "tags": {"project": "criteria"}},
}


def hjepa(folder: pathlib.Path) -> None:
    """Two classes of random JPEGs, and a config of a tiny ViT."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 4)):
        for name in ("n01", "n02"):
            place = folder / "images" / split / name
            place.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 255, (40, 48, 3), dtype=np.uint8)).save(place / f"{i}.jpg")
    (folder / "config.yaml").write_text(HJEPA)


def splatnlp(folder: pathlib.Path) -> None:
    """60 builds, tab-separated, with both vocabularies."""
    kinds = ("ink_saver_main", "swim_speed_up", "run_speed_up")
    steps = (3, 6, 12, 15, 21, 29, 38, 51, 57)
    names = ["comeback", "ninja_squid", "stealth_jump", *(f"{kind}_{step}" for kind in kinds for step in steps)]
    names += ["<NULL>", "<PAD>"]
    (folder / "vocab.json").write_text(json.dumps({name: i for i, name in enumerate(names)}))
    (folder / "weapon_vocab.json").write_text(json.dumps({f"weapon_id_{n}": i for i, n in enumerate((10, 20, 30))}))
    rng, rows = np.random.default_rng(0), ["ability_tags\tweapon_id\textra"]
    for _ in range(60):
        ids = sorted(rng.choice(len(names) - 2, 5, replace=False).tolist())
        rows.append(f"{json.dumps(ids)}\t{rng.integers(3)}\tx")
    (folder / "tokenized.csv").write_text("\n".join(rows) + "\n")


def sherlock(folder: pathlib.Path) -> None:
    """The original's cache file for two subjects of 20 volumes, and a config of a narrow model."""
    rng, widths = np.random.default_rng(0), {"video": 90 * 160 * 3, "audio": 16, "text": 12, "fmri": 20}
    features = {f"{kind}_features": rng.random((2, 20, width), np.float32) for kind, width in widths.items()}
    metadata = {"subject_ids": [1, 2], "n_subjects": 2, "n_trs": 20, "n_samples": 40, "feature_dims": widths}
    metadata |= {"tr": 1.5, "apply_hrf": True, "mode": "per_subject"}
    cache = folder / "data/cache"
    cache.mkdir(parents=True)
    (cache / "sherlock_all_hrf_per_subject.pkl").write_bytes(pickle.dumps({**features, "metadata": metadata}))
    (folder / "config.yaml").write_text(SHERLOCK)


def psy(folder: pathlib.Path) -> None:
    """40 annotated sentences with their posts, a BERT of one layer with its tokenizer, and the criteria config."""
    from transformers import BertConfig, BertModel, BertTokenizer

    encoder = folder / "encoder"
    encoder.mkdir()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (encoder / "vocab.txt").write_text("\n".join([*special, *dict.fromkeys(WORDS)]))
    BertTokenizer(str(encoder / "vocab.txt")).save_pretrained(encoder)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=40, max_position_embeddings=64, **sizes)).save_pretrained(encoder)
    draw = random.Random(0)
    header = ["post_id", "sentence_id", "sentence_text", "DSM5_symptom", "status", "explanation", "post_text"]
    with open(folder / "annotations.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(header)
        for i in range(40):
            before, sentence, after = (" ".join(draw.sample(WORDS, n)) for n in (3, 4, 3))
            post = f"{before} {sentence} {after}"
            rows.writerow([f"p{i}", f"s{i}", sentence, "SLEEP_ISSUES", i % 2, "", post])
    (folder / "train.yaml").write_text(yaml.safe_dump(PSY))


def memory(folder: pathlib.Path) -> None:
    """A Qwen2 of one layer, a data set of one conversation, and a config of four steps; `folder` is the present one."""
    from tests.e2e.originals import memory as readme

    readme.plant({})
    path = folder / "configs/adapter_qwen2.5_1.5b.yaml"
    path.write_text(path.read_text().replace("save_steps: 2", "save_steps: 2\n  logging_steps: 1"))
