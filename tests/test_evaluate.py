"""Evaluation without a simulator: which episodes count, whose state resets, and what happens beside training.

Shapes: N envs, T steps, E episodes.
"""

import math
import threading
from functools import partial

import numpy as np
import pytest
import torch
from isaaclab_rnn_ppo.utils import WorkerFault, load_checkpoint
from isaaclab_rnn_ppo.utils.evaluate import (
    Evaluation,
    EvaluationPolicy,
    Evaluator,
    NoEvaluation,
    PeriodicEvaluation,
    count_episodes,
    evaluation_overrides,
    make_evaluation_policy,
    policy_weights,
)
from tensor_env import TERMINATE, TRUNCATE, TableEnv, make_local_collector, make_test_models, with_transforms
from test_play import read_video

N, NUM_OBS, PERIOD = 4, 3, 10


def make_test_actor(**kwargs) -> torch.nn.Module:
    return make_test_models(**kwargs).actor


class ScoredEnv(TableEnv):
    """Rewards the action that was taken, so that a return tells which policy acted. Ends as the table says."""

    log_names = ("Metrics/action", "Episode_Termination/fell")
    max_episode_length = PERIOD
    step_dt = 0.02

    def _step(self, tensordict):
        action = tensordict["action"].sum(-1, keepdim=True)
        out = super()._step(tensordict)
        out["reward"] = action
        return out.set("log", torch.where(out["done"], torch.cat([action, out["terminated"].float()], -1), 0.0))


def make_scored_env(num_envs: int, seed: int = 0, ends: torch.Tensor | None = None):
    """Env n ends at step PERIOD - 1 - n of every PERIOD, by termination in env 0 and time-out elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    roots = torch.randn(PERIOD, num_envs, NUM_OBS, generator=generator)
    if ends is None:
        ends = torch.zeros(PERIOD, num_envs, dtype=torch.long)
        for n in range(num_envs):
            ends[PERIOD - 1 - n, n] = TERMINATE if n == 0 else TRUNCATE
    return with_transforms(ScoredEnv(roots, roots.roll(-1, 0), ends, torch.zeros(PERIOD, num_envs), log=True))


def test_every_env_counts_the_same_number_of_episodes():
    """Env 1 ends three times before env 0 does: its short episodes must not weigh more."""
    rows = np.array(
        [  # env, return, length, terminated, log: fell, timed out, height
            [1, 1.0, 5, 1, 1, 0, 10.0],
            [1, 2.0, 5, 1, 1, 0, 20.0],
            [1, 9.0, 5, 1, 1, 0, 90.0],
            [0, 6.0, 20, 0, 0, 1, 60.0],
        ]
    )
    names = ["Episode_Termination/fell", "Episode_Termination/time_out", "Metrics/height"]
    once = count_episodes(rows, names, num_envs=2, episodes_per_env=1)
    assert once.returns.tolist() == [1.0, 6.0] and once.lengths.tolist() == [5, 20]
    assert once.terminations == {"fell": 1, "time_out": 1}
    assert once.log == {"Metrics/height": 35.0} and once.num_unfinished == 0
    twice = count_episodes(rows, names, num_envs=2, episodes_per_env=2)
    assert twice.returns.tolist() == [1.0, 2.0, 6.0] and twice.num_unfinished == 1
    assert twice.summary()["return"]["mean"] == 3.0


def test_a_task_without_termination_terms_has_the_two_flags():
    rows = np.array([[0, 1.0, 5, 1], [1, 2.0, 5, 0], [2, 2.0, 5, 0]])
    assert count_episodes(rows, [], num_envs=3, episodes_per_env=1).terminations == {"terminated": 1, "time_out": 2}


def test_no_episode_at_all_is_reported():
    summary = count_episodes(np.zeros((0, 5)), ["Metrics/height"], num_envs=3, episodes_per_env=1).summary()
    assert summary["episodes"] == 0 and summary["unfinished_envs"] == 3
    assert summary["return"]["mean"] is None and summary["log"] == {"Metrics/height": None}


@pytest.mark.parametrize("rnn", ["lstm", "gru"])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_only_the_env_that_finished_loses_its_state(rnn, num_layers):
    """Two rollouts that differ in one end, of env 2 at step 4: the others stay bitwise what they were."""
    make_actor = partial(make_test_actor, rnn=rnn, num_layers=num_layers)
    windows = []
    for ending in (False, True):
        ends = torch.zeros(PERIOD, N, dtype=torch.long)
        ends[4, 2] = TERMINATE if ending else 0
        env = make_scored_env(N, ends=ends)
        collector = make_local_collector(
            env, rollout_steps=PERIOD, make_policy=lambda **specs: EvaluationPolicy(make_actor(**specs))
        )
        windows.append(collector.rollout().clone())
    without, with_end = (window["steps"] for window in windows)
    others = [0, 1, 3]
    assert torch.equal(without["policy"], with_end["policy"])
    assert torch.equal(without["action"][others], with_end["action"][others])
    assert torch.equal(without["action"][2, :5], with_end["action"][2, :5])
    assert (without["action"][2, 5:] != with_end["action"][2, 5:]).any(-1).all()
    assert with_end["is_init"][2, 5] and with_end["is_init"].sum() == N + 1
    # The env that finished acts as one whose first observation this is.
    fresh = make_actor(observation_spec=env.observation_spec, action_spec=env.action_spec)
    first = with_end["policy"][:, 5]
    state = {key: torch.zeros(N, num_layers, 16) for key in fresh.in_keys if "recurrent" in key}
    inputs = {"policy": first, "is_init": torch.ones(N, 1, dtype=torch.bool)} | state
    expected = EvaluationPolicy(fresh)(with_end[:, 5].select().update(inputs))["action"]
    torch.testing.assert_close(with_end["action"][2, 5], expected[2], rtol=1e-6, atol=1e-6)


def expected_returns(actor, env) -> list[float]:
    """Returns of each env's first episode from a reset, with the mean action, stepped by hand."""
    root = env.reset()
    state = {key: torch.zeros(N, 1, 16) for key in actor.in_keys if "recurrent" in key}
    totals, returns = torch.zeros(N), [None] * N
    while None in returns:
        out = actor.get_dist(root.clone().update(state))
        action = out.deterministic_sample
        features = actor(root.clone().update(state))
        state = {key: features["next", key] for key in state}
        stepped, root = env.step_and_maybe_reset(root.set("action", action))
        totals += stepped["next", "reward"][:, 0]
        for n in stepped["next", "done"][:, 0].nonzero()[:, 0].tolist():
            if returns[n] is None:
                returns[n] = totals[n].item()
        assert torch.isfinite(totals).all()
    return returns


@torch.no_grad()
def test_an_evaluator_runs_the_weights_it_is_given_from_a_reset():
    env = make_scored_env(N)
    actor = make_test_actor(observation_spec=env.observation_spec, action_spec=env.action_spec)
    evaluator = Evaluator(
        create_env_fn=make_scored_env, make_actor=make_test_actor, num_envs=N, rollout_steps=PERIOD, background=True
    )
    try:
        first = evaluator.evaluate(policy_weights(actor))
        again = evaluator.evaluate(policy_weights(actor))
        expected = expected_returns(actor, env)
        for parameter in actor.parameters():
            parameter.mul_(-1.3)
        weights = policy_weights(actor)
        expected_other = expected_returns(actor, env)
        for parameter in actor.parameters():  # a learner goes on: the copy must not move with it
            parameter.zero_()
        other = evaluator.evaluate(weights, episodes_per_env=2)
    finally:
        evaluator.shutdown()
    order = list(range(N))[::-1]  # env 3 ends first
    np.testing.assert_allclose(first.returns, [expected[n] for n in order], rtol=1e-5)
    assert first.lengths.tolist() == [PERIOD - n for n in order]
    assert first.terminations == {"fell": 1}
    np.testing.assert_array_equal(first.returns, again.returns)
    assert len(other.returns) == 2 * N and other.num_unfinished == 0
    np.testing.assert_allclose(other.returns[:N], [expected_other[n] for n in order], rtol=1e-5)
    assert np.abs(other.returns[:N] - first.returns).min() > 1e-4, "the case tells nothing"


def test_sizes_that_changed_are_a_users_mistake():
    env = make_scored_env(N)
    specs = {"observation_spec": env.observation_spec, "action_spec": env.action_spec}
    make_evaluation_policy(make_test_actor, True, {"policy": NUM_OBS, "action": 2}, **specs)
    with pytest.raises(ValueError, match=r"trained with sizes .*'policy': 5.* now has .*'policy': 3"):
        make_evaluation_policy(make_test_actor, True, {"policy": 5, "action": 2}, **specs)


def test_what_an_evaluation_is_given_wins_over_the_overrides_of_training():
    trained = ["env.episode_length_s=8.0", "env.scene.num_envs=512", "env.seed=3", "physics=newton_mjwarp"]
    assert evaluation_overrides(trained, ["env.episode_length_s=2.0"]) == [
        "physics=newton_mjwarp",
        "env.episode_length_s=2.0",
    ]


class FakeEvaluator:
    """An evaluation takes until the test lets it end, and yields what the test says."""

    def __init__(self):
        self.results, self.may_end, self.seen, self.closed = [], threading.Semaphore(0), [], False
        self.stop = False

    step_dt = 0.1

    def evaluate(self, weights, on_frames=None):
        self.seen.append(weights["actor"].clone())
        if on_frames is not None:
            for _ in range(2):
                on_frames(np.zeros((3, 48, 64, 3), np.uint8))
        assert self.may_end.acquire(timeout=10)
        mean = self.results.pop(0)
        return Evaluation(np.array([mean - 1, mean + 1]), np.array([3, 5]), {}, {}, 0)

    def shutdown(self):
        self.closed = True


def settle(evaluation: PeriodicEvaluation) -> None:
    """Wait until the thread is done with what it was given."""
    evaluation._running[0].result(timeout=10)


def test_training_never_waits_and_the_best_checkpoint_is_the_best_policys(tmp_path):
    fake, best = FakeEvaluator(), tmp_path / "checkpoints" / "best.pt"
    fake.results = [2.0, 5.0, 4.0, 3.0]
    evaluation = PeriodicEvaluation(lambda: fake, interval=2, best_path=best)
    actor = torch.nn.Linear(1, 1)
    actor.in_keys = actor.out_keys = []

    def step(iteration, last=False):
        state = {"model": actor.state_dict(), "iteration": iteration}
        metrics = evaluation.step(actor, state, last=last)
        torch.nn.init.constant_(actor.weight, iteration)  # training goes on in place
        assert set(metrics) == set(PeriodicEvaluation.COLUMNS)
        return metrics

    assert math.isnan(step(1)["eval/return"]) and not fake.seen, "not due"
    step(2)  # starts; the weights are those of iteration 1's update
    assert math.isnan(step(3)["eval/return"])
    assert math.isnan(step(4)["eval/return"]), "busy: left out"
    fake.may_end.release()
    settle(evaluation)
    metrics = step(5)
    assert (metrics["eval/return"], metrics["eval/return_std"], metrics["eval/length"]) == (2.0, 1.0, 4.0)
    assert metrics["eval/iteration"] == 2
    saved = load_checkpoint(best)
    assert saved["iteration"] == 2 and saved["eval_return"] == 2.0
    assert saved["model"]["weight"].item() == 1, "a copy of that time, not what training has made of it"
    assert len(fake.seen) == 1 and fake.seen[0]["weight"].item() == 1

    for iteration, is_best in ((6, True), (8, False)):
        step(iteration)
        fake.may_end.release()
        settle(evaluation)
        step(iteration + 1)
        assert load_checkpoint(best)["iteration"] == (iteration if is_best else 6)
    fake.may_end.release()
    metrics = step(11, last=True)
    assert metrics["eval/return"] == 3.0 and metrics["eval/iteration"] == 11, "the last iteration waits"
    evaluation.close()
    assert fake.closed

    resumed = PeriodicEvaluation(FakeEvaluator, interval=2, best_path=best)
    assert resumed.best_return == 5.0, "a resumed run has to beat its own best"
    resumed.close()
    best.write_bytes(best.read_bytes()[:100])
    with pytest.warns(UserWarning, match="best.pt: not a readable checkpoint.* The next evaluation replaces it"):
        resumed = PeriodicEvaluation(FakeEvaluator, interval=2, best_path=best)
    assert resumed.best_return == -math.inf
    resumed.close()


def test_an_error_of_the_evaluation_reaches_training(tmp_path):
    def fail():
        raise RuntimeError("no simulator")

    evaluation = PeriodicEvaluation(fail, interval=1, best_path=tmp_path / "best.pt")
    actor = torch.nn.Linear(1, 1)
    actor.in_keys = actor.out_keys = []
    with pytest.raises(RuntimeError, match="no simulator"):
        evaluation.step(actor, {"iteration": 1}, last=True)
    evaluation.close()


def test_without_evaluation_nothing_is_added():
    evaluation = NoEvaluation()
    assert evaluation.step(torch.nn.Linear(1, 1), {"iteration": 1}) == {}
    evaluation.close()


def test_an_evaluation_whose_worker_died_starts_again(tmp_path):
    """Training goes on: a lost evaluation is a warning, and the next one has a simulator of its own."""
    evaluators = [FakeEvaluator(), FakeEvaluator()]
    made = iter(evaluators)
    evaluation = PeriodicEvaluation(lambda: next(made), interval=1, best_path=tmp_path / "best.pt")
    actor = torch.nn.Linear(1, 1)
    actor.in_keys = actor.out_keys = []

    def die(weights):
        raise WorkerFault("a worker died")

    evaluators[0].evaluate = die
    with pytest.warns(UserWarning, match="evaluation of iteration 1 lost: a worker died"):
        assert math.isnan(evaluation.step(actor, {"iteration": 1}, last=True)["eval/return"])
    evaluators[1].results = [2.0]
    evaluators[1].may_end.release()
    assert evaluation.step(actor, {"iteration": 2}, last=True)["eval/return"] == 2.0
    evaluation.close()
    assert evaluators[0].closed and evaluators[1].closed


def test_each_evaluation_leaves_a_video(tmp_path):
    evaluator = FakeEvaluator()
    evaluation = PeriodicEvaluation(
        lambda: evaluator, interval=2, best_path=tmp_path / "best.pt", video_dir=tmp_path / "videos"
    )
    actor = torch.nn.Linear(1, 1)
    actor.in_keys = actor.out_keys = []
    evaluator.results = [1.0, 2.0]
    evaluation.step(actor, {"iteration": 2})
    assert evaluation.video is None
    evaluator.may_end.release()
    settle(evaluation)
    evaluation.step(actor, {"iteration": 3})
    assert evaluation.video == tmp_path / "videos" / "iteration_0000002.mp4"
    assert len(read_video(evaluation.video)) == 6
    evaluation.step(actor, {"iteration": 3})
    assert evaluation.video is None
    evaluation.close()
