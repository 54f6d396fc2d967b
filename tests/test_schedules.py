"""Learning rates and coefficients over a run."""

import pytest
import torch
from isaaclab_rnn_ppo.utils.learner import Objective, apply_schedules
from isaaclab_rnn_ppo.utils.schedules import AdaptiveLR, linear, make_optimizer, set_learning_rate
from isaaclab_rnn_ppo.utils.update import Replay, make_update
from tensordict import TensorDict
from torch import nn

# desired KL 0.01: 0.03 is above twice it, 0.004 below half, 0.01 and the two bounds change nothing.
KLS = [0.03, 0.004, 0.01, 0.02, 0.005, 0.0, 0.0049, 0.021, *[0.001] * 14, *[0.5] * 22, 0.001]


def published_rule(lr: float, kls: list[float], desired: float, highest: float = 1e-2) -> list[float]:
    """rsl_rl's: max(1e-5, lr / 1.5) above 2 x desired, min(1e-2, lr * 1.5) below desired / 2 unless the KL is 0."""
    path = []
    for kl in kls:
        if kl > desired * 2.0:
            lr = max(1e-5, lr / 1.5)
        elif 0.0 < kl < desired / 2.0:
            lr = min(highest, lr * 1.5)
        path.append(lr)
    return path


class LossOfKl(nn.Module):
    """Reports the KL that the batch names."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, window):
        return {"loss_policy": (self.weight * window["x"].mean()).sum(), "kl": window["kl"].mean()}


def minibatch(kl: float) -> TensorDict:
    steps = TensorDict({"x": torch.ones(2, 4, 1), "kl": torch.full((2, 4, 1), kl, dtype=torch.float64)}, [2, 4])
    return TensorDict({"steps": steps, "initial": TensorDict({}, [2])}, [2])


def test_linear():
    assert [linear(0.8, 0.0, i, 4) for i in (1, 2, 3, 4)] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert linear(0.5, 0.5, 3, 7) == 0.5


def test_the_published_rule_touches_both_bounds_on_this_sequence():
    path = published_rule(1e-3, KLS, 0.01)
    assert max(path) == 1e-2 and min(path) == 1e-5 and path[2] == path[1] == path[3] == path[4] == path[5]


def test_adaptive_stays_within_its_bounds():
    optimizer = make_optimizer([nn.Parameter(torch.ones(1))], 1e-3)
    adapt = AdaptiveLR(optimizer, desired_kl=0.01, highest=3e-3)
    path = []
    for kl in KLS:
        adapt(torch.tensor(kl))
        path.append(float(optimizer.param_groups[0]["lr"]))
    assert path == pytest.approx(published_rule(1e-3, KLS, 0.01, highest=3e-3), rel=1e-6)
    assert max(path) == pytest.approx(3e-3, rel=1e-6)
    adapt.highest.fill_(2e-6)  # what a schedule does; below the lowest rate of the rule
    adapt(torch.tensor(0.01))
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(2e-6, rel=1e-6)


def test_the_bound_of_the_adaptive_rate_falls_over_the_run():
    loss_module = LossOfKl()
    loss_module.register_buffer("entropy_coeff", torch.tensor(0.0))
    optimizer = make_optimizer(loss_module.parameters(), 1e-3)
    adapt = AdaptiveLR(optimizer, desired_kl=0.01, highest=4e-3)
    policy = Objective("model", loss_module, optimizer, lambda _: {}, 1, 1, adapt_lr=adapt)
    options = {"learning_rate": 1e-3, "lr_schedule": "adaptive", "max_learning_rate": 4e-3, "entropy_coeff": 0.2}
    path = []
    for iteration in (1, 2, 3, 4):
        apply_schedules([policy], iteration, 4, max_learning_rate_final=0.0, entropy_coeff_final=0.0, **options)
        for _ in range(9):
            adapt(torch.tensor(1e-3))
        path.append((float(optimizer.param_groups[0]["lr"]), float(loss_module.entropy_coeff)))
    assert path == [pytest.approx(pair, rel=1e-6) for pair in ((4e-3, 0.2), (3e-3, 0.15), (2e-3, 0.1), (1e-3, 0.05))]
    apply_schedules([policy], 4, 4, **options)
    assert float(adapt.highest) == pytest.approx(1e-3), "without a final one the bound stays"


@pytest.mark.parametrize("how", ["eager", "compiled", "compiled and replayed"])
def test_adaptive_follows_the_published_rule(how):
    loss_module = LossOfKl()
    optimizer = make_optimizer(loss_module.parameters(), 1e-3)
    update = make_update(
        loss_module=loss_module,
        optimizer=optimizer,
        adapt_lr=AdaptiveLR(optimizer, desired_kl=0.01),
        compile_mode=None if how == "eager" else "default",
    )
    if how == "compiled and replayed":  # what a CUDA graph does: the same call again, on buffers that are refilled
        compiled = update

        def flat(structure, x, kl):
            batch = minibatch(0.0)
            batch["steps", "x"], batch["steps", "kl"] = x, kl
            return structure, [compiled(batch)["kl"]]

        replay = Replay(flat, warmup=2, record=lambda call: call)

        def update(batch):
            return replay((), batch["steps", "x"], batch["steps", "kl"])

    path = []
    for kl in KLS:
        update(minibatch(kl))
        path.append(float(optimizer.param_groups[0]["lr"]))
    assert path == pytest.approx(published_rule(1e-3, KLS, 0.01), rel=1e-5)


def test_the_learning_rate_that_was_adapted_is_the_one_of_the_same_step():
    loss_module = LossOfKl()
    optimizer = make_optimizer(loss_module.parameters(), 1e-3)
    update = make_update(loss_module=loss_module, optimizer=optimizer, adapt_lr=AdaptiveLR(optimizer, desired_kl=0.01))
    update(minibatch(1.0))
    # Adam's first step has the size of the learning rate.
    torch.testing.assert_close(1 - loss_module.weight.detach(), torch.full((3,), 1e-3 / 1.5), rtol=1e-4, atol=0)


def test_a_learning_rate_keeps_its_address_and_survives_a_checkpoint():
    loss_module = LossOfKl()
    optimizer = make_optimizer(loss_module.parameters(), 1e-3)
    adapt = AdaptiveLR(optimizer, desired_kl=0.01)
    address = optimizer.param_groups[0]["lr"].data_ptr()
    set_learning_rate(optimizer, 5e-4)
    set_learning_rate(optimizer, torch.tensor(3e-4))
    adapt(torch.tensor(1.0))
    assert optimizer.param_groups[0]["lr"].data_ptr() == address
    state = optimizer.state_dict()
    other = make_optimizer(loss_module.parameters(), 1e-3)
    adapt_other = AdaptiveLR(other, desired_kl=0.01)
    other.load_state_dict(state)
    assert float(other.param_groups[0]["lr"]) == pytest.approx(2e-4, rel=1e-6)
    adapt_other(torch.tensor(1e-3))
    assert float(other.param_groups[0]["lr"]) == pytest.approx(3e-4, rel=1e-6)


def test_target_kl_leaves_out_the_remaining_epochs():
    kls = iter([0.01, 0.02, 0.02, 0.05, 0.3, 0.3])
    batch = TensorDict({"x": torch.zeros(4, 1)}, [4])

    def update(minibatch):
        kl = torch.tensor(next(kls))
        return {"kl": kl, "loss_policy": torch.tensor(1.0), "skipped_updates": torch.tensor(0.0)}

    metrics = Objective("model", None, None, update, num_epochs=3, num_minibatches=2, target_kl=0.03).learn(batch)
    # Epoch means: 0.015, then 0.035, which is above the target, so the third epoch is left out.
    assert int(metrics["epochs_done"]) == 2
    assert float(metrics["kl"]) == pytest.approx(0.025)
    assert float(metrics["loss_policy"]) == 1.0
    kls = iter([0.5] * 4)
    metrics = Objective("model", None, None, update, num_epochs=2, num_minibatches=2).learn(batch)
    assert float(metrics["kl"]) == 0.5 and "epochs_done" not in metrics
