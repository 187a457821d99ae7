"""Reinforcement learning: Q-learning, policy gradients, soft actor-critic, decision transformer."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.public_trainings import Training, adam, one, training
from benchmarks.public_trainings.generative import mlp

SEEN, ACTIONS, ROWS = 6, 3, 16


def moves() -> dict[str, torch.Tensor]:
    return {
        "seen": torch.randn(ROWS, SEEN),
        "next": torch.randn(ROWS, SEEN),
        "action": torch.randint(0, ACTIONS, (ROWS,)),
        "force": torch.rand(ROWS, 2) * 2 - 1,
        "reward": torch.randn(ROWS),
        "done": (torch.rand(ROWS) < 0.1).float(),
        "noise": torch.randn(2, ROWS, 2),
        "old": -1 - torch.rand(ROWS),
        "gain": torch.randn(ROWS),
    }


def follow(target: nn.Module, module: nn.Module, tau: float = 0.05) -> None:
    with torch.no_grad():
        for ours, theirs in zip(target.parameters(), module.parameters(), strict=True):
            ours.data.copy_(tau * theirs.data + (1 - tau) * ours.data)


@training("DQN", "double, dueling, target network, Huber loss, priorities")
def dqn() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.value, self.gain = mlp(SEEN, 24, 24), nn.Linear(24, 1), nn.Linear(24, ACTIONS)

        def forward(self, x):
            y = F.relu(self.body(x))
            gain = self.gain(y)
            return self.value(y) + gain - gain.mean(1, keepdim=True)

    online = Net()
    target = copy.deepcopy(online).requires_grad_(False)

    def loss(online, target, b):
        q = online(b["seen"]).gather(1, b["action"][:, None]).squeeze(1)
        with torch.no_grad():
            best = online(b["next"]).argmax(1, keepdim=True)
            wanted = b["reward"] + 0.99 * (1 - b["done"]) * target(b["next"]).gather(1, best).squeeze(1)
        return (F.smooth_l1_loss(q, wanted, reduction="none") * b["old"].abs()).mean()

    modules = {"online": online, "target": target}
    return Training(modules, {"q": loss}, {"q": adam(online)}, [moves() for _ in range(3)], lambda o, t: follow(t, o))


@training("PPO", "clipped ratio, value loss, entropy, torch.distributions.Categorical")
def ppo() -> Training:
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.actor, self.critic = mlp(SEEN, 24, ACTIONS, act=nn.Tanh), mlp(SEEN, 24, 1, act=nn.Tanh)

        def forward(self, x):
            return torch.distributions.Categorical(logits=self.actor(x)), self.critic(x).squeeze(1)

    def loss(m, b):
        policy, value = m(b["seen"])
        ratio = (policy.log_prob(b["action"]) - b["old"]).exp()
        gain = (b["gain"] - b["gain"].mean()) / (b["gain"].std() + 1e-8)
        clipped = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain)
        return -clipped.mean() + 0.5 * F.mse_loss(value, b["reward"]) - 0.01 * policy.entropy().mean()

    module = Net()
    optimizer = torch.optim.Adam(module.parameters(), 3e-4, eps=1e-5)
    return one(module, loss, [moves() for _ in range(3)], optimizer)


@training("SAC", "three optimizers: twin critics, squashed policy, temperature")
def sac() -> Training:
    class Critics(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = mlp(SEEN + 2, 24, 1), mlp(SEEN + 2, 24, 1)

        def forward(self, seen, force):
            x = torch.cat([seen, force], 1)
            return self.a(x).squeeze(1), self.b(x).squeeze(1)

    class Temperature(nn.Module):
        def __init__(self):
            super().__init__()
            self.log = nn.Parameter(torch.zeros(1))

    def act(actor, seen, noise):
        mean, log_s = actor(seen).chunk(2, 1)
        log_s = log_s.clamp(-5, 2)
        raw = mean + log_s.exp() * noise
        force = torch.tanh(raw)
        log_p = torch.distributions.Normal(mean, log_s.exp(), validate_args=False).log_prob(raw)
        return force, (log_p - torch.log(1 - force**2 + 1e-6)).sum(1)

    def critic_loss(actor, critics, target, temperature, b):
        with torch.no_grad():
            force, log_p = act(actor, b["next"], b["noise"][0])
            value = torch.min(*target(b["next"], force)) - temperature.log.exp() * log_p
            wanted = b["reward"] + 0.99 * (1 - b["done"]) * value
        return sum(F.mse_loss(q, wanted) for q in critics(b["seen"], b["force"]))

    def actor_loss(actor, critics, target, temperature, b):
        force, log_p = act(actor, b["seen"], b["noise"][1])
        return (temperature.log.exp().detach() * log_p - torch.min(*critics(b["seen"], force))).mean()

    def temperature_loss(actor, critics, target, temperature, b):
        log_p = act(actor, b["seen"], b["noise"][1])[1]
        return -(temperature.log * (log_p - 2).detach()).mean()

    actor, critics, temperature = mlp(SEEN, 24, 4), Critics(), Temperature()
    target = copy.deepcopy(critics).requires_grad_(False)
    modules = {"actor": actor, "critics": critics, "target": target, "temperature": temperature}
    losses = {"critic": critic_loss, "actor": actor_loss, "temperature": temperature_loss}
    optimizers = {"critic": adam(critics), "actor": adam(actor), "temperature": adam(temperature)}
    return Training(modules, losses, optimizers, [moves() for _ in range(3)], lambda a, c, t, _: follow(t, c))


@training("TD3", "smoothed target policy, two of three updates share the critics")
def td3() -> Training:
    actor, critic = nn.Sequential(mlp(SEEN, 24, 2), nn.Tanh()), mlp(SEEN + 2, 24, 1)
    targets = [copy.deepcopy(m).requires_grad_(False) for m in (actor, critic)]

    def critic_loss(actor, critic, far_actor, far_critic, b):
        with torch.no_grad():
            force = (far_actor(b["next"]) + (0.2 * b["noise"][0]).clamp(-0.5, 0.5)).clamp(-1, 1)
            value = far_critic(torch.cat([b["next"], force], 1)).squeeze(1)
            wanted = b["reward"] + 0.99 * (1 - b["done"]) * value
        return F.mse_loss(critic(torch.cat([b["seen"], b["force"]], 1)).squeeze(1), wanted)

    def actor_loss(actor, critic, far_actor, far_critic, b):
        return -critic(torch.cat([b["seen"], actor(b["seen"])], 1)).mean()

    def after(actor, critic, far_actor, far_critic):
        follow(far_actor, actor)
        follow(far_critic, critic)

    modules = {"actor": actor, "critic": critic, "far_actor": targets[0], "far_critic": targets[1]}
    optimizers = {"critic": adam(critic), "actor": adam(actor)}
    return Training(
        modules, {"critic": critic_loss, "actor": actor_loss}, optimizers, [moves() for _ in range(3)], after
    )


@training("decision transformer", "returns, states and actions interleaved, masked loss")
def decisions() -> Training:
    class Net(nn.Module):
        def __init__(self, wide: int = 16):
            super().__init__()
            self.ret, self.state, self.action = nn.Linear(1, wide), nn.Linear(SEEN, wide), nn.Linear(2, wide)
            self.time = nn.Embedding(20, wide)
            self.layer = nn.TransformerEncoderLayer(wide, 2, 24, dropout=0.0, batch_first=True)
            self.out = nn.Linear(wide, 2)

        def forward(self, ret, state, action, time):
            when = self.time(time)
            x = torch.stack([self.ret(ret) + when, self.state(state) + when, self.action(action) + when], 2).flatten(
                1, 2
            )
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return torch.tanh(self.out(self.layer(x, src_mask=mask)[:, 1::3]))

    def loss(m, b):
        made, valid = m(*b[:4]), b[4]
        return F.mse_loss(made[valid], b[2][valid])

    def batch():
        valid = torch.arange(5) < torch.tensor([5, 3, 4])[:, None]
        parts = torch.randn(3, 5, 1), torch.randn(3, 5, SEEN), torch.rand(3, 5, 2), torch.randint(0, 20, (3, 5))
        return *parts, valid

    return one(Net(), loss, [batch() for _ in range(2)])
