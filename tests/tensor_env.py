"""A small deterministic vectorised environment for unit tests: everything that happens is in tables."""

from __future__ import annotations

import torch
from tensordict import TensorDict
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, RewardSum, TransformedEnv

TERMINATE, TRUNCATE = 1, 2


class TableEnv(EnvBase):
    """Plays tables of shape [K, N]; step k (counted over the env's life) of env n reads row k.

    Args:
        roots: observation that the policy sees at step k, [K + 1, N, obs].
        finals: true next observation where an episode ends at step k, [K, N, obs].
        ends: 0, TERMINATE or TRUNCATE at step k, [K, N].
        rewards: of step k, [K, N].
        critic: adds a ``critic`` group of twice the observation.
    """

    def __init__(self, roots, finals, ends, rewards, *, num_actions=2, critic=False, device="cpu"):
        num_envs, num_obs = roots.shape[1:]
        super().__init__(device=device, batch_size=[num_envs])
        self.tables = roots, finals, ends, rewards
        self.k, self.critic = 0, critic
        shape = (num_envs, num_obs)
        groups = {"policy": Unbounded(shape)} | ({"critic": Unbounded(shape)} if critic else {})
        self.observation_spec = Composite(groups, shape=[num_envs])
        self.action_spec = Unbounded((num_envs, num_actions))
        self.reward_spec = Unbounded((num_envs, 1))
        flag = Binary(1, (num_envs, 1), dtype=torch.bool)
        self.done_spec = Composite(done=flag.clone(), terminated=flag.clone(), truncated=flag.clone(), shape=[num_envs])

    def _observe(self, observation):
        groups = {"policy": observation.clone()}
        return groups | ({"critic": observation * 2} if self.critic else {})

    def _reset(self, tensordict=None, **kwargs):
        return TensorDict(self._observe(self.tables[0][self.k]), self.batch_size)

    def _step(self, tensordict):
        roots, finals, ends, rewards = self.tables
        end = ends[self.k].unsqueeze(-1)
        observation = torch.where(end > 0, finals[self.k], roots[self.k + 1])
        self.k += 1
        return TensorDict(
            self._observe(observation)
            | {
                "reward": rewards[self.k - 1].unsqueeze(-1),
                "terminated": end == TERMINATE,
                "truncated": end == TRUNCATE,
                "done": end > 0,
            },
            self.batch_size,
        )

    def _set_seed(self, seed):
        pass


def with_transforms(env: EnvBase) -> TransformedEnv:
    """What ``make_env`` adds to an Isaac Lab env."""
    return TransformedEnv(env, Compose(RewardSum(reward_spec=True), InitTracker()))


def make_random_env(num_envs: int, seed: int = 0, *, num_obs=3, num_steps=400, end_rate=0.1, critic=False):
    """Random tables; the observation's first entry is ``seed * 1000 + env`` so that it names its env."""
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(num_steps + 1, num_envs, num_obs, generator=generator)
    finals = torch.randn(num_steps, num_envs, num_obs, generator=generator)
    for table in (roots, finals):
        table[..., 0] = seed * 1000 + torch.arange(num_envs)
    draw = torch.rand(num_steps, num_envs, generator=generator)
    ends = torch.where(draw < end_rate / 2, TERMINATE, torch.where(draw < end_rate, TRUNCATE, 0))
    rewards = torch.randn(num_steps, num_envs, generator=generator)
    return with_transforms(TableEnv(roots, finals, ends, rewards, critic=critic))
