"""make_env on the real simulator: every run is a fresh process that saves what it saw, once for all tests.

Shapes: N envs, T steps.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from isaaclab_rnn_ppo.utils import envs
from isaaclab_rnn_ppo.utils.assets import build_bundled_root

CARTPOLES = ("Isaac-Cartpole", "Isaac-Cartpole-Direct", "Critic-Cartpole-Direct")
SHORT = ["env.episode_length_s=2.0"]  # 120 control periods of 1/60 s

# Half of the cartpoles are pushed out of bounds again and again, the others stay and time out after 120 steps.
RUNS = {
    "Isaac-Cartpole": {"steps": 130, "overrides": ["env.scene.num_envs=32", *SHORT]},
    "Isaac-Cartpole-Direct": {"steps": 130, "num_envs": 32, "seed": 1, "overrides": SHORT},
    "Critic-Cartpole-Direct": {"steps": 130, "num_envs": 32, "overrides": SHORT},
    "Isaac-Ant": {"steps": 40, "num_envs": 8, "overrides": ["env.episode_length_s=0.5"]},
    "Isaac-Ant-Direct": {"steps": 40, "num_envs": 8, "overrides": ["env.episode_length_s=0.5"]},
    "staggered": {
        "task": "Isaac-Cartpole",
        "steps": 121,
        "num_envs": 32,
        "overrides": SHORT,
        "stagger_episodes": True,
    },
    # The first run again, its observation as a group of terms, and no final observations.
    "terms": {
        "task": "Isaac-Cartpole",
        "steps": 130,
        "overrides": [
            "env.scene.num_envs=32",
            "env.observations.policy.concatenate_terms=false",
            "env.compute_final_obs=false",
            *SHORT,
        ],
    },
}
SIMULATED = pytest.mark.parametrize("name", [name for name in RUNS if name not in ("terms", "staggered")])


@functools.cache
def _run(name: str) -> SimpleNamespace:
    """What a run of RUNS saw, `data` [T, N, ...]."""
    with tempfile.TemporaryDirectory() as folder:
        request = json.dumps({"task": name, "asset_root": str(build_bundled_root()), **RUNS[name]})
        done = subprocess.run(
            [sys.executable, __file__, request, f"{folder}/out.pt"], capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return SimpleNamespace(**torch.load(f"{folder}/out.pt", weights_only=False), stdout=done.stdout)


def _simulate(task: str, steps: int, out: str, **kwargs) -> None:
    """Runs in a process of its own."""
    if task == "Critic-Cartpole-Direct":
        os.environ["ISAACSIM_ASSET_ROOT"] = kwargs["asset_root"]  # before Isaac Lab is imported
        _register_critic_task()
    env = envs.make_env(task, **kwargs)
    isaac = env.unwrapped
    seen: dict[str, list] = {"extras": [], "positions": [], "reset_ids": []}
    reset_idx = isaac._reset_idx

    def spy(ids):  # the joints as they are when Isaac Lab is about to reset them
        seen["reset_ids"][-1].append(torch.as_tensor(ids).long())
        seen["positions"][-1].append(_joints(isaac)[ids.long()].clone())
        return reset_idx(ids)

    env.reset()  # as a collector does, after make_env's own
    root = env.reset()
    isaac._reset_idx = spy
    pushed = torch.zeros(env.action_spec.shape)
    pushed[::2] = 1.0
    steps_seen = []
    for step in range(steps):
        seen["reset_ids"].append([]), seen["positions"].append([])
        root["action"] = pushed if "Cartpole" in task else torch.randn(env.action_spec.shape)
        current, root = env.step_and_maybe_reset(root)
        final = isaac.extras.get("final_obs")
        seen["extras"].append({group: value.clone() for group, value in final.items()} if final else None)
        steps_seen.append(current.clone())
        if step == 0:
            log_before_any_end = current["next", "log"].clone()
    attributes = ("log_names", "has_final_obs", "step_dt", "max_episode_length")
    result = {
        "data": torch.stack(steps_seen),
        "last_root": root,
        "specs": (env.observation_spec, env.action_spec, env.full_reward_spec),
        "device": str(env.device),
        "batch_size": tuple(env.batch_size),
        "log_before_any_end": log_before_any_end,
        **{name: getattr(env, name) for name in attributes},
        **seen,
    }
    torch.save(result, out)
    env.close()
    assert env.is_closed


def _joints(isaac) -> torch.Tensor:
    (robot,) = isaac.scene.articulations.values()
    return robot.data.joint_pos.torch


def _register_critic_task() -> None:
    """Isaac-Cartpole-Direct with a group for the critic: the joint positions."""
    import gymnasium
    import isaaclab_tasks  # noqa: F401
    from isaaclab_tasks.core.cartpole.cartpole_direct_env import CartpoleEnv
    from isaaclab_tasks.core.cartpole.cartpole_direct_env_cfg import CartpoleEnvCfg

    class Env(CartpoleEnv):
        def _get_observations(self):
            return super()._get_observations() | {"critic": _joints(self).double(), "unused": torch.zeros(3)}

    class Cfg(CartpoleEnvCfg):
        def __post_init__(self):
            super().__post_init__() if hasattr(super(), "__post_init__") else None
            self.state_space = 2

    gymnasium.register(
        "Critic-Cartpole-Direct", entry_point=Env, disable_env_checker=True, kwargs={"env_cfg_entry_point": Cfg}
    )


@pytest.mark.isaac
def test_staggered_episodes_time_out_at_different_steps_and_then_last_their_time():
    data = _run("staggered").data[:, 1::2]  # those that are not pushed
    assert data["is_init"][0].all()
    truncated = data["next", "truncated"].squeeze(-1)
    assert (truncated.sum(0) == 1).all()
    first = truncated.int().argmax(0)
    assert len(first.unique()) > 8 and first.max() < 120
    together = _run("Isaac-Cartpole").data[:, 1::2]["next", "truncated"].squeeze(-1)
    assert (together.int().argmax(0) == 119).all()


@pytest.mark.isaac
@SIMULATED
def test_keys_shapes_and_types(name):
    run = _run(name)
    n = RUNS[name].get("num_envs", 32)
    obs, act = (60, 8) if "Ant" in name else (4, 1)
    assert run.batch_size == (n,) and run.device == "cpu"
    flags = {key: ((n, 1), torch.bool) for key in ("done", "terminated", "truncated")}
    observed = {"policy": ((n, obs), torch.float32), "is_init": ((n, 1), torch.bool)}
    if name.startswith("Critic"):
        observed["critic"] = ((n, 2), torch.float32)
    scalars = {key: ((n, 1), torch.float32) for key in ("reward", "episode_reward")}
    log = {"log": ((n, len(run.log_names)), torch.float32)}

    def described(tensordict):
        return {
            key: (tuple(value.shape), value.dtype) for key, value in tensordict.items() if key not in ("next", "action")
        }

    assert described(run.data[0]["next"]) == flags | observed | scalars | log
    assert described(run.data[0]) == flags | observed | {"episode_reward": scalars["episode_reward"]}
    observation_spec, action_spec, reward_spec = run.specs
    assert set(observation_spec.keys()) == set(observed)
    assert observation_spec["policy"].shape == (n, obs) and action_spec.shape == (n, act)
    assert reward_spec["log"].shape == (n, len(run.log_names))
    assert not run.data.isnan().any()


@pytest.mark.isaac
@SIMULATED
def test_the_next_observation_is_isaac_labs_final_one_bit_for_bit_where_an_episode_ended(name):
    run = _run(name)
    done = run.data["next", "done"].squeeze(-1)
    assert run.has_final_obs and done.any()
    for group in ("policy", "critic") if name.startswith("Critic") else ("policy",):
        following = torch.cat([run.data[group][1:], run.last_root[group].unsqueeze(0)])
        for ended, true_next, root, extras in zip(done, run.data["next", group], following, run.extras):
            if ended.any():
                assert torch.equal(true_next[ended], extras[group][ended].float())
                assert (true_next[ended] != root[ended]).any(-1).all()
            assert torch.equal(true_next[~ended], root[~ended])


@pytest.mark.isaac
@pytest.mark.parametrize("name", CARTPOLES)
def test_the_final_observation_is_the_state_just_before_the_reset(name):
    """Against the joints themselves, not against what Isaac Lab puts into extras."""
    run = _run(name)
    seen = 0
    for step in range(len(run.data)):
        done = run.data[step]["next", "done"].squeeze(-1)
        if not run.reset_ids[step]:
            assert not done.any()
            continue
        (ids,), (positions,) = run.reset_ids[step], run.positions[step]
        assert done.nonzero().squeeze(-1).tolist() == ids.sort().values.tolist()
        assert torch.equal(run.data[step]["next", "policy"][ids][:, :2], positions)
        seen += len(ids)
    terminated, truncated = (run.data["next", key].squeeze(-1) for key in ("terminated", "truncated"))
    assert terminated.sum() >= 32 and truncated.sum() >= 8 and seen == (terminated | truncated).sum()
    assert (run.data["next", "policy"][..., 0][terminated].abs() > 3.0).all()


@pytest.mark.isaac
@SIMULATED
def test_is_init_marks_exactly_the_step_after_an_end(name):
    run = _run(name)
    assert run.data[0]["is_init"].all()
    done = run.data["next", "done"]
    assert torch.equal(run.data[1:]["is_init"], done[:-1])
    assert torch.equal(run.last_root["is_init"], done[-1])
    assert torch.equal(done, run.data["next", "terminated"] | run.data["next", "truncated"])
    assert not run.data["done"].any() and not run.data["terminated"].any() and not run.data["truncated"].any()


@pytest.mark.isaac
@SIMULATED
def test_the_episode_return_is_the_sum_of_the_episodes_rewards(name):
    run = _run(name)
    total = torch.zeros(run.data.shape[1], 1)
    for step in range(len(run.data)):
        total = total + run.data[step]["next", "reward"]
        torch.testing.assert_close(run.data[step]["next", "episode_reward"], total, rtol=1e-5, atol=1e-5)
        total = torch.where(run.data[step]["next", "done"], 0.0, total)


@pytest.mark.isaac
@SIMULATED
def test_an_episode_length_override_applies(name):
    run = _run(name)
    limit = 30 if "Ant" in name else 120
    assert run.max_episode_length == limit and run.step_dt == pytest.approx(1 / 60)
    length = torch.zeros(run.data.shape[1], 1)
    for step in range(len(run.data)):
        length = length + 1
        assert torch.equal(run.data[step]["next", "truncated"], length == limit)
        length = torch.where(run.data[step]["next", "done"], 0.0, length)


@pytest.mark.isaac
def test_the_same_seed_repeats_a_run_bit_for_bit_and_terms_are_concatenated():
    run, terms = _run("Isaac-Cartpole"), _run("terms")
    for key in ("policy", "is_init", ("next", "reward"), ("next", "log")):
        assert torch.equal(run.data[key], terms.data[key]), key
    other = _run("Isaac-Cartpole-Direct")
    assert not torch.equal(run.data[0]["policy"], other.data[0]["policy"])


@pytest.mark.isaac
def test_without_final_observations_the_episodes_last_one_stands_in_and_an_attribute_says_so():
    run = _run("terms")
    done = run.data["next", "done"].squeeze(-1)
    assert not run.has_final_obs and done.any() and not run.data.isnan().any()
    assert torch.equal(run.data["next", "policy"][done], run.data["policy"][done])
    assert torch.equal(run.data["next", "policy"][:-1][~done[:-1]], run.data["policy"][1:][~done[:-1]])


@pytest.mark.isaac
def test_the_log_holds_isaac_labs_statistics_of_the_finished_episodes():
    run = _run("Isaac-Cartpole")
    rewards = [name for name in run.log_names if name.startswith("Episode_Reward/")]
    assert {"Episode_Reward/pole_pos", "Episode_Reward/alive"} < set(rewards)
    ends = {"Episode_Termination/time_out": "truncated", "Episode_Termination/cart_out_of_bounds": "terminated"}
    assert set(ends) < set(run.log_names)
    log = dict(zip(run.log_names, run.data["next", "log"].unbind(-1)))
    done = run.data["next", "done"].squeeze(-1)
    assert not run.log_before_any_end.any() and not run.data["next", "log"][~done].any()
    for name, flag in ends.items():
        assert torch.equal(log[name], run.data["next", flag].squeeze(-1).float())
    # Isaac Lab reports the mean sum of a term over the envs that ended in a step, by the time limit in seconds.
    returns = run.data["next", "episode_reward"].squeeze(-1)
    for step in done.any(-1).nonzero().squeeze(-1):
        ended = done[step]
        reported = torch.stack([log[name][step][ended] for name in rewards]).sum(0) * 2.0
        torch.testing.assert_close(reported, returns[step][ended].mean().expand_as(reported), rtol=1e-4, atol=1e-4)
    survived = run.data["next", "truncated"].squeeze(-1)[done].float().mean()
    torch.testing.assert_close(log["Metrics/success_rate"][done].mean(), survived)


@pytest.mark.isaac
@SIMULATED
def test_the_simulator_prints_nothing(name):
    assert _run(name).stdout == ""


@pytest.mark.isaac
def test_user_mistakes_are_named_before_the_simulator_starts():
    cases = [
        (dict(task="Isaac-Cartpol"), ["--task Isaac-Cartpol", "Isaac-Cartpole", "Isaac-Cartpole-Direct"]),
        (dict(task="Isaac-Ant-v0"), ["Isaac-Ant"]),
        (dict(task="Isaac-Pendulum-MARL-Direct"), ["multi-agent"]),
        (dict(task="IsaacContrib-Lift-Cube-Franka"), ["needs Isaac Sim", "PhysxCfg"]),
        (dict(task="nowhere:Isaac-Ant"), ["no package 'nowhere'"]),
        (dict(num_envs=0), ["--num-envs: 0"]),
        (dict(num_envs=64, overrides=["env.scene.num_envs=32"]), ["--num-envs 64", "env.scene.num_envs=32"]),
        (dict(overrides=["env.sim.device=cuda:0"]), ["--device cpu", "env.sim.device=cuda:0"]),
        (dict(overrides=["env.episode_lengths=3"]), ["env.episode_lengths=3", "nearest: env.episode_length_s"]),
        (
            dict(overrides=["env.rewards.pole_pos.wieght=3"]),
            ["pole_pos has no `wieght`", "pole_pos.weight"],
        ),
        (dict(overrides=["env.rewards.pole_pos.params.tarjet=1"]), ["params.target"]),
        (dict(overrides=["env.episode_length_s=two"]), ["'two' is a string", "whole number (5)"]),
        (dict(overrides=["env.scene.num_envs=2.5"]), ["2.5 is a number", "whole number (4096)"]),
        (dict(overrides=["env.scene.num_envs=true"]), ["a truth value"]),
        (dict(overrides=["env.sim.dt=[1]"]), ["a list"]),
        (dict(overrides=["env.scene=3"]), ["CartpoleSceneCfg"]),
        (dict(overrides=["episode_length_s=3"]), ["env.KEY=VALUE"]),
        (dict(overrides=["env.episode_length_s"]), ["env.KEY=VALUE"]),
        (dict(overrides=["env.sim.physics=nope"]), ["nope", "newton_mjwarp"]),
    ]
    valid = [
        "env.episode_length_s=2.0",  # the default is the integer 5, of a field that Isaac Lab annotates as float
        "env.rewards.pole_pos.weight=-2",
        "env.rewards.pole_pos=null",
        "env.events.reset_cart_position.params.position_range=[0,0.1]",
        "env.sim.physics=newton_mjwarp",
        "physics=newton_mjwarp",
        "env.seed=7",
    ]
    code = (
        "import json, sys; from isaaclab_rnn_ppo.utils import envs\n"
        "def ask(case):\n"
        "    try: return str(envs.resolve_task(**{'task': 'Isaac-Cartpole', **case}).seed)\n"
        "    except ValueError as error: return f'ValueError: {error}'\n"
        "cases = json.loads(sys.argv[1])\n"
        "clean = [m for m in ('isaaclab', 'isaaclab_tasks', 'newton', 'warp', 'pxr', 'omni') if m in sys.modules]\n"
        "with envs._captured_output(): answers = [ask(case) for case in cases]\n"
        "from isaaclab.sim import SimulationContext; assert SimulationContext.instance() is None\n"
        "print(json.dumps([clean, answers]))"
    )
    asked = json.dumps([case for case, _ in cases] + [{"overrides": [token]} for token in valid])
    done = subprocess.run([sys.executable, "-c", code, asked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported_by_the_learner, answers = json.loads(done.stdout)
    assert imported_by_the_learner == []
    for (case, expected), answer in zip(cases, answers):
        assert answer.startswith("ValueError: "), (case, answer)
        assert all(text in answer for text in expected), (case, answer)
    assert answers[len(cases) :] == ["0"] * (len(valid) - 1) + ["7"]


@pytest.mark.isaac
def test_a_launch_that_fails_says_why_and_shows_the_last_output(tmp_path):
    (tmp_path / "Isaac").mkdir()
    code = "from isaaclab_rnn_ppo.utils.envs import make_env; make_env('Isaac-Cartpole', num_envs=2, asset_root={!r})"
    done = subprocess.run([sys.executable, "-c", code.format(str(tmp_path))], capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    message = done.stderr[done.stderr.rindex("RuntimeError: ") :]
    assert "could not start Isaac-Cartpole: FileNotFoundError" in message and f"{tmp_path}/Isaac/IsaacLab" in message
    assert f"The asset root is {tmp_path} (--asset-root)" in message
    assert "Its last output" in message and "in retrieve_file_path" in message


def test_counts_of_terminations_become_shares_and_new_names_warn_once():
    """Some direct tasks report how many envs ended; names that come late are ignored, with one warning."""
    log = {
        "Episode_Termination/fell": 3,
        "Episode_Termination/share": torch.tensor(0.25),
        "Metrics/a": 2.0,
        "late": 1.0,
    }
    env = SimpleNamespace(
        read_log=lambda: log,
        log_names=["Episode_Termination/fell", "Episode_Termination/share", "Metrics/a", "Metrics/b"],
        _env=SimpleNamespace(unwrapped=SimpleNamespace()),
        _log_values={"Metrics/b": torch.tensor(7.0)},
        _warned_of_new_names=False,
        device=torch.device("cpu"),
    )
    done = torch.tensor([[True], [False], [True], [True], [True]])
    with pytest.warns(UserWarning, match=r"\['late'\]") as warned:
        written = envs.IsaacEnv.episode_log(env, done)
        envs.IsaacEnv.episode_log(env, done)
    assert len(warned) == 1
    expected = torch.tensor([3 / 4, 0.25, 2.0, 7.0]).expand(5, 4) * done
    torch.testing.assert_close(written, expected)
    env.log_names = []
    assert envs.IsaacEnv.episode_log(env, done).shape == (5, 0)


def test_captured_output_is_shown_only_in_the_error_message(capfd, monkeypatch):
    for descriptor, name in ((1, "stdout"), (2, "stderr")):  # pytest's own do not write to the descriptors
        monkeypatch.setattr(sys, name, os.fdopen(descriptor, "w", buffering=1, closefd=False))
    with envs._captured_output() as output:
        print("a line of python")
        os.system("echo a line of a library")
        assert output() == "a line of python\na line of a library"
        print("[Error] could not open asset", file=sys.stderr)
    print("after", flush=True)
    captured = capfd.readouterr()
    assert captured.out == "after\n" and captured.err == "[Error] could not open asset\n"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _simulate(out=sys.argv[2], **json.loads(sys.argv[1]))
