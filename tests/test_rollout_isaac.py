"""Rollouts of the real simulator against what Isaac Lab itself reported at every step.

Shapes: N envs, T steps, B boundary slots, K steps in all.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from isaaclab_rnn_ppo.utils import make_advantage, make_collector, make_env
from isaaclab_rnn_ppo.utils.assets import ASSET_ROOT_ENV, build_bundled_root
from tensor_env import TERMINATE, TRUNCATE, make_test_models, make_test_policy
from test_advantages import SequentialValues, T, reference
from test_collectors import log_prob_error, perturb

WINDOWS, NUM_ENVS = 5, 16
# Manager-based and direct, both with a group for the critic. An episode is 11 control periods of 1/60 s, unless
# the cart leaves bounds that are as narrow as the carts' own start positions: some do at their first step.
BOUNDS = "env.terminations.cart_out_of_bounds.params.bounds=[-0.9,0.9]"
TASKS = {
    "Isaac-Cartpole-NoVelocity": BOUNDS,
    "Critic-Cartpole-Direct": "env.max_cart_pos=0.3",
    "Isaac-Cartpole": BOUNDS,
}


def make_recording_env(num_envs: int, seed: int, *, task: str, asset_root: str):
    """In the worker: ``make_env`` and a list of what every step of Isaac Lab's own env returned."""
    os.environ[ASSET_ROOT_ENV] = asset_root  # before Isaac Lab is imported
    if task == "Critic-Cartpole-Direct":
        _register_direct_task_with_critic()
    overrides = ["env.episode_length_s=0.18", TASKS[task]]
    env = make_env(task, num_envs=num_envs, seed=seed, overrides=overrides, asset_root=asset_root)
    isaac = env.base_env._env.unwrapped
    isaac_step, isaac.recorded = isaac.step, []

    def step(action):
        observations, reward, terminated, truncated, extras = result = isaac_step(action)
        copied = {"reward": reward, "terminated": terminated, "truncated": truncated}
        copied |= {f"observation {group}": value for group, value in observations.items()}
        copied |= {f"final {group}": value for group, value in extras.get("final_obs", observations).items()}
        isaac.recorded.append({key: value.clone() for key, value in copied.items()})
        return result

    isaac.step = step
    env.base_env.recorded = isaac.recorded
    return env


def _register_direct_task_with_critic() -> None:
    import gymnasium
    from isaaclab_tasks.core.cartpole.cartpole_direct_env import CartpoleEnv

    class CriticCartpole(CartpoleEnv):
        def _get_observations(self):
            observations = super()._get_observations()
            return observations | {"critic": observations["policy"] * 0.5}

    spec = gymnasium.spec("Isaac-Cartpole-Direct")
    gymnasium.register("Critic-Cartpole-Direct", CriticCartpole, disable_env_checker=True, kwargs=spec.kwargs)


@dataclass
class Run:
    batches: list
    recorded: dict[str, torch.Tensor]  # [K, N, ..]
    models: list  # those that acted in each window


@pytest.fixture(
    scope="module",
    params=[pytest.param(task, marks=pytest.mark.slow if task == "Isaac-Cartpole" else ()) for task in TASKS],
)
def run(request) -> Run:
    torch.manual_seed(0)
    collector = make_collector(
        create_env_fn=partial(make_recording_env, task=request.param, asset_root=str(build_bundled_root())),
        make_policy=make_test_policy,
        num_envs=NUM_ENVS,
        rollout_steps=T,
        boundary_slots=2,
    )
    try:
        specs = {key: collector.getattr_env(key) for key in ("observation_spec", "action_spec")}
        models, acted, batches = make_test_models(**specs), [], []
        rollouts = iter(collector)
        for window in range(WINDOWS):
            if window == WINDOWS - 1:
                perturb(models)
            collector.update_policy_weights_(models.collector_policy)
            batches.append(next(rollouts).clone())
            acted.append(copy.deepcopy(models))
        steps = collector.getattr_env("recorded")
    finally:
        collector.shutdown()
    recorded = {key: torch.stack([step[key] for step in steps]) for key in steps[-1]}
    return Run(batches, recorded, acted)


def groups(batch) -> list[str]:
    return [group for group in ("policy", "critic") if batch["final"].get(group, None) is not None]


@pytest.mark.isaac
def test_steps_and_finals_are_isaac_labs_bit_for_bit(run):
    recorded, cuts, terminations = run.recorded, 0, 0
    for window, batch in enumerate(run.batches):
        rows = slice(window * T, (window + 1) * T)
        flags, final = batch["steps", "next"], batch["final"]
        terminated, truncated = recorded["terminated"][rows].T, recorded["truncated"][rows].T
        assert torch.equal(flags["terminated"].squeeze(-1), terminated)
        assert torch.equal(flags["done"].squeeze(-1), terminated | truncated)
        assert torch.equal(flags["reward"].squeeze(-1), recorded["reward"][rows].T)
        for group in groups(batch):
            roots = recorded[f"observation {group}"][window * T : (window + 1) * T - 1]
            assert torch.equal(batch["steps", group][:, 1:], roots.transpose(0, 1))
        assert torch.equal(final["valid"][:, -1], ~terminated[:, -1])
        assert torch.equal(final["valid"][:, 0], (truncated & ~terminated)[:, :-1].any(1))
        for env, slot in final["valid"].nonzero().tolist():
            t = int(final["time"][env, slot])
            source = "final" if truncated[env, t] else "observation"
            for group in groups(batch):
                assert torch.equal(final[group][env, slot], recorded[f"{source} {group}"][rows][t, env])
            cuts += source == "final"
        terminations += int(terminated.sum())
        is_init = batch["steps", "is_init"].squeeze(-1)
        assert torch.equal(is_init[:, 1:], (terminated | truncated)[:, :-1])
    assert cuts >= NUM_ENVS and terminations >= NUM_ENVS // 2
    different = recorded["final policy"] != recorded["observation policy"]
    assert different[recorded["truncated"]].any(-1).all()  # a reset changes the observation
    print(f"{cuts} cuts, {terminations} terminations")


@pytest.mark.isaac
def test_window_end_is_the_next_windows_start(run):
    for batch, following in zip(run.batches, run.batches[1:]):
        goes_on = ~batch["steps", "next", "done"][:, -1, 0]
        assert goes_on.any() and torch.equal(following["steps", "is_init"][:, 0, 0], ~goes_on)
        for group in groups(batch):
            assert torch.equal(batch["final", group][goes_on, -1], following["steps", group][goes_on, 0])


@pytest.mark.isaac
def test_gae_is_exact_and_needs_the_finals(run):
    """Against a float64 loop over what Isaac Lab reported, until the weights change."""
    rows = (WINDOWS - 1) * T
    group = groups(run.batches[0])[-1]
    models, recorded = run.models[0], run.recorded
    first = run.batches[0]["steps", group][:, 0]
    roots = torch.cat([first.unsqueeze(0), recorded[f"observation {group}"][:rows]])
    ends = torch.where(recorded["terminated"], TERMINATE, torch.where(recorded["truncated"], TRUNCATE, 0))[:rows]
    tables = roots, recorded[f"final {group}"][:rows], ends, recorded["reward"][:rows]
    expected = reference(tables, SequentialValues(models), num_slots=2, gamma=0.97, gae_lambda=0.9)
    advantage = make_advantage(value_operator=models.value_operator, gamma=0.97, gae_lambda=0.9, normalize=False)
    for window, batch in enumerate(run.batches[:-1]):
        target = expected["advantage"][window * T :][:T]
        actual = advantage(batch)["steps", "advantage"].squeeze(-1).T.double()
        torch.testing.assert_close(actual, target, rtol=1e-5, atol=1e-5)
        without = batch.clone()
        without["final", "valid"].zero_()
        assert not torch.allclose(advantage(without)["steps", "advantage"].squeeze(-1).T.double(), target, atol=1e-3)
    assert not expected["approximated"].any()


@pytest.mark.isaac
def test_on_policy_identity_before_and_after_a_push(run):
    for window, (batch, models) in enumerate(zip(run.batches, run.models)):
        assert (batch["steps", "policy_version"] == window + 1).all()
        assert log_prob_error(batch, models) < 1e-4
    assert log_prob_error(run.batches[-1], run.models[0]) > 1e-2
    assert any(batch["steps", "is_init"][:, 1:].any() for batch in run.batches)
