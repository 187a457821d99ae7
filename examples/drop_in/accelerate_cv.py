"""Accelerate's cv example: python examples/drop_in/accelerate_cv.py --engine accelerate|jaxtrain"""

import common
import torch
from data import digits, split
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

args = common.parse_args("accelerate")
if args.engine == "jaxtrain":
    from jaxtrain.accelerate import Accelerator
else:
    from accelerate import Accelerator

from accelerate.utils import set_seed  # noqa: E402


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, num_classes: int = 10, width: int = 16):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1)
        self.layers = nn.Sequential(Block(width, width), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2))
        self.fc = nn.Linear(4 * width, num_classes)

    def get_classifier(self):
        return self.fc

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean(dim=(2, 3)))


def training_function(config):
    accelerator = Accelerator(cpu=args.device == "cpu")
    set_seed(config["seed"])
    train_set, val_set = split(digits(size=32, channels=3), 640, 128)
    train_dataloader = DataLoader(train_set, shuffle=True, batch_size=config["batch_size"])
    eval_dataloader = DataLoader(val_set, shuffle=False, batch_size=config["batch_size"])
    model = ResNet().to(accelerator.device)
    for param in model.parameters():
        param.requires_grad = False
    for param in model.get_classifier().parameters():
        param.requires_grad = True
    optimizer = torch.optim.Adam(params=model.parameters(), lr=config["lr"] / 25)
    lr_scheduler = OneCycleLR(optimizer=optimizer, max_lr=config["lr"], total_steps=args.max_steps + 1)
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    mean = torch.tensor([0.5, 0.5, 0.5])[None, :, None, None].to(accelerator.device)
    curve, completed_steps = common.Curve(args), 0
    while completed_steps < args.max_steps:
        model.train()
        for image, label in train_dataloader:
            inputs = (image - mean) / mean
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, label)
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
            curve.add(loss)
            completed_steps += 1
            if completed_steps == args.max_steps:
                break
        model.eval()
        accurate = num_elems = 0
        for image, label in eval_dataloader:
            with torch.no_grad():
                outputs = model((image - mean) / mean)
            predictions, references = accelerator.gather_for_metrics((outputs.argmax(dim=-1), label))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        accelerator.print(f"step {completed_steps}: {100 * accurate.item() / num_elems:.2f}")
    accelerator.save_model(model, args.output_dir)
    accelerator.end_training()
    curve.finish(accuracy=accurate.item() / num_elems, mean_logit=float(outputs.abs().mean()))


if __name__ == "__main__":
    training_function({"lr": 3e-2, "seed": 42, "batch_size": 32})
