"""Values that are not finite: what they reach, and that a skipped update leaves no trace.

Shapes: N envs, T steps.
"""

import copy

import pytest
import torch
from isaaclab_rnn_ppo.utils.advantages import make_advantage
from isaaclab_rnn_ppo.utils.learner import Objective
from isaaclab_rnn_ppo.utils.losses import make_critic_loss, make_loss
from isaaclab_rnn_ppo.utils.nonfinite import NonFiniteRun, check_skipped, first_unusable
from isaaclab_rnn_ppo.utils.schedules import AdaptiveLR, make_optimizer
from isaaclab_rnn_ppo.utils.update import make_update, minibatches
from tensor_env import TERMINATE, TableEnv, make_local_collector, make_test_models, with_transforms
from tensordict import TensorDict
from test_update import needs_device, parameter_vector, replayed, rollout, tiny_models
from torch import nn
from torchrl.data import Composite, Unbounded

N, BAD = 6, 2
OTHERS = [env for env in range(N) if env != BAD]
VALUES = pytest.mark.parametrize("value", [float("nan"), 1e30], ids=["nan", "1e30"])
PLACES = pytest.mark.parametrize(
    "place",
    [
        ("steps", "policy"),
        ("steps", "critic"),
        ("steps", "next", "reward"),
        ("steps", "action"),
        ("steps", "action_log_prob"),
        ("initial", "recurrent_state_c"),
    ],
    ids=lambda place: place[-1],
)


def poisoned(models, place, value):
    """A rollout, and the same with one bad entry in the window of env ``BAD``."""
    batch = rollout(models, num_envs=N)
    bad = batch.clone()
    bad[place][BAD, -1].flatten()[0].fill_(value)
    return batch, bad


def snapshot(loss_module, optimizer):
    return copy.deepcopy([loss_module.state_dict(), optimizer.state_dict()])


def assert_same(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@PLACES
@VALUES
@pytest.mark.parametrize("vectorized", [False, True], ids=["loop", "vectorized"])
def test_the_advantages_of_the_others_know_nothing_of_it(place, value, vectorized):
    models = tiny_models(critic=True)
    advantage = make_advantage(value_operator=models.value_operator, vectorized=vectorized)
    batch, bad = poisoned(models, place, value)
    training, expected = advantage(bad)["steps"], advantage(batch[OTHERS])["steps"]
    for key in ("advantage", "value_target"):
        assert training[key][BAD].isnan().all()
        torch.testing.assert_close(training[key][OTHERS], expected[key], rtol=1e-5, atol=1e-6)


@PLACES
@VALUES
def test_learning_is_that_without_the_minibatches_that_hold_it(place, value):
    """Parameters, Adam's moments and counts, the adapted learning rate and the means of the metrics, bit for bit."""

    def setup():
        models = tiny_models(critic=True)
        losses = [
            make_loss(actor=models.actor, value_head=None),
            make_critic_loss(value_operator=models.value_operator),
        ]
        optimizers = [make_optimizer(loss.parameters(), 1e-3) for loss in losses]
        adapt = [AdaptiveLR(optimizers[0], desired_kl=0.01), None]
        updates = [
            make_update(loss_module=loss, optimizer=optimizer, adapt_lr=adapt_lr)
            for loss, optimizer, adapt_lr in zip(losses, optimizers, adapt)
        ]
        return models, losses, optimizers, updates

    models, losses, optimizers, updates = setup()
    start = [parameter_vector(loss).clone() for loss in losses]
    _, bad = poisoned(models, place, value)
    training = make_advantage(value_operator=models.value_operator)(bad)
    torch.manual_seed(5)
    results = [
        Objective("x", loss, optimizer, update, num_epochs=4, num_minibatches=3).learn(training)
        for loss, optimizer, update in zip(losses, optimizers, updates)
    ]

    _, expected_losses, expected_optimizers, expected_updates = setup()
    torch.manual_seed(5)
    for update, means in zip(expected_updates, results):
        taken = []
        for _ in range(4):
            for envs in minibatches(N, 3, "cpu"):
                if BAD not in envs:
                    taken.append(update(training[envs]))
        assert int(means.pop("skipped_updates")) == 4 and len(taken) == 8
        for name, mean in means.items():
            torch.testing.assert_close(mean, sum(metrics[name] for metrics in taken) / 8)
    for before, mine, theirs in zip(start, zip(losses, optimizers), zip(expected_losses, expected_optimizers)):
        assert parameter_vector(mine[0]).isfinite().all() and not torch.equal(parameter_vector(mine[0]), before)
        assert_same(snapshot(*mine), snapshot(*theirs))
    assert float(optimizers[0].param_groups[0]["lr"]) != pytest.approx(1e-3)  # the schedule had something to do


@VALUES
@pytest.mark.parametrize("place", [("steps", "policy"), ("steps", "next", "reward")], ids=["observation", "reward"])
def test_the_normalisers_leave_the_window_out(place, value):
    specs = {
        "observation_spec": Composite(policy=Unbounded((1, 5)), shape=[1]),
        "action_spec": Unbounded((1, 2)),
        "normalize_obs": True,
        "normalize_value": True,
    }
    models, expected = make_test_models(**specs), make_test_models(**specs)
    advantage = make_advantage(value_operator=models.value_operator)
    _, bad = poisoned(models, place, value)
    training = advantage(bad)["steps"]
    models.update_normalizers(training)
    expected.update_normalizers(training[OTHERS])
    for key, statistics in models.value_operator.state_dict().items():
        torch.testing.assert_close(statistics, expected.value_operator.state_dict()[key], rtol=1e-6, atol=1e-6)
    assert models.value_normalizer.returns.count == 5 * len(OTHERS)


class Poison(torch.autograd.Function):
    """Identity whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class PoisonedLoss(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 2)

    def forward(self, window):
        loss = self.net(window["x"]).square().mean() * window["loss"].mean()
        loss = Poison.apply(loss, window["grad"].mean())
        # A constant that is not finite leaves the gradient as it is.
        return {"loss_policy": loss, "loss_constant": window["constant"].mean(), "kl": window["kl"].mean()}


def poison_minibatch(seed=0, *, loss=1.0, grad=1.0, constant=0.0, device="cpu"):
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(seed))
    values = {"loss": loss, "grad": grad, "constant": constant, "kl": 1.0}
    steps = TensorDict({"x": x} | {key: torch.full((2, 4), value) for key, value in values.items()}, [2, 4])
    return TensorDict({"steps": steps, "initial": TensorDict({}, [2])}, [2]).to(device)


def run_poisoned(minibatches, wrap=lambda update: update, device="cpu", **options):
    module = PoisonedLoss().to(device)
    optimizer = make_optimizer(module.parameters(), 1e-2)
    adapt_lr = AdaptiveLR(optimizer, desired_kl=0.01)
    update = wrap(make_update(loss_module=module, optimizer=optimizer, adapt_lr=adapt_lr, **options))
    metrics = [update(minibatch) for minibatch in minibatches]
    return snapshot(module, optimizer), [int(m["skipped_updates"]) for m in metrics], metrics


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_a_bad_loss_or_gradient_leaves_no_trace(how):
    """A factor of 1e30 keeps the loss and every entry of the gradient finite in float32."""
    options = {"compile_mode": "default" if how == "compiled" else None}
    good = [poison_minibatch(i) for i in range(4)]
    nan, large = float("nan"), 1e30
    bad = [{"loss": nan}, {"grad": nan}, {"loss": large}, {"grad": large}, {"constant": nan}]
    bad = [poison_minibatch(9, **where) for where in bad]
    torch._dynamo.reset()
    state, skipped, metrics = run_poisoned([good[0], *bad[:2], good[1], *bad[2:], good[2], good[3]], **options)
    expected, none_skipped, _ = run_poisoned(good, **options)
    assert skipped == [0, 1, 1, 0, 1, 1, 1, 0, 0] and none_skipped == [0] * 4
    assert_same(state, expected)
    assert all(float(value) == 0 for name, value in metrics[1].items() if name != "skipped_updates")


@needs_device
@VALUES
def test_a_replayed_update_skips_it_too(record, device, value):
    def wrap(update):
        return replayed(update, record, warmup=1)

    good = [poison_minibatch(i, device=device) for i in range(5)]
    bad = poison_minibatch(9, grad=value, device=device)
    state, skipped, _ = run_poisoned([good[0], good[1], bad, good[2], bad, bad, *good[3:]], wrap, device)
    expected, _, _ = run_poisoned(good, wrap, device)
    assert skipped == [0, 0, 1, 0, 1, 1, 0, 0]
    assert_same(state, expected)


# --- what the host says -----------------------------------------------------------------------------


def test_skipped_updates_in_a_row_are_counted_over_iterations():
    skips = iter([0, 1, 1, 1, 1, 0, 1, 1])

    def update(minibatch):
        return {"skipped_updates": torch.tensor(float(next(skips)))}

    objective = Objective("model", None, None, update, num_epochs=2, num_minibatches=1)
    counts = []
    for _ in range(4):
        objective.learn(torch.zeros(3))
        counts.append(int(objective.skipped_in_a_row))
    assert counts == [1, 3, 0, 2]


def test_the_first_bad_entry_is_named(tmp_path):
    batch = rollout(tiny_models(critic=True), num_envs=N)
    assert first_unusable(batch["steps"]) is None
    batch["steps", "policy"][3, 4, 1] = float("inf")
    batch["steps", "next", "reward"][4, 2] = 1e30
    batch["steps", "critic"][5, 2, 0] = float("nan")
    options = {"iteration": 7, "skipped": 3, "max_in_a_row": 5, "run_dir": tmp_path}
    with pytest.warns(UserWarning, match=r"iteration 7: 3 updates skipped: .* at step 2 is ") as record:
        check_skipped(batch, in_a_row=5, **options)
    assert "next.reward of env 4" in str(record[0].message) or "critic of env 5" in str(record[0].message)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NonFiniteRun, match=r"iteration 7: 6 updates in a row skipped \(--max-skipped-updates 5\)"):
        check_skipped(batch, in_a_row=6, **options)
    saved = torch.load(tmp_path / "nonfinite_batch.pt", weights_only=True)
    torch.testing.assert_close(saved["steps"]["policy"], batch["steps", "policy"])


# --- in the worker ----------------------------------------------------------------------------------


@VALUES
@pytest.mark.parametrize("rnn", ["lstm", "none"])
def test_a_sensor_fault_stays_in_its_window(rnn, value):
    """It is stored, the env is not told of it, and the next window is as clean as its observations."""
    num_envs, num_steps = 3, 12
    generator = torch.Generator().manual_seed(0)
    roots, finals = torch.randn(2, num_steps, num_envs, 2, generator=generator)
    rewards, ends = torch.ones(num_steps, num_envs), torch.zeros(num_steps, num_envs, dtype=torch.long)
    ends[5] = ends[7] = TERMINATE
    roots[1, BAD, 0] = value
    rewards[2, 0] = value
    env = with_transforms(TableEnv(roots, finals, ends, rewards))
    collector = make_local_collector(env, rollout_steps=4, make_policy=lambda **kw: _policy(rnn, **kw))
    batches = [batch.clone() for batch, _ in zip(collector, range(3))]
    assert not (batches[0]["steps", "policy"][BAD, 1, 0].abs() < 1e18)
    for batch in batches:
        assert (batch["steps", "action"].abs() < 1e3).all() and (batch["steps", "action_log_prob"].abs() < 1e3).all()
        assert all((state.abs() < 1e3).all() for state in batch["initial"].values())
    assert first_unusable(batches[0]["steps"]).startswith(f"policy of env {BAD} at step 1 is ")
    assert first_unusable(batches[1]["steps"]) is None and first_unusable(batches[2]["steps"]) is None
    # Of the episodes that ended at steps 5 and 7 of env 0, the first has a return that is not usable.
    assert batches[1]["episodes", "count"].tolist() == [1, 2, 2]
    assert batches[1]["episodes", "return"].tolist() == [2, 8, 8]
    assert batches[1]["episodes", "length"].tolist() == [2, 8, 8]


def _policy(rnn, **kwargs):
    return make_test_models(rnn=rnn, **kwargs).collector_policy


@VALUES
def test_a_final_observation_that_is_not_usable_is_unknown(value):
    roots, finals = torch.zeros(2, 3, 2), torch.full((1, 3, 2), value)
    finals[:, 0] = 0.0
    env = with_transforms(TableEnv(roots, finals, torch.full((1, 3), 2), torch.zeros(1, 3)))
    batch = next(iter(make_local_collector(env, rollout_steps=1)))
    assert batch["final", "valid"].any(1).tolist() == [True, False, False]
