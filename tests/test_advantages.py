"""Every bootstrap against arithmetic by hand and against a sequential float64 reference.

Shapes: N envs, T steps, B boundary slots, K rows of the env's tables.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from isaaclab_rnn_ppo.utils.advantages import boundary_values, interleave, make_advantage
from isaaclab_rnn_ppo.utils.rnn import LSTM
from tensor_env import (
    TERMINATE,
    TRUNCATE,
    TableEnv,
    make_local_collector,
    make_random_env,
    make_test_models,
    make_test_policy,
    with_transforms,
)
from tensordict.nn import TensorDictModule
from torch import nn

# What happens to an env over three windows of T = 8: T truncated, x terminated.
T = 8
SCENARIOS = {
    "no end": "........ ........ ........",
    "one truncation": "...T.... .T...... ........",
    "two truncations": "..T..T.. ........ T......T",
    "three truncations": ".T..T.T. ...T.TT. ........",
    "a termination beside them": ".Tx.T... x..T.... ..xT....",
    "truncated on the last step": ".......T .T.....T ..T.T..T",
    "terminated on the last step": ".......x .T.....x ........",
    "reset one step before the window end": "......T. ......x. .T....T.",
    "done on the last two steps": "......TT ......xT ......Tx",
    "consecutive resets": "..TTT... .TxT.... xxx.....",
    "one-step episodes only": "TTTTTTTT xTxTxTxT TxTxTxTx",
    "reset on the first step": "T....... Tx...... x.......",
}
RANDOM_ENVS = 40


def scenario_tables(seed: int = 0) -> tuple[torch.Tensor, ...]:
    """roots, finals, ends, rewards of the scenarios and of some random envs, float32."""
    generator = torch.Generator().manual_seed(seed)
    codes = {".": 0, "x": TERMINATE, "T": TRUNCATE}
    named = torch.tensor([[codes[c] for c in text.replace(" ", "")] for text in SCENARIOS.values()]).T
    draw = torch.rand(3 * T, RANDOM_ENVS, generator=generator)
    random = torch.where(draw < 0.1, TERMINATE, torch.where(draw < 0.35, TRUNCATE, 0))
    ends = torch.cat([named, random], 1)
    rows, envs = ends.shape
    return (
        torch.randn(rows + 1, envs, 3, generator=generator),
        torch.randn(rows, envs, 3, generator=generator),
        ends,
        torch.randn(rows, envs, generator=generator),
    )


class SequentialValues:
    """Values in float64, one env and one step at a time, with nn.LSTMCell.

    Args:
        models: of ``make_test_models``.
        scale: of the observations: a separate critic's are twice the policy's.
    """

    def __init__(self, models, scale: float = 1.0):
        self.scale = scale
        *_, linear = (module for module in models.value_operator.modules() if isinstance(module, nn.Linear))
        self.head = nn.Linear(linear.in_features, 1).double()
        self.head.load_state_dict({key: value.double() for key, value in linear.state_dict().items()})
        self.cells = []
        for core in (module for module in models.value_operator.modules() if isinstance(module, LSTM)):
            weights = [weight.double() for weight in core.flat_weights()]
            for layer in range(core.num_layers):
                w_ih, w_hh, b_ih, b_hh = weights[4 * layer : 4 * layer + 4]
                cell = nn.LSTMCell(w_ih.shape[1], w_hh.shape[1]).double()
                cell.load_state_dict({"weight_ih": w_ih, "weight_hh": w_hh, "bias_ih": b_ih, "bias_hh": b_hh})
                self.cells.append(cell)

    def zero_state(self):
        return [(torch.zeros(1, cell.hidden_size).double(),) * 2 for cell in self.cells]

    @torch.no_grad()
    def __call__(self, observation, state):
        """Value of one observation [obs] and the state after it."""
        x, after = observation.double().unsqueeze(0) * self.scale, []
        for cell, layer_state in zip(self.cells, state):
            x, c = cell(x, layer_state)
            after.append((x, c))
        return self.head(x).item(), after


def reference(tables, value, *, num_slots: int, gamma: float, gae_lambda: float) -> dict[str, torch.Tensor]:
    """Targets, advantages [K, N] and number of approximated bootstraps [K / T, N], by the definition."""
    roots, finals, ends, rewards = tables
    rows, envs = ends.shape
    advantage, target = torch.zeros(2, rows, envs, dtype=torch.float64)
    approximated = torch.zeros(rows // T, envs, dtype=torch.long)
    for n in range(envs):
        state = value.zero_state()
        values, nexts, used = [], [], 0
        for k in range(rows):
            last = k % T == T - 1
            v, state = value(roots[k, n], state)
            values.append(v)
            end = int(ends[k, n])
            if end == TERMINATE:
                nexts.append(0.0)
            elif end == TRUNCATE or last:
                following = finals[k, n] if end == TRUNCATE else roots[k + 1, n]
                if (last or used < num_slots - 1) and following.isfinite().all():
                    nexts.append(value(following, state)[0])
                    used += 1
                else:
                    nexts.append(v)
                    approximated[k // T, n] += 1
            else:
                nexts.append(None)  # the value of the next step, still to come
            if end:
                state = value.zero_state()
            if last:
                used = 0
        running = 0.0
        for k in reversed(range(rows)):
            following = values[k + 1] if nexts[k] is None else nexts[k]
            if k % T == T - 1 or ends[k, n]:
                running = 0.0
            running = rewards[k, n].item() + gamma * following - values[k] + gamma * gae_lambda * running
            advantage[k, n], target[k, n] = running, running + values[k]
    return {"advantage": advantage, "value_target": target, "approximated": approximated}


@pytest.mark.parametrize("num_slots", [1, 2, 3, 9])
@pytest.mark.parametrize("kind", ["mlp", "lstm", "two layers", "separate critic"])
def test_every_sample_is_exact(kind, num_slots):
    """The worker's collector, the value pass and GAE, over three windows, against the definition."""
    separate = kind == "separate critic"
    options = {
        "rnn": "none" if kind == "mlp" else "lstm",
        "num_layers": 2 if kind == "two layers" else 1,
        "critic_obs": "critic" if separate else "shared",
    }
    tables = scenario_tables()
    tables[1][torch.rand(tables[2].shape, generator=torch.Generator().manual_seed(1)) < 0.1] = torch.nan
    env = with_transforms(TableEnv(*tables, critic=separate))
    collector = make_local_collector(
        env, rollout_steps=T, boundary_slots=num_slots, make_policy=partial(make_test_policy, **options)
    )
    models = make_test_models(observation_spec=env.observation_spec, action_spec=env.action_spec, **options)
    advantages = [
        make_advantage(
            value_operator=models.value_operator, gamma=0.97, gae_lambda=0.9, normalize=False, vectorized=vectorized
        )
        for vectorized in (False, True)
    ]
    values = SequentialValues(models, scale=2.0 if separate else 1.0)
    assert len(values.cells) == {"mlp": 0, "two layers": 2}.get(kind, 1)
    expected = reference(tables, values, num_slots=num_slots, gamma=0.97, gae_lambda=0.9)
    assert expected["advantage"].abs().mean() > 1
    assert expected["approximated"].any() and not expected["approximated"].all()
    rollouts = iter(collector)
    for window in range(3):
        batch = next(rollouts)
        for advantage in advantages:
            training = advantage(batch)
            for key in ("advantage", "value_target"):
                actual = training["steps", key].squeeze(-1).T.double()
                torch.testing.assert_close(actual, expected[key][window * T :][:T], rtol=1e-5, atol=1e-5)
            assert torch.equal(training["bootstrap_approximated"], expected["approximated"][window])


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("num_steps", [1, 2])
def test_one_env_and_one_step_windows(num_envs, num_steps):
    """Windows of one and two steps give the advantages of lambda 0, whatever the window."""
    roots, finals, ends, rewards = (table[:, :num_envs] for table in scenario_tables(seed=num_envs))
    ends[::3, 0] = TRUNCATE
    tables = roots, finals, ends, rewards
    env = with_transforms(TableEnv(*tables))
    models = make_test_models(observation_spec=env.observation_spec, action_spec=env.action_spec)
    advantage = make_advantage(value_operator=models.value_operator, gamma=0.97, gae_lambda=0.0, normalize=False)
    expected = reference(tables, SequentialValues(models), num_slots=9, gamma=0.97, gae_lambda=0.0)["advantage"]
    rollouts = iter(make_local_collector(env, rollout_steps=num_steps, boundary_slots=3))
    for start in range(0, 12, num_steps):
        training = advantage(next(rollouts))
        actual = training["steps", "advantage"].squeeze(-1).T.double()
        torch.testing.assert_close(actual, expected[start : start + num_steps], rtol=1e-5, atol=1e-5)
        assert not training["bootstrap_approximated"].any()


def by_hand(ends: list[int], final: float, gamma: float = 1.0, rewards: list[float] | None = None) -> list[float]:
    """Value targets with V(s) = s, lambda 0, observations 10, 20, 30, 40 and a true next of the last of 1000."""
    column = torch.tensor
    roots = column([10.0, 20.0, 30.0, 40.0, 1000.0]).view(5, 1, 1)
    finals = torch.full((4, 1, 1), final)
    table_rewards = column(rewards or [0.0] * 4).view(4, 1)
    env = with_transforms(TableEnv(roots, finals, column(ends).view(4, 1), table_rewards))
    identity = TensorDictModule(nn.Identity(), in_keys=["policy"], out_keys=["state_value"])
    advantage = make_advantage(value_operator=identity, gamma=gamma, gae_lambda=0.0, normalize=False)
    training = advantage(next(iter(make_local_collector(env, rollout_steps=4))))
    assert training["bootstrap_approximated"].tolist() == [0]
    return training["steps", "value_target"].flatten().tolist()


def test_window_end_by_hand():
    """PITFALLS: the window end bootstraps from V(s_T), not from V(s_{T-1})."""
    assert by_hand([0, 0, 0, 0], final=777.0) == [20, 30, 40, 1000]


def test_truncation_by_hand():
    """PITFALLS: a truncation bootstraps from its final observation, and no sample is dropped."""
    assert by_hand([0, TRUNCATE, 0, 0], final=777.0) == [20, 777, 40, 1000]


def test_timeout_adds_its_value_once_and_a_termination_none():
    """PITFALLS: a time-out adds gamma V(final) once; a terminal state adds nothing."""
    assert by_hand([0, TRUNCATE, 0, 0], 777.0, gamma=0.5, rewards=[1.0, 2, 3, 4]) == [11, 390.5, 23, 504]
    assert by_hand([0, TERMINATE, 0, TERMINATE], 777.0, gamma=0.5, rewards=[1.0, 2, 3, 4]) == [11, 2, 23, 4]


def test_a_step_without_final_observation_uses_its_own_value_and_is_counted():
    roots = torch.tensor([10.0, 20.0, 30.0, 40.0, 1000.0]).view(5, 1, 1)
    finals = torch.tensor([torch.nan, 50, 60, 70]).view(4, 1, 1)
    ends = torch.tensor([TRUNCATE, TRUNCATE, TRUNCATE, 0]).view(4, 1)
    env = with_transforms(TableEnv(roots, finals, ends, torch.zeros(4, 1)))
    identity = TensorDictModule(nn.Identity(), in_keys=["policy"], out_keys=["state_value"])
    advantage = make_advantage(value_operator=identity, gamma=1.0, gae_lambda=0.0, normalize=False)
    training = advantage(next(iter(make_local_collector(env, rollout_steps=4, boundary_slots=2))))
    # NaN takes no slot; 50 takes the one inside the window; 60 finds none left; 1000 has the window end's.
    assert training["steps", "value_target"].flatten().tolist() == [10, 50, 30, 1000]
    assert training["bootstrap_approximated"].tolist() == [2]


def test_wrong_final_observations_change_the_advantages():
    """The stored finals are what is read: without them, or with others, every cut bootstrap differs."""
    env = make_random_env(16, end_rate=0.3)
    batch = next(iter(make_local_collector(env, rollout_steps=T, boundary_slots=T + 1))).clone()
    models = make_test_models(observation_spec=env.observation_spec, action_spec=env.action_spec)
    _, right, approximated = boundary_values(batch, models.value_operator)
    assert not approximated.any()
    done, terminated = batch["steps", "next", "done"].clone(), batch["steps", "next", "terminated"]
    done[:, -1] = True
    cut = done & ~terminated
    shifted, removed = batch.clone(), batch.clone()
    shifted["final", "policy"].add_(1.0)
    removed["final", "valid"].zero_()
    _, other, _ = boundary_values(shifted, models.value_operator)
    assert torch.equal((other != right) & ~terminated, cut) and (other - right).abs()[cut].mean() > 0.1
    value, fallback, approximated = boundary_values(removed, models.value_operator)
    assert torch.equal(approximated, cut.squeeze(-1)) and torch.equal(fallback[cut], value[cut])


def test_reward_scale():
    env = make_random_env(5)
    batch = next(iter(make_local_collector(env, rollout_steps=T)))
    models = make_test_models(observation_spec=env.observation_spec, action_spec=env.action_spec)
    scaled = batch.clone()
    scaled["steps", "next", "reward"] *= 0.1
    options = {"value_operator": models.value_operator, "normalize": False}
    actual = make_advantage(**options, reward_scale=0.1)(batch)["steps"]
    torch.testing.assert_close(actual["advantage"], make_advantage(**options)(scaled)["steps", "advantage"])
    assert torch.equal(actual["next", "reward"], batch["steps", "next", "reward"])


def test_envs_do_not_read_each_other():
    env = make_random_env(6, end_rate=0.3)
    batch = next(iter(make_local_collector(env, rollout_steps=T, boundary_slots=3))).clone()
    models = make_test_models(observation_spec=env.observation_spec, action_spec=env.action_spec)
    before = boundary_values(batch, models.value_operator)
    for part in ("steps", "final"):
        batch[part, "policy"][2].add_(1.0)
    others = torch.arange(6) != 2
    for old, new in zip(before, boundary_values(batch, models.value_operator)):
        assert torch.equal(old[others], new[others])


def test_interleaving_by_hand():
    time = torch.tensor([[1, 3], [0, 2], [0, 0]])
    valid = torch.tensor([[True, True], [False, True], [False, False]])
    layout = interleave(time, valid, num_steps=4)
    assert layout.source.tolist() == [[0, 1, 4, 2, 3, 5], [0, 1, 2, 5, 3, 4], [0, 1, 2, 3, 4, 5]]
    assert layout.step.tolist() == [[0, 1, 3, 4], [0, 1, 2, 4], [0, 1, 2, 3]]
    assert layout.has_slot.tolist() == [[False, True, False, True], [False, False, True, False], [False] * 4]


@pytest.mark.parametrize(("num_envs", "num_steps"), [(5, 7), (1, 1)])
def test_normalised_advantages(num_envs, num_steps):
    env = make_random_env(num_envs)
    batch = next(iter(make_local_collector(env, rollout_steps=num_steps)))
    models = make_test_models(observation_spec=env.observation_spec, action_spec=env.action_spec)
    raw, normal = (
        make_advantage(value_operator=models.value_operator, normalize=normalize)(batch)["steps", "advantage"]
        for normalize in (False, True)
    )
    torch.testing.assert_close(normal, (raw - raw.mean()) / raw.std(correction=0).clamp(min=1e-4))
    assert normal.isfinite().all() and normal.mean().abs() < 1e-5
