"""The five checks hold on a right set-up, and each names a planted bug."""

import pytest
import torch
from isaaclab_rnn_ppo import selfcheck
from isaaclab_rnn_ppo.utils.rnn import RecurrentCore
from tensor_env import make_local_collector, make_random_env, make_test_models, make_test_policy

NAMES = ["ratio is 1", "hidden states", "resets isolate", "final observations", "all workers"]
N, T = 6, 8


class Workers:
    """Two workers in this process, as the learner sees them."""

    def __init__(self, critic=False, **options):
        def make_policy(**specs):
            return make_test_policy(**specs, **options)

        envs = [make_random_env(N, seed, end_rate=0.3, critic=critic) for seed in range(2)]
        self.collectors = [
            make_local_collector(env, rollout_steps=T, make_policy=make_policy, boundary_slots=T) for env in envs
        ]
        env = self.collectors[0].env
        self.models = make_test_models(observation_spec=env.observation_spec, action_spec=env.action_spec, **options)
        self.version = 0
        self.pushed = [True, True]

    def collect(self):
        self.version += 1
        batches = []
        for worker, collector in enumerate(self.collectors):
            if self.pushed[worker]:
                collector.update_policy_weights_(selfcheck.TensorDict.from_module(self.models.collector_policy).data)
            batch = collector.rollout().clone()
            batches.append(batch.set("worker", torch.full_like(batch["worker"], worker)))
        return torch.cat(batches), self.version

    def check(self, change=lambda batch: batch):
        def collect():
            batch, version = self.collect()
            return change(batch), version

        return selfcheck.run_checks(self.models, collect, num_workers=2)


def failing(checks):
    return [name for name, check in zip(NAMES, checks, strict=True) if not check.passed]


@pytest.mark.parametrize("rnn", ["lstm", "gru", "none"])
@pytest.mark.parametrize("critic", [False, True])
def test_a_right_setup_passes(rnn, critic):
    torch.manual_seed(0)
    checks = Workers(critic=critic, rnn=rnn, normalize_obs=True, normalize_value=True).check()
    assert failing(checks) == [], "\n".join(map(str, checks))
    assert [str(check).startswith("pass  ") for check in checks] == [True] * 5
    for name, check in zip(NAMES, checks, strict=True):
        assert name in str(check)


def test_it_waits_for_a_time_out_but_not_for_ever():
    workers = Workers()
    for collector in workers.collectors:
        collector.env.base_env.tables[2].zero_()
    checks = workers.check()
    assert failing(checks) == []
    assert workers.version == 3 + selfcheck.MAX_WINDOWS
    assert "so one was imposed" in checks[2].detail


def test_a_normaliser_that_changes_before_the_update_is_found():
    workers = Workers(normalize_obs=True)

    def change(batch):
        for group, normalizer in workers.models.normalizers:
            normalizer.update(batch["steps"][group] + 3)
        return batch

    checks = workers.check(change)
    assert not checks[0].passed and "max |ratio - 1|" in checks[0].detail and "steps are above it" in checks[0].detail


def test_a_state_that_is_stored_a_step_late_is_found():
    workers = Workers()

    def change(batch):
        first = batch.copy()
        first["steps"] = batch["steps"][:, :1]
        _, state = selfcheck.replay(workers.models, first)
        return batch.set("initial", selfcheck.TensorDict(state, batch.shape))

    checks = workers.check(change)
    assert "hidden states" in failing(checks) and "in recurrent_state_" in checks[1].detail


def test_a_core_that_forgets_to_reset_is_found(monkeypatch):
    forward = RecurrentCore.forward

    def forgetful(self, tensordict):
        kept = tensordict["is_init"]
        out = forward(self, tensordict.set("is_init", torch.zeros_like(kept)))
        return out.set("is_init", kept)

    workers = Workers()
    monkeypatch.setattr(RecurrentCore, "forward", forgetful)
    checks = workers.check()
    assert "resets isolate" in failing(checks) and "changes the mean or the value" in checks[2].detail


def test_missing_marks_of_an_episode_start_are_found():
    workers = Workers()

    def change(batch):
        batch["steps", "is_init"] = torch.zeros_like(batch["steps", "is_init"])
        return batch

    checks = workers.check(change)
    assert "resets isolate" in failing(checks) and "is_init and done disagree" in checks[2].detail


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        ("missing", "at time-outs inside the window (see --boundary-slots)"),
        ("window end", "are missing, 0 of them at time-outs"),
        ("after the reset", "are the observation after the reset"),
        ("stale", "differ from the next observation"),
        ("not finite", "are not finite"),
    ],
)
def test_wrong_final_observations_are_found(bug, words):
    workers = Workers()

    def change(batch):
        final, steps = batch["final"], batch["steps"]
        if bug == "missing":
            final["valid"][:, :-1] = False
        if bug == "window end":
            final["valid"][:, -1] = False
        if bug == "stale":
            final["policy"][:, -1] = steps["policy"][:, -1]
        if bug == "not finite":
            final["policy"][:, 0] = float("nan")
        if bug == "after the reset":
            following = steps["policy"].roll(-1, 1)
            index = final["time"].long().unsqueeze(-1).expand_as(final["policy"])
            inside = (final["time"] < T - 1).unsqueeze(-1)
            final["policy"] = torch.where(inside, following.gather(1, index), final["policy"])
        return batch

    checks = workers.check(change)
    assert failing(checks) == ["final observations"], "\n".join(map(str, checks))
    assert words in checks[3].detail


@pytest.mark.parametrize("bug", ["never pushed", "pushed in name"])
def test_a_worker_with_old_weights_is_found(bug):
    workers = Workers()
    workers.pushed[1] = False

    def change(batch):
        if bug == "pushed in name":
            batch["steps", "policy_version"].fill_(workers.version)
        return batch

    checks = workers.check(change)
    assert "all workers" in failing(checks)
    assert "worker 1 acted with other weights" in checks[4].detail
    assert ("worker 1 acted with version 0" in checks[4].detail) == (bug == "never pushed")
    assert "worker 0" not in checks[4].detail


@pytest.mark.isaac
@pytest.mark.parametrize(
    "task",
    [
        "Isaac-Cartpole-Recall",
        pytest.param("Isaac-Cartpole", marks=pytest.mark.slow),
        pytest.param("Isaac-Ant", marks=pytest.mark.slow),
    ],
)
def test_it_passes_on_the_real_simulator(task, capsys):
    argv = ["--task", task, "--num-envs", "16", "--num-collectors", "1", "--asset-root", "bundled", "--normalize-obs"]
    assert selfcheck.main([*argv, "--rollout-steps", "32", "env.episode_length_s=0.5"]) == 0  # a time-out a window
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("pass", "FAIL"))]
    assert len(lines) == 5 and "at time-outs" in lines[3]
