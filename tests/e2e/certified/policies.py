"""Actor and critic of stable-baselines3, with PPO's loss."""

import gymnasium
import torch
from stable_baselines3.common.policies import ActorCriticPolicy
from torch import nn

from tests.e2e.certified import SAMPLES, Certified, classes, rows


class Evaluated(nn.Module):
    """What PPO computes of a policy: values, log-probabilities of the actions taken, entropy."""

    def __init__(self, space: gymnasium.Space):
        super().__init__()
        observations = gymnasium.spaces.Box(-1.0, 1.0, (4,))
        self.policy = ActorCriticPolicy(observations, space, lambda _: 3e-4, net_arch=[16, 16])

    def forward(self, observations, actions):
        features = self.policy.extract_features(observations)
        latent_pi, latent_vf = self.policy.mlp_extractor(features)
        chosen = self.policy._get_action_dist_from_latent(latent_pi)
        return self.policy.value_net(latent_vf)[:, 0], chosen.log_prob(actions), chosen.entropy()


def _ppo(output, batch):
    values, log_prob, entropy = output
    ratio = torch.exp(log_prob - batch["old_log_prob"])
    clipped = torch.clamp(ratio, 0.8, 1.2) * batch["advantages"]
    policy = -torch.minimum(ratio * batch["advantages"], clipped).mean()
    return policy + 0.5 * (values - batch["returns"]).square().mean() - 0.01 * entropy.mean()


def _rollout(actions):
    of_rows = lambda scale=1.0: scale * torch.randn(SAMPLES)
    return rows(observations=torch.rand(SAMPLES, 4), actions=actions, old_log_prob=of_rows(0.1) - 1.0,
                advantages=of_rows(), returns=of_rows())  # fmt: skip


MODELS = [
    Certified("PPO, continuous actions", lambda: (Evaluated(gymnasium.spaces.Box(-1.0, 1.0, (2,))),
                                                  _rollout(torch.randn(SAMPLES, 2)), _ppo)),
    Certified("PPO, discrete actions", lambda: (Evaluated(gymnasium.spaces.Discrete(3)), _rollout(classes(3)), _ppo)),
]  # fmt: skip
