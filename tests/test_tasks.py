"""The suite's own tasks, on the real simulator. Run as a script, this file is the simulator's process.

Shapes: N envs, F features.
"""

import json
import subprocess
import sys

import pytest
import torch
from isaaclab_rnn_ppo.utils.assets import BUNDLED_TASKS
from isaaclab_rnn_ppo.utils.config import CONFIG_DIR, parse_args
from torch import nn

pytestmark = pytest.mark.isaac

CUE_STEPS = 10


def probe(function: str, *args) -> dict:
    """Run one of the functions below in a process with a simulator of its own."""
    command = [sys.executable, "-W", "ignore", __file__, function, json.dumps(args)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# What runs in the simulator's process.


def make(task, num_envs, overrides=()):
    from isaaclab_rnn_ppo.utils import make_env, resolve_asset_root

    env = make_env(task, num_envs=num_envs, overrides=overrides, asset_root=resolve_asset_root("bundled")[0])
    return env, env.base_env._env.unwrapped


def registered():
    import gymnasium
    import isaaclab_tasks  # noqa: F401
    from isaaclab_rnn_ppo.utils import tasks  # noqa: F401

    return {"ids": sorted(spec.id for spec in gymnasium.registry.values())}


def groups(task):
    env, _ = make(task, 16)
    step = env.reset()
    seen = []
    for _ in range(5):
        _, step = env.step_and_maybe_reset(env.rand_action(step))
        seen.append({group: step[group].tolist() for group in ("policy", "critic")})
    names = env.base_env._env.unwrapped.observation_manager.active_terms
    env.close()
    return {"seen": seen, "terms": names}


def cue():
    """Pairs of envs that start alike, see opposite cues and act oppositely while they do."""
    env, raw = make("Isaac-Cartpole-Recall", 64)
    step = env.reset()
    robot, term = raw.scene["robot"], raw.command_manager.get_term("cue")
    sides = term.side.clone()
    half = torch.arange(64) % 32
    robot.write_joint_position_to_sim_index(position=robot.data.joint_pos.torch[half].clone())
    robot.write_joint_velocity_to_sim_index(velocity=robot.data.joint_vel.torch[half].clone())
    term.side[:] = torch.cat([torch.ones(32), -torch.ones(32)])
    action = 3 * term.side.unsqueeze(1)
    states, shown = [], []
    for _ in range(CUE_STEPS + 2):
        _, step = env.step_and_maybe_reset(step.set("action", action))
        states.append(torch.cat([robot.data.joint_pos.torch, robot.data.joint_vel.torch], 1).tolist())
        shown.append(step["policy"][:, -1].tolist())
    env.close()
    return {"states": states, "shown": shown, "sides": sides.tolist()}


def recall_rate():
    """A quarter stands at the cued side for the last second, a quarter for half of it, the rest elsewhere."""
    env, raw = make("Isaac-Cartpole-Recall", 64, ["env.episode_length_s=2.0"])
    step = env.reset()
    robot, term = raw.scene["robot"], raw.command_manager.get_term("cue")
    kind = torch.arange(64) % 4
    rates, rewards = [], []
    for t in range(120):
        there = (kind == 0) | ((kind == 1) & (t >= 90)) | ((kind == 2) & (t < 60))
        x = torch.where(there, term.side, -term.side).unsqueeze(1)
        robot.write_joint_position_to_sim_index(position=torch.cat([x, torch.zeros_like(x)], 1))
        robot.write_joint_velocity_to_sim_index(velocity=torch.zeros(64, 2))
        out, step = env.step_and_maybe_reset(step.set("action", torch.zeros(64, 1)))
        following = out["next"]
        rewards.append(following["reward"][:, 0].tolist())
        if following["done"].any():
            rates = following["log"][:, env.base_env.log_names.index("recall_rate")].tolist()
    env.close()
    return {"rates": rates, "rewards": rewards, "done": following["done"].all().item()}


def state_after_the_cue(overrides):
    """Accuracy of a classifier of the cue on the whole physical state, right after it and five steps later.

    The policy pushes the cart to the cued side while it sees the cue.
    """
    num_envs = 2048
    env, raw = make("Isaac-Cartpole-Recall", num_envs, overrides)
    step = env.reset()
    side = raw.command_manager.get_term("cue").side.clone()
    features = {}
    for t in range(CUE_STEPS + 5):
        cue = step["policy"][:, -1:]
        assert torch.equal(cue[:, 0], side if t < CUE_STEPS else torch.zeros_like(side))
        _, step = env.step_and_maybe_reset(step.set("action", 0.5 * cue))
        if t + 1 in (CUE_STEPS, CUE_STEPS + 5):
            features[str(t + 1)] = physical_state(raw, num_envs)
    env.close()
    accuracy = {t: classify(x, side > 0) for t, x in features.items()}
    return {"accuracy": accuracy, "features": {t: x.shape[1] for t, x in features.items()}}


def physical_state(raw, num_envs):
    """Everything that Isaac Lab, Newton and MuJoCo-Warp hold for each env, [N, F]."""
    import warp
    from isaaclab_newton.physics import NewtonManager

    parts = []
    data = raw.scene["robot"].data
    solver = NewtonManager._solver.mjw_data
    for holder in (data, NewtonManager.get_state_0(), NewtonManager.get_control(), solver):
        for name in sorted(set(dir(holder))):
            if name.startswith("_"):
                continue
            try:
                value = getattr(holder, name)
            except (AttributeError, NotImplementedError, RuntimeError, ValueError, TypeError):
                continue  # deprecated or not offered by this backend
            value = getattr(value, "torch", value)
            if isinstance(value, warp.array):
                value = torch.from_numpy(value.numpy())
            if not isinstance(value, torch.Tensor) or not value.is_floating_point() or not value.numel():
                continue
            if value.shape[0] % num_envs == 0:  # per env, or per body or joint of all envs in turn
                parts.append(value.reshape(num_envs, -1).double().clone())
    state = torch.cat(parts, 1)
    state = state[:, state.isfinite().all(0)]
    deviation = state.std(0)
    return ((state - state.mean(0)) / deviation)[:, deviation > 1e-9].float()


def classify(x, label):
    """Share of the second half that a small MLP trained on the first half gets right."""
    torch.manual_seed(0)
    half = len(x) // 2
    net = nn.Sequential(nn.Linear(x.shape[1], 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.1)
    for _ in range(200):
        loss = nn.functional.binary_cross_entropy_with_logits(net(x[:half])[:, 0], label[:half].float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    return float(((net(x[half:])[:, 0] > 0) == label[half:]).float().mean())


# The tests.


def test_every_preset_is_of_a_task_that_exists_and_resolves():
    names = sorted(path.stem for path in CONFIG_DIR.glob("*.yaml") if path.stem != "ppo")
    assert len(names) >= 8 and set(names) <= set(probe("registered")["ids"])
    assert {name for name in names if "Recall" in name or "NoVelocity" in name} <= BUNDLED_TASKS
    for name in names:
        assert parse_args(["--task", name]).task == name
        untested = "# Untested here" in (CONFIG_DIR / f"{name}.yaml").read_text()
        assert untested == (name not in BUNDLED_TASKS)


@pytest.mark.parametrize(
    ("task", "hidden"),
    [
        ("Isaac-Cartpole-NoVelocity", ["joint_vel_rel"]),
        ("Isaac-Ant-NoVelocity", ["base_lin_vel", "base_ang_vel", "joint_vel_rel", "feet_body_forces"]),
    ],
)
def test_velocities_are_hidden_from_the_policy_and_kept_for_the_critic(task, hidden):
    found = probe("groups", task)
    terms = found["terms"]
    assert [term for term in terms["critic"] if term not in terms["policy"]] == hidden
    assert [term for term in terms["critic"] if term not in hidden] == terms["policy"]
    for step in found["seen"]:
        policy, critic = torch.tensor(step["policy"]), torch.tensor(step["critic"])
        columns = {tuple(column.tolist()) for column in critic.T}
        assert policy.shape[1] < critic.shape[1]
        assert all(tuple(column.tolist()) in columns for column in policy.T)


def test_the_cue_is_shown_for_ten_steps_while_actions_have_no_effect():
    found = probe("cue")
    assert sorted(set(found["sides"])) == [-1.0, 1.0]
    states, shown = torch.tensor(found["states"]), torch.tensor(found["shown"])
    pairs = states[:, :32], states[:, 32:]
    assert torch.equal(pairs[0][: CUE_STEPS - 1], pairs[1][: CUE_STEPS - 1])
    assert (states[1] != states[0]).any()  # physics runs
    # The step that ends the cue redraws both, independently, and from then on actions act.
    assert not torch.isclose(pairs[0][CUE_STEPS - 1], pairs[1][CUE_STEPS - 1]).any(0).all()
    assert (pairs[0][CUE_STEPS - 1] - pairs[0][CUE_STEPS - 2]).abs().max() > 0.5
    pushed = pairs[0][CUE_STEPS, :, 2] - pairs[0][CUE_STEPS - 1, :, 2]
    assert (pushed > 0.5).all()
    assert (shown[: CUE_STEPS - 1].abs() == 1).all() and (shown[CUE_STEPS - 1 :] == 0).all()


def test_recall_rate_is_the_share_of_the_last_second_at_the_cued_side():
    found = probe("recall_rate")
    assert found["done"]
    # Of four kinds of envs: all of the last second, half of it, none, none.
    assert found["rates"] == pytest.approx([1.5 / 4] * 64, abs=1e-3)
    rewards = torch.tensor(found["rewards"])
    # 2 x (2 at the side, 0 at the other) x dt, on top of what balancing gives.
    gain = rewards[50, 0::4].mean() - rewards[50, 1::4].mean()
    assert float(gain) == pytest.approx(4 / 60, rel=0.02)
    assert float((rewards[5, 0::4] - rewards[5, 1::4]).abs().max()) < 1e-3  # nothing to gain during the cue


def test_the_physical_state_after_the_redraw_says_nothing_about_the_cue():
    found = probe("state_after_the_cue", [])
    assert all(width > 60 for width in found["features"].values())
    # 1,024 envs: a standard deviation of 0.016.
    assert all(abs(accuracy - 0.5) < 0.06 for accuracy in found["accuracy"].values()), found


@pytest.mark.parametrize(
    "overrides",
    [
        ["env.commands.cue.redraw=false", "env.actions.joint_effort.inert=false"],
        ["env.actions.joint_effort.inert=false"],
    ],
)
def test_the_classifier_finds_a_cue_that_leaks(overrides):
    """The positive control: with actions that act, and even with the redraw alone, the state tells."""
    accuracy = probe("state_after_the_cue", overrides)["accuracy"]
    assert accuracy[str(CUE_STEPS)] > 0.9, accuracy


if __name__ == "__main__":
    result = globals()[sys.argv[1]](*json.loads(sys.argv[2]))
    print(json.dumps(result), flush=True)
