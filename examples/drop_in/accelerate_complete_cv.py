"""Accelerate's complete cv example, with checkpoints named and limited by accelerate:
python examples/drop_in/accelerate_complete_cv.py --engine accelerate|jaxtrain"""

import os

import common
import torch
from data import digits, split
from torch import nn
from torch.utils.data import DataLoader

args = common.parse_args("accelerate", resume_from_checkpoint=("", "a folder that save_state has written: epoch_N"))
if args.engine == "jaxtrain":
    from jaxtrain.accelerate import Accelerator
else:
    from accelerate import Accelerator

from accelerate.utils import ProjectConfiguration, set_seed  # noqa: E402


class PatchNet(nn.Module):
    """A convolutional mixer: patches, depthwise and pointwise convolutions, group normalisation."""

    def __init__(self, width: int = 32, depth: int = 3, num_classes: int = 10):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "space": nn.Conv2d(width, width, 5, padding=2, groups=width),
                    "norm": nn.GroupNorm(4, width),
                    "channel": nn.Conv2d(width, width, 1),
                }
            )
            for _ in range(depth)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, num_classes))

    def forward(self, x):
        x = self.patches(x)
        for block in self.blocks:
            x = x + nn.functional.gelu(block["norm"](block["space"](x)))
            x = nn.functional.gelu(block["channel"](x))
        return self.head(x.mean(dim=(2, 3)))


def training_function(config):
    project = ProjectConfiguration(project_dir=args.output_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(cpu=args.device == "cpu", gradient_accumulation_steps=1, project_config=project)
    set_seed(config["seed"])
    train_set, val_set = split(digits(size=32, channels=3), 640, 128)
    train_dataloader = DataLoader(train_set, shuffle=True, batch_size=config["batch_size"])
    eval_dataloader = DataLoader(val_set, shuffle=False, batch_size=config["batch_size"])
    model = PatchNet().to(accelerator.device)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}], lr=config["lr"]
    )
    lr_scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.max_steps)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    accelerator.register_for_checkpointing(lr_scheduler)
    starting_epoch = 0
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        starting_epoch = int(os.path.basename(args.resume_from_checkpoint).removeprefix("checkpoint_")) + 1
    overall_step = starting_epoch * len(train_dataloader)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    curve = common.Curve(args)
    while overall_step < args.max_steps:
        model.train()
        for image, label in train_dataloader:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = criterion(model(image), label)
            accelerator.backward(loss)
            accelerator.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            lr_scheduler.step()
            curve.add(loss)
            overall_step += 1
            if overall_step == args.max_steps:
                break
        model.eval()
        accurate = num_elems = 0
        for image, label in eval_dataloader:
            with torch.no_grad():
                outputs = model(image)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), label))
            accurate += int((predictions == references).sum())
            num_elems += len(references)
        accelerator.save_state()
    accelerator.end_training()
    curve.finish(accuracy=accurate / num_elems, mean_logit=float(outputs.abs().mean()))


if __name__ == "__main__":
    training_function({"lr": 3e-3, "seed": 42, "batch_size": 32})
