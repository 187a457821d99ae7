"""Reconstruct validation samples with a trained autoencoder and score the predicted voxels."""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import yaml
from PIL import Image
from torch.utils.data import DataLoader

from jaxtrain.systems.fmri_autoencoder import (
    CombinedAutoEncoderLoss,
    SherlockAutoencoder,
    SherlockDataset,
    compute_correlation_metric,
    compute_r2_score,
)


def load_model(checkpoint_path, config, device):
    checkpoint = torch.load(checkpoint_path, map_location=device, weights_only=True)
    model = SherlockAutoencoder(**config["model"])
    model.load_state_dict(checkpoint["model_state_dict"])
    print(f"epoch {checkpoint['epoch']}, step {checkpoint['global_step']}, best {checkpoint['best_val_loss']:.4f}")
    for name, tensor in checkpoint["model_state_dict"].items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            print(f"NaN or Inf in {name}")
    moments = checkpoint["optimizer_state_dict"]["state"]
    print(f"optimizer: {len(moments)} states, {len(checkpoint['train_history'])} epochs of history")
    return model.to(device).eval()


def save_picture(array, path):
    array = np.asarray(array, np.float32)
    if array.ndim == 3:
        array = array.transpose(1, 2, 0)
    scaled = np.clip(array * 255, 0, 255).astype(np.uint8)
    Image.fromarray(scaled).save(path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--output-dir", default="reconstruction_results")
    parser.add_argument("--num-samples", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with open(args.config) as f:
        config = yaml.safe_load(f)
    device = torch.device(args.device)
    model = load_model(args.checkpoint, config, device)
    data = config.get("data", {})
    dataset = SherlockDataset(
        data["data_dir"], subjects=data.get("subjects", "all"), split="val", apply_hrf=True, mode=data["mode"]
    )
    print(dataset.get_feature_stats())
    loader = DataLoader(dataset, batch_size=1, shuffle=False)
    criterion = CombinedAutoEncoderLoss(fmri_loss_type=config.get("fmri_loss_type", "mse"))
    output = Path(args.output_dir)
    scores = []
    with torch.no_grad():
        for i, batch in enumerate(loader):
            if i >= args.num_samples:
                break
            video, audio = batch["video"].to(device), batch["audio"].to(device)
            text, fmri = batch["text"].to(device), batch["fmri"].to(device)
            outputs = model(video, audio, text)
            loss, parts = criterion(outputs, video.reshape(outputs["video_recon"].shape), audio, text, fmri_target=fmri)
            bottleneck, voxels = model.encode_only(video, audio, text, return_voxels=True)
            torch.testing.assert_close(voxels, outputs["predicted_fmri"])
            decoded = model.decode_only(bottleneck)
            correlation = compute_correlation_metric(voxels, fmri).item()
            scores.append({"loss": loss.item(), "fmri_correlation": correlation})
            scores[-1]["fmri_r2"] = compute_r2_score(voxels, fmri).item()
            scores[-1]["fmri_loss"] = float(parts["fmri_loss"])
            folder = output / f"sample_{i}"
            folder.mkdir(parents=True, exist_ok=True)
            shape = (3, config["model"]["video_height"], config["model"]["video_width"])
            first = decoded[0] if isinstance(decoded, (tuple, list)) else decoded["video_recon"]
            save_picture(first.reshape(shape).numpy(), folder / "video_reconstruction.png")
            save_picture(voxels.numpy(), folder / "fmri_reconstruction.png")
    mean = float(np.mean([score["fmri_correlation"] for score in scores]))
    print(f"fMRI correlation: {mean:.4f}")
    with open(output / "scores.json", "w") as f:
        json.dump(scores, f, indent=2)


if __name__ == "__main__":
    main()
