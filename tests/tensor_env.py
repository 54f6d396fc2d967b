"""A small deterministic vectorised environment for unit tests: everything that happens is in tables.

Shapes: N envs, T steps, K rows of the tables.
"""

from __future__ import annotations

import time

import torch
from isaaclab_rnn_ppo.utils.models import Models, make_models
from isaaclab_rnn_ppo.utils.rollout import RolloutCollector, policy_from_worker_env
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from tensordict.nn.distributions import NormalParamExtractor
from torch import nn
from torchrl.data import Binary, Composite, Unbounded
from torchrl.envs import Compose, EnvBase, InitTracker, RewardSum, TransformedEnv
from torchrl.modules import IndependentNormal, LSTMModule, ProbabilisticActor

TERMINATE, TRUNCATE = 1, 2


class TableEnv(EnvBase):
    """Plays tables of K rows, over and over; step k (counted over the env's life) reads row k.

    Args:
        roots: observation that the policy sees at step k, [K + 1, N, obs].
        finals: true next observation where an episode ends at step k, [K, N, obs].
        ends: 0, TERMINATE or TRUNCATE at step k, [K, N].
        rewards: of step k, [K, N].
        critic: adds a ``critic`` group of twice the observation.
        log: adds ``("next", "log")`` [N, 2]: the reward and its negative where an episode ends.
        delay_s: what a step takes at least.
        fail_at: step, counted over the env's life, that raises.
    """

    def __init__(
        self,
        roots,
        finals,
        ends,
        rewards,
        *,
        num_actions=2,
        critic=False,
        log=False,
        delay_s=0.0,
        fail_at=None,
        device="cpu",
    ):
        num_envs, num_obs = roots.shape[1:]
        super().__init__(device=device, batch_size=[num_envs])
        self.tables = roots, finals, ends, rewards
        self.k, self.critic, self.log, self.delay_s, self.fail_at = 0, critic, log, delay_s, fail_at
        shape = (num_envs, num_obs)
        groups = {"policy": Unbounded(shape)} | ({"critic": Unbounded(shape)} if critic else {})
        self.observation_spec = Composite(groups, shape=[num_envs])
        self.action_spec = Unbounded((num_envs, num_actions))
        rewards = {"reward": Unbounded((num_envs, 1))} | ({"log": Unbounded((num_envs, 2))} if log else {})
        self.reward_spec = Composite(rewards, shape=[num_envs])
        flag = Binary(1, (num_envs, 1), dtype=torch.bool)
        self.done_spec = Composite(done=flag.clone(), terminated=flag.clone(), truncated=flag.clone(), shape=[num_envs])

    def _observe(self, observation):
        groups = {"policy": observation.clone()}
        return groups | ({"critic": observation * 2} if self.critic else {})

    def _reset(self, tensordict=None, **kwargs):
        return TensorDict(self._observe(self.tables[0][self.k % len(self.tables[0])]), self.batch_size)

    def _step(self, tensordict):
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.k == self.fail_at:
            raise RuntimeError(f"the table ends at step {self.k}")
        roots, finals, ends, rewards = self.tables
        row = self.k % len(ends)
        self.k += 1
        end, reward = ends[row].unsqueeze(-1), rewards[row].unsqueeze(-1)
        observation = torch.where(end > 0, finals[row], roots[self.k % len(roots)])
        flags = {"terminated": end == TERMINATE, "truncated": end == TRUNCATE, "done": end > 0}
        log = {"log": torch.where(end > 0, torch.cat([reward, -reward], -1), 0.0)} if self.log else {}
        return TensorDict(self._observe(observation) | {"reward": reward} | flags | log, self.batch_size)

    def _set_seed(self, seed):
        pass

    def get_extra_state(self):
        return torch.tensor(self.k)

    def set_extra_state(self, state):
        self.k = int(state)


def with_transforms(env: EnvBase) -> TransformedEnv:
    """What ``make_env`` adds to an Isaac Lab env."""
    return TransformedEnv(env, Compose(RewardSum(in_keys=["reward"], reward_spec=True), InitTracker()))


def make_random_env(
    num_envs: int, seed: int = 0, *, num_obs=3, num_steps=400, end_rate=0.1, unknown_rate=0.0, **kwargs
) -> TransformedEnv:
    """Random tables whose observations tell where they are from (``origin``).

    Args:
        end_rate: probability that an episode ends at a step; half of them terminate.
        unknown_rate: probability that a final observation is NaN.
        kwargs: of ``TableEnv``.
    """
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(num_steps + 1, num_envs, num_obs, generator=generator)
    finals = torch.randn(num_steps, num_envs, num_obs, generator=generator)
    # Exact in float32, and small enough not to saturate a network.
    roots[..., 0] = finals[..., 0] = seed / 8 + torch.arange(num_envs) / 1024
    roots[..., 1] = torch.arange(num_steps + 1).unsqueeze(-1) / 1024
    finals[..., 1] = -torch.arange(1, num_steps + 1).unsqueeze(-1) / 1024
    finals[torch.rand(num_steps, num_envs, generator=generator) < unknown_rate] = torch.nan
    draw = torch.rand(num_steps, num_envs, generator=generator)
    ends = torch.where(draw < end_rate / 2, TERMINATE, torch.where(draw < end_rate, TRUNCATE, 0))
    rewards = torch.randn(num_steps, num_envs, generator=generator)
    return with_transforms(TableEnv(roots, finals, ends, rewards, **kwargs))


def make_task_env(
    task: str, *, num_envs: int, device: str, asset_root: str, seed: int, overrides=(), stagger_episodes: bool = False
) -> TransformedEnv:
    """In place of ``make_env`` in ``train.py``; tokens ``env.KEY=NUMBER`` are options of ``make_random_env``.

    ``env.nan_from=K`` makes every reward NaN from step K on. There is no time limit to stagger.
    """
    options = {key.removeprefix("env."): float(value) for key, value in (token.split("=") for token in overrides)}
    nan_from = int(options.pop("nan_from", 400))
    torch.manual_seed(seed)  # as `make_env` does
    env = make_random_env(num_envs, seed, log=True, **options)
    env.base_env.tables[3][nan_from:] = torch.nan
    env.base_env.log_names = ["reward", "minus reward"]
    env.base_env.task_info = {"observation_sizes": {"policy": 3}, "num_actions": 2}
    return env


def origin(observation: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Seed, env and step (of a final one: -1 - step) of an observation [..., obs] of ``make_random_env``."""
    seed = (observation[..., 0] * 8).floor()
    return seed, (observation[..., 0] - seed / 8) * 1024, observation[..., 1] * 1024


def make_test_models(*, observation_spec, action_spec, hidden_size=16, rnn="lstm", embedding=(), **kwargs) -> Models:
    """Small models with values of order 1, from the same weights in every process. Options: ``make_models``."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = make_models(
            observation_spec=observation_spec,
            action_spec=action_spec,
            hidden_size=hidden_size,
            rnn=rnn,
            embedding=embedding,
            **kwargs,
        )
    with torch.no_grad():
        for parameter in models.value_operator.parameters():
            parameter.mul_(3)
    return models


def make_test_policy(**kwargs) -> nn.Module:
    """What a worker runs."""
    return make_test_models(**kwargs).collector_policy


def make_local_collector(
    env: EnvBase, *, rollout_steps: int, make_policy=make_test_policy, boundary_slots: int = 2, **kwargs
) -> RolloutCollector:
    """What runs in a worker, in this process."""
    return RolloutCollector(
        lambda: env,
        policy_factory=lambda: policy_from_worker_env(make_policy),
        boundary_slots=boundary_slots,
        frames_per_batch=env.batch_size[0] * rollout_steps,
        device=env.device,
        storing_device="cpu",
        return_same_td=True,
        **kwargs,
    )


def make_plain_policy(*, num_obs: int, num_actions: int, hidden_size: int) -> TensorDictSequential:
    """The recurrent policy that TorchRL's tutorials build, to compare with."""
    embed = TensorDictModule(
        nn.Sequential(nn.Linear(num_obs, hidden_size), nn.ELU()), in_keys=["policy"], out_keys=["embedded"]
    )
    lstm = LSTMModule(input_size=hidden_size, hidden_size=hidden_size, in_key="embedded", out_key="features")
    head = nn.Sequential(nn.Linear(hidden_size, 2 * num_actions), NormalParamExtractor())
    return TensorDictSequential(
        embed,
        lstm,
        ProbabilisticActor(
            TensorDictModule(head, in_keys=["features"], out_keys=["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=IndependentNormal,
            return_log_prob=True,
        ),
    )
