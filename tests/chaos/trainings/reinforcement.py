"""Reinforcement learning on transitions drawn at random."""

import copy

import torch
from torch import nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F

from tests.chaos.trainings import Training, Update, one, repeated, training


def mlp(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, o))


def transitions(g):
    draw = lambda *shape: torch.randn(*shape, generator=g)
    done = (torch.rand(16, generator=g) < 0.1).float()
    return draw(16, 4), torch.randint(3, (16,), generator=g), draw(16), draw(16, 4), done


@training("pytorch tutorials DQN / vwxyzjn/cleanrl: target network, Huber loss")
def dqn():
    torch.manual_seed(0)
    q = mlp(4, 3)
    target = copy.deepcopy(q).requires_grad_(False)

    def loss(q, target, batch):
        state, action, reward, after, done = batch
        with torch.no_grad():
            wanted = reward + 0.99 * (1 - done) * target(after).max(1).values
        return F.smooth_l1_loss(q(state).gather(1, action.unsqueeze(1)).squeeze(1), wanted)

    def soft_update(modules):
        with torch.no_grad():
            for t, p in zip(modules["target"].parameters(), modules["q"].parameters(), strict=True):
                t.copy_(0.005 * p.detach() + 0.995 * t)

    update = Update(loss, torch.optim.AdamW(q.parameters(), 1e-4, amsgrad=True))
    return Training({"q": q, "target": target}, {"loss": update}, repeated(transitions), soft_update)


@training("vwxyzjn/cleanrl ppo.py: clipped ratio, clipped values, entropy")
def ppo():
    torch.manual_seed(0)

    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.critic, self.actor = mlp(4, 1), mlp(4, 3)

        def get_action_and_value(self, x, action):
            probs = Categorical(logits=self.actor(x))
            return probs.log_prob(action), probs.entropy(), self.critic(x)

        forward = get_action_and_value

    def loss(agent, batch):
        state, action, log_prob, advantage, returns, values = batch
        new, entropy, value = agent.get_action_and_value(state, action)
        ratio = (new - log_prob).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        policy = torch.max(-advantage * ratio, -advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
        value = value.view(-1)
        clipped = values + torch.clamp(value - values, -0.2, 0.2)
        value_loss = 0.5 * torch.max((value - returns) ** 2, (clipped - returns) ** 2).mean()
        return policy - 0.01 * entropy.mean() + 0.5 * value_loss

    def batch(g):
        draw = lambda: torch.randn(16, generator=g)
        return torch.randn(16, 4, generator=g), torch.randint(3, (16,), generator=g), draw() - 1, draw(), draw(), draw()

    return one(Agent(), loss, repeated(batch), rate=2.5e-4)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.mean, self.log_std = nn.Linear(4, 32), nn.Linear(32, 2), nn.Linear(32, 2)

    def forward(self, x, noise):
        h = F.relu(self.body(x))
        log_std = -5 + 0.5 * 7 * (torch.tanh(self.log_std(h)) + 1)
        normal = Normal(self.mean(h), log_std.exp())
        raw = normal.mean + noise * normal.stddev
        action = torch.tanh(raw)
        log_prob = normal.log_prob(raw) - torch.log(1 - action.pow(2) + 1e-6)
        return action, log_prob.sum(1, keepdim=True)


@training("vwxyzjn/cleanrl sac_continuous_action.py: two critics, an actor and a temperature, three optimizers")
def sac():
    torch.manual_seed(0)
    modules = {"actor": Actor(), "first": mlp(6, 1), "second": mlp(6, 1)}
    modules |= {name + "_target": copy.deepcopy(modules[name]).requires_grad_(False) for name in ("first", "second")}
    log_alpha = torch.zeros(1, requires_grad=True)

    def of_critics(actor, first, second, first_target, second_target, batch):
        state, action, reward, after, done, noise, _ = batch
        with torch.no_grad():
            new, log_prob = actor(after, noise)
            both = torch.cat([after, new], 1)
            least = torch.min(first_target(both), second_target(both)) - log_alpha.exp() * log_prob
            wanted = reward + (1 - done) * 0.99 * least.view(-1)
        now = torch.cat([state, action], 1)
        return F.mse_loss(first(now).view(-1), wanted) + F.mse_loss(second(now).view(-1), wanted)

    def of_actor(actor, first, second, first_target, second_target, batch):
        state, noise = batch[0], batch[-1]
        action, log_prob = actor(state, noise)
        both = torch.cat([state, action], 1)
        return (log_alpha.exp().detach() * log_prob - torch.min(first(both), second(both))).mean()

    def of_temperature(actor, first, second, first_target, second_target, batch):
        with torch.no_grad():
            _, log_prob = actor(batch[0], batch[-1])
        return (-log_alpha.exp() * (log_prob - 2.0)).mean()

    def batch(g):
        draw = lambda *shape: torch.randn(*shape, generator=g)
        return draw(16, 4), draw(16, 2).tanh(), draw(16), draw(16, 4), torch.zeros(16), draw(16, 2), draw(16, 2)

    def soft_update(modules):
        with torch.no_grad():
            for name in ("first", "second"):
                pairs = zip(modules[name].parameters(), modules[name + "_target"].parameters(), strict=True)
                for p, t in pairs:
                    t.copy_(0.005 * p.detach() + 0.995 * t)

    critics = [*modules["first"].parameters(), *modules["second"].parameters()]
    updates = {
        "critics": Update(of_critics, torch.optim.Adam(critics, 1e-3)),
        "actor": Update(of_actor, torch.optim.Adam(modules["actor"].parameters(), 3e-4)),
        "temperature": Update(of_temperature, torch.optim.Adam([log_alpha], 1e-3)),
    }
    return Training(modules, updates, repeated(batch), soft_update)


@training("pytorch/examples reinforce.py: returns normalized over an episode")
def reinforce():
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.0), nn.ReLU(), nn.Linear(32, 2), nn.Softmax(-1))

    def loss(policy, batch):
        states, actions, rewards = batch
        total, returns = 0.0, []
        for reward in rewards.flip(0):
            total = reward + 0.99 * total
            returns.insert(0, total)
        returns = torch.stack(returns)
        returns = (returns - returns.mean()) / (returns.std() + 1.2e-7)
        log_probs = Categorical(policy(states)).log_prob(actions)
        return torch.stack([-p * r for p, r in zip(log_probs, returns, strict=True)]).sum()

    def batch(g):
        return torch.randn(10, 4, generator=g), torch.randint(2, (10,), generator=g), torch.rand(10, generator=g)

    return one(policy, loss, repeated(batch), rate=1e-2)
