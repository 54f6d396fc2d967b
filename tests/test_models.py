"""Actor and critic, sharing a backbone or each with its own. Shapes: N envs, T steps, L layers, H hidden."""

import math
from itertools import pairwise

import pytest
import torch
from isaaclab_rnn_ppo.utils.advantages import boundary_values, make_advantage, with_initial_state
from isaaclab_rnn_ppo.utils.config import parse_args
from isaaclab_rnn_ppo.utils.losses import make_critic_loss, make_loss
from isaaclab_rnn_ppo.utils.models import make_models, resolve_critic_group
from isaaclab_rnn_ppo.utils.schedules import make_optimizer
from isaaclab_rnn_ppo.utils.update import make_update
from tensor_env import make_local_collector, make_random_env, make_test_models, make_test_policy
from tensordict import TensorDict
from torchrl.data import Composite, Unbounded
from torchrl.modules import set_recurrent_mode

N, T = 6, 8


def specs(**groups):
    groups = {"policy": 3, **groups}
    observation = Composite({name: Unbounded((N, width)) for name, width in groups.items()}, shape=[N])
    return {"observation_spec": observation, "action_spec": Unbounded((N, 2))}


def make_setup(seed=0, *, critic=False, **options):
    """A collector in this process and the learner's models."""
    env = make_random_env(N, seed, critic=critic)
    collector = make_local_collector(
        env, rollout_steps=T, make_policy=lambda **specs: make_test_policy(**specs, **options), boundary_slots=3
    )
    models = make_test_models(
        observation_spec=collector.env.observation_spec, action_spec=collector.env.action_spec, **options
    )
    return collector, models


def push(collector, models):
    collector.update_policy_weights_(TensorDict.from_module(models.collector_policy).data)


def ratios(models, minibatch):
    with torch.no_grad(), set_recurrent_mode(True):
        window = with_initial_state(minibatch["steps"], minibatch["initial"])
        dist = models.actor.get_dist(window)
        return (dist.log_prob(window["action"]) - window["action_log_prob"]).exp()


@pytest.mark.parametrize("action_dist", ["normal", "tanh_normal"])
@pytest.mark.parametrize("critic", [False, True])
def test_the_first_ratio_of_every_batch_is_one_with_normalisation_on(critic, action_dist):
    torch.manual_seed(0)
    collector, models = make_setup(
        critic=critic, normalize_obs=True, normalize_value=True, action_dist=action_dist, embedding=(8,)
    )
    advantage = make_advantage(value_operator=models.value_operator)
    options = {"value_normalizer": models.value_normalizer}
    loss = make_loss(actor=models.actor, value_head=models.value_head, **options)
    updates = [make_update(loss_module=loss, optimizer=make_optimizer(loss.parameters(), 1e-2))]
    if critic:
        loss = make_critic_loss(value_operator=models.value_operator, **options)
        updates.append(make_update(loss_module=loss, optimizer=make_optimizer(loss.parameters(), 1e-2)))
    errors, moved = [], []
    for _ in range(4):
        push(collector, models)
        training = advantage(collector.rollout().clone())
        minibatch = training[torch.randperm(N)[: N // 2]]
        errors.append(float((ratios(models, minibatch) - 1).abs().max()))
        for update in updates:
            update(minibatch)
        moved.append(float((ratios(models, minibatch) - 1).abs().max()))
        models.update_normalizers(training["steps"])
    assert max(errors) <= 1e-4, errors
    assert min(moved) > 1e-3  # the test has something to see
    # Statistics that change between collecting and training are what it would see.
    push(collector, models)
    batch = collector.rollout().clone()
    models.update_normalizers(advantage(batch)["steps"] + 0)
    for _, normalizer in models.normalizers:
        normalizer.update(batch["steps", "policy"] + 1)
    assert float((ratios(models, batch) - 1).abs().max()) > 1e-3


def test_the_actor_does_not_depend_on_the_critic_group():
    collector, models = make_setup(critic=True, normalize_obs=True)
    push(collector, models)
    batch = collector.rollout().clone()
    steps = batch["steps"]
    other = steps.copy().set("critic", torch.randn_like(steps["critic"]) * 100)
    other_initial = TensorDict(
        {k: v + 1 if k.startswith("critic") else v for k, v in batch["initial"].items()}, batch.shape
    )
    assert "critic_state_h" in set(other_initial.keys())
    with torch.no_grad(), set_recurrent_mode(True):
        windows = [with_initial_state(steps, batch["initial"]), with_initial_state(other, other_initial)]
        for window in windows:
            models.actor.get_dist_params(window)
            models.value_operator(window)
        for key in ("features", "loc", "scale"):
            assert torch.equal(windows[0][key], windows[1][key])
        assert not torch.equal(windows[0]["state_value"], windows[1]["state_value"])
    # While collecting, through the policy that the workers run.
    first = [
        TensorDict({k: s[k][:, 0] for k in ("policy", "critic", "is_init")} | dict(i.items()), [N])
        for s, i in ((steps, batch["initial"]), (other, other_initial))
    ]
    out = []
    for step in first:
        torch.manual_seed(0)
        out.append(models.collector_policy(step))
    for key in ("action", "action_log_prob", ("next", "recurrent_state_h")):
        assert torch.equal(out[0][key], out[1][key])
    assert not torch.equal(out[0]["next", "critic_state_h"], out[1]["next", "critic_state_h"])


def test_critic_and_actor_share_no_gradient():
    collector, models = make_setup(critic=True, embedding=(5,))
    training = make_advantage(value_operator=models.value_operator)(collector.rollout().clone())
    actor, critic = list(models.actor.parameters()), list(models.value_operator.parameters())
    assert not {id(p) for p in actor} & {id(p) for p in critic}
    window = with_initial_state(training["steps"], training["initial"])
    for loss, own, foreign in (
        (make_critic_loss(value_operator=models.value_operator), critic, actor),
        (make_loss(actor=models.actor, value_head=None), actor, critic),
    ):
        for parameter in (*actor, *critic):
            parameter.grad = None
        assert {id(p) for p in loss.parameters()} == {id(p) for p in own}
        with set_recurrent_mode(True):
            metrics = loss(window)
        sum(v for k, v in metrics.items() if k.startswith("loss_")).backward()
        assert all(p.grad is None for p in foreign)
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in own)


@pytest.mark.parametrize("rnn", ["lstm", "gru"])
def test_the_critics_state_at_the_next_window_start_equals_a_straight_roll(rnn):
    collector, models = make_setup(critic=True, rnn=rnn, num_layers=2, critic_hidden_size=10, critic_num_layers=1)
    push(collector, models)
    batches = []
    for _ in range(3):
        batches.append(collector.rollout().clone())
        # A pass over T + B with the window's final observations in between, which must leave no trace.
        boundary_values(batches[-1], models.value_operator)
    keys = [k for k in models.value_operator.in_keys if k.startswith("critic_state")]
    assert batches[0]["initial"][keys[0]].shape == (N, 1, 10)
    assert batches[0]["initial"]["recurrent_state_h"].shape == (N, 2, 16)
    core = models.value_operator[0]
    state = {k: batches[0]["initial"][k] for k in keys}
    for batch, following in pairwise(batches):
        for t in range(T):
            inputs = {k: batch["steps"][k][:, t] for k in ("critic", "is_init")}
            with torch.no_grad():
                state = dict(core(TensorDict(inputs | state, [N]))["next"].items())
        starts = following["steps", "is_init"][:, 0].unsqueeze(-1)
        for key in keys:
            rolled = torch.where(starts, 0.0, state[key])
            torch.testing.assert_close(following["initial"][key], rolled, rtol=0, atol=1e-6)
            assert rolled.abs().sum() > 0
            state[key] = rolled


def test_bootstraps_of_the_separate_critic_equal_a_straight_roll():
    collector, models = make_setup(critic=True, normalize_obs=True, normalize_value=True)
    batch = collector.rollout().clone()
    state_value, next_value, approximated = boundary_values(batch, models.value_operator)
    assert not approximated.any()
    steps, final = batch["steps"], batch["final"]
    keys = [k for k in models.value_operator.in_keys if k.startswith("critic_state")]

    def value(observation, is_init, state):
        with torch.no_grad():
            out = models.value_operator(TensorDict({"critic": observation, "is_init": is_init, **state}, []))
        return out["state_value"], {k: out["next", k] for k in keys}

    bootstraps = 0
    for n in range(N):
        state = {k: batch["initial"][k][n] for k in keys}
        for t in range(T):
            now, state = value(steps["critic"][n, t], steps["is_init"][n, t], state)
            torch.testing.assert_close(state_value[n, t], now, rtol=1e-4, atol=1e-5)
            slot = (final["valid"][n] & (final["time"][n] == t)).nonzero()
            if len(slot):
                bootstraps += 1
                after, _ = value(final["critic"][n, int(slot)], torch.zeros(1, dtype=torch.bool), state)
                torch.testing.assert_close(next_value[n, t], after, rtol=1e-4, atol=1e-5)
    assert bootstraps > N


def test_the_critic_follows_the_actors_sizes_unless_told_otherwise():
    models = make_models(**specs(critic=5), hidden_size=7, embedding=(4,), head_hidden=(3,))
    shapes = [tuple(p.shape) for p in models.value_operator.parameters()]
    assert (4, 5) in shapes and (28, 4) in shapes and (3, 7) in shapes and (1, 3) in shapes
    models = make_models(
        **specs(critic=5),
        hidden_size=7,
        embedding=(4,),
        critic_hidden_size=9,
        critic_embedding=(6, 8),
        critic_head_hidden=(2,),
    )
    shapes = [tuple(p.shape) for p in models.value_operator.parameters()]
    assert {(6, 5), (8, 6), (36, 8), (2, 9), (1, 2)} <= set(shapes)


def test_which_group_the_critic_reads():
    observation = specs(critic=5, other=2)["observation_spec"]
    assert resolve_critic_group(observation, "auto") == "critic"
    assert resolve_critic_group(observation, "shared") is None
    assert resolve_critic_group(observation, "other") == "other"
    assert resolve_critic_group(specs()["observation_spec"], "auto") is None
    models = make_models(**specs(), critic_obs="policy")
    assert models.has_separate_critic and "policy" in models.value_operator.in_keys
    with pytest.raises(ValueError, match=r"--critic-obs height: .* auto, shared, critic, other, policy"):
        resolve_critic_group(observation, "height")


@pytest.mark.parametrize("rnn", ["lstm", "gru"])
def test_memory_horizon_spreads_the_time_constants(rnn):
    torch.manual_seed(0)
    models = make_models(**specs(), rnn=rnn, hidden_size=400, memory_horizon=50.0)
    core = next(m for m in models.actor.modules() if hasattr(m, "flat_weights"))
    keep = (core.bias_ih_l0 + core.bias_hh_l0)[400:800]  # forget gate of the LSTM, update gate of the GRU
    # A gate of sigmoid(log(s)) = s / (1 + s) keeps the state for about s + 1 steps.
    spans = 1 / (1 - torch.sigmoid(keep))
    assert 1.9 < spans.min() < 3 and 45 < spans.max() < 50.1
    assert float(spans.detach().mean()) == pytest.approx(26, abs=2)


def test_bf16_keeps_weights_state_and_features_in_float32():
    torch.manual_seed(0)
    collector, models = make_setup(amp="bf16", normalize_obs=True, embedding=(8,), critic=True)
    push(collector, models)
    batch = collector.rollout().clone()
    assert {v.dtype for v in batch["initial"].values()} == {torch.float32}
    assert {p.dtype for p in models.collector_policy.parameters()} == {torch.float32}
    with set_recurrent_mode(True):
        window = models.actor.get_dist_params(with_initial_state(batch["steps"], batch["initial"]))
    assert window["features"].dtype == torch.float32 and window["embedded"].dtype == torch.bfloat16
    window["loc"].sum().backward()
    assert {p.grad.dtype for p in models.actor.parameters() if p.grad is not None} == {torch.float32}
    # A worker acts with the numerics that training uses: rounding, not a systematic gap.
    assert float((ratios(models, batch) - 1).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--critic-obs", "shared", "--critic-hidden-size", "8"], "with --critic-obs shared the critic has nothing"),
        (["--critic-num-minibatches", "3", "--num-envs", "8"], "must divide the 8 environments"),
        (["--rnn", "none", "--memory-horizon", "20"], "--memory-horizon 20.0: --rnn none has no recurrent core"),
        (["--rnn", "none", "--num-layers", "2"], "--num-layers 2: --rnn none has no recurrent core"),
        (["--action-dist", "tanh_normal", "--bounds-coeff", "0.1"], "tanh_normal is bounded already"),
        (["--freeze-normalizer-after", "5", "--no-normalize-obs", "--no-normalize-value"], "nothing is normalised"),
        (["--amp", "fp16"], "fp16"),
        (["--lr-schedule", "cosine"], "cosine"),
        (["--target-kl", "0"], "must be a number above 0"),
        (["--memory-horizon", "1"], "at least 2"),
        (["--desired-kl", "-0.1"], "must be a number above 0"),
        (
            ["--lr-schedule", "linear", "--max-learning-rate", "0.003"],
            "0.003: bounds --lr-schedule adaptive",
        ),
        (["--lr-schedule", "adaptive", "--learning-rate", "0.02"], "--max-learning-rate 0.01: must be at least"),
        (["--reward-scale", "0"], "must be a number above 0"),
    ],
)
def test_illegal_combinations_are_refused_with_the_reason(argv, reason, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_args(["--task", "Isaac-Ant", "--num-envs", "8", *argv] if "--num-envs" not in argv else argv)
    assert stop.value.code == 2
    assert reason in capsys.readouterr().err


def test_entropy_and_size_of_the_first_actions():
    torch.manual_seed(0)
    models = make_models(**specs(), init_std=0.5)
    step = TensorDict(
        {"policy": torch.randn(N, 3), "is_init": torch.ones(N, 1, dtype=torch.bool)}
        | {f"recurrent_state_{k}": torch.zeros(N, 1, 256) for k in "hc"},
        [N],
    )
    dist = models.actor.get_dist(step)
    assert float(dist.entropy()[0].detach()) == pytest.approx(
        2 * (0.5 + 0.5 * math.log(2 * math.pi) + math.log(0.5)), rel=1e-5
    )
    assert step["loc"].abs().max() < 0.05


def test_a_preset_may_describe_the_core_that_rnn_none_leaves_out():
    assert parse_args(["--task", "Isaac-Cartpole-Recall", "--rnn", "none"]).memory_horizon is not None
