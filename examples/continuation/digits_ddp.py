"""A plain PyTorch loop with DistributedDataParallel, from scratch or from what `jaxtrain.export --optimizer` wrote.

torchrun --nproc_per_node=2 examples/continuation/digits_ddp.py --until 200 --checkpoint jax.pt --output torch.pt
"""

import argparse
import math

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from jaxtrain import config_io
from jaxtrain.data.index_stream import IndexStream
from jaxtrain.systems.digits import build_data, torch_twin


class SameBatches(torch.utils.data.Sampler):
    """This process's share of the batches that the JAX run reads, from step `first` on; any sampler would do."""

    def __init__(self, config, size: int, first: int, until: int):
        self.stream = IndexStream(size, config.data.batch_size, config.seed, drop_last=True)
        self.steps = range(first, until)

    def __len__(self):
        return len(self.steps)

    def __iter__(self):
        for step in self.steps:
            yield self.stream.batch(step)[0][distributed.get_rank() :: distributed.get_world_size()].tolist()


def make_optimizer(module, config, saved):
    """AdamW with weight decay on matrices only; the groups of the file where there is one."""
    parameters = dict(module.named_parameters())
    if saved is None:
        decayed = [name for name, p in parameters.items() if p.ndim > 1]
        names = [decayed, [name for name in parameters if name not in decayed]]
    else:
        names = [group["param_names"] for group in saved["optimizer"]["param_groups"]]
    groups = [{"params": [(name, parameters[name]) for name in group]} for group in names]
    groups[-1]["weight_decay"] = 0.0
    return torch.optim.AdamW(groups, lr=config.lr, eps=config.eps, weight_decay=config.weight_decay)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--config", default="examples/continuation/digits.yaml")
    p.add_argument(
        "--checkpoint", metavar="F", help="what this or jaxtrain.export --optimizer wrote; from scratch if left out"
    )
    p.add_argument("--until", type=int, default=200, metavar="STEP")
    p.add_argument("--output", required=True, metavar="F")
    p.add_argument("overrides", nargs="*", metavar="a.b=c")
    arguments = p.parse_intermixed_args()
    _, config = config_io.load(arguments.config, arguments.overrides)
    saved = torch.load(arguments.checkpoint, weights_only=True) if arguments.checkpoint else None

    distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = (
        torch.device("cuda", distributed.get_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else "cpu"
    )
    torch.manual_seed(config.seed)
    module = torch_twin.build(config).to(device)
    optimizer = make_optimizer(module, config.optim, saved)
    cosine = lambda step: 0.5 * (1 + math.cos(math.pi * min(step / config.train.steps, 1)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)
    step = 0
    if saved is not None:
        module.load_state_dict(saved["model"], strict=True)
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        step = saved["step"]

    dataset = build_data(config, "train")
    batches = SameBatches(config, len(dataset), step, arguments.until)
    wrapped = DistributedDataParallel(module)
    for images, labels in torch.utils.data.DataLoader(dataset, batch_sampler=batches):
        loss = torch.nn.functional.cross_entropy(wrapped(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(module.parameters(), config.optim.clip_norm)
        optimizer.step()
        scheduler.step()
        step += 1
        if distributed.get_rank() == 0 and (step % 20 == 0 or step == arguments.until):
            print(f"step {step}  loss {loss.item():.4f}  lr {scheduler.get_last_lr()[0]:.2e}", flush=True)
    if distributed.get_rank() == 0:
        parts = {"model": module, "optimizer": optimizer, "scheduler": scheduler}
        content = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**content, "step": step}, arguments.output)
        print(f"saved {arguments.output}")
    distributed.barrier()  # gloo may abort a process that leaves while another still sends
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
