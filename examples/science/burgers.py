"""Solve Burgers' equation with a network: Adam, then L-BFGS of optax; second derivatives by the inputs.

Run it from the repository's root: python examples/science/burgers.py
"""

import math

import optax
import torch
from torch import nn

import jaxtrain

VISCOSITY = 0.1 / math.pi


def loss_fn(net, batch):
    x, t, begin = batch["x"].requires_grad_(), batch["t"].requires_grad_(), batch["begin"]
    u = net(torch.cat([x, t], 1))
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    start = net(torch.cat([begin, torch.zeros_like(begin)], 1)) + torch.sin(math.pi * begin)
    ends = [net(torch.cat([torch.full_like(t, side), t], 1)) for side in (-1.0, 1.0)]
    inside = u_t + u * u_x - VISCOSITY * u_xx
    return inside.square().mean() + start.square().mean() + sum(end.square().mean() for end in ends)


def main(adam_steps=600, lbfgs_steps=600):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1)
    )
    batch = {
        "x": torch.rand(400, 1) * 2 - 1,
        "t": torch.rand(400, 1),
        "begin": torch.linspace(-1, 1, 101)[:, None],
    }
    losses = []
    optimizers = [
        (torch.optim.Adam(net.parameters(), 5e-3), adam_steps),
        (optax.lbfgs(1.0, memory_size=20, linesearch=None), lbfgs_steps),  # a line search would call the loss itself
    ]
    for optimizer, steps in optimizers:
        step = jaxtrain.compile(net, loss_fn, optimizer, wait=True)
        for _ in range(steps):
            loss = step(batch)
        step.sync()
        losses.append(float(loss))
        print(f"{steps} steps of {type(optimizer).__name__}: loss {losses[-1]:.2g}, {len(step.programs)} program")
    return losses


if __name__ == "__main__":
    main()
