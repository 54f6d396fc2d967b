"""Data-parallel learners: two gloo ranks against one process with everybody's envs.

Shapes: N envs, T steps.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from isaaclab_rnn_ppo.utils import learner
from isaaclab_rnn_ppo.utils.advantages import make_advantage, with_initial_state
from isaaclab_rnn_ppo.utils.learner import Objective
from isaaclab_rnn_ppo.utils.losses import make_loss
from isaaclab_rnn_ppo.utils.models import Models, make_models
from isaaclab_rnn_ppo.utils.ranks import fingerprint, from_first_rank, require_agreement
from isaaclab_rnn_ppo.utils.schedules import AdaptiveLR, make_optimizer
from isaaclab_rnn_ppo.utils.update import accelerate, make_update
from tensordict import TensorDictBase
from test_update import ACT, HIDDEN, OBS, rollout
from torch import multiprocessing
from torchrl.data import Composite, Unbounded
from torchrl.modules import set_recurrent_mode

RANKS, ENVS, EPOCHS, MINIBATCHES, ITERATIONS = 2, 8, 4, 2, 6


def run_on_ranks(function, folder: Path, *args) -> list:
    """What ``function(*args)`` returns on each of the gloo ranks."""
    multiprocessing.spawn(_on_rank, (function, folder, *args), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]


def _on_rank(rank: int, function, folder: Path, *args) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.save(function(*args), folder / f"{rank}.pt")
    dist.destroy_process_group()


def share(num_envs: int, rank: int) -> slice:
    return slice(rank * num_envs // RANKS, (rank + 1) * num_envs // RANKS)


def minibatches_of(rank: int | None):
    """Those of one rank, or for one process those of all ranks put together; a new order at every call."""
    generator = torch.Generator().manual_seed(0)

    def minibatches(num_envs, num_minibatches, device):
        orders = [torch.randperm(ENVS // RANKS, generator=generator).view(num_minibatches, -1) for _ in range(RANKS)]
        if rank is not None:
            return list(orders[rank])
        return list(torch.cat([order + share(ENVS, i).start for i, order in enumerate(orders)], 1))

    return minibatches


def everybodys_rollout(models: Models, seed: int) -> TensorDictBase:
    """Actions of the current policy, in envs [N] whose observations and KL rise with their number."""
    batch, generator = rollout(models, num_envs=ENVS, seed=seed), torch.Generator().manual_seed(seed)
    steps = batch["steps"]
    number = torch.arange(float(ENVS)).view(ENVS, 1, 1)
    steps["policy"] += number
    with torch.no_grad(), set_recurrent_mode(True):
        policy = models.actor.get_dist(with_initial_state(steps, batch["initial"]))
    noise = torch.randn(2, *policy.mean.shape, generator=generator)
    steps["action"] = policy.mean + policy.stddev * noise[0]
    steps["action_log_prob"] = policy.log_prob(steps["action"]) + 0.04 * number.squeeze(-1) * noise[1, ..., 0]
    return batch


def learn(compile_mode: str | None = None) -> dict:
    """A few iterations on the same rollouts, with everything on that looks at a whole batch."""
    rank = dist.get_rank() if dist.is_initialized() else None
    learner.minibatches = minibatches_of(rank)
    torch.manual_seed(0)
    models = make_models(
        observation_spec=Composite(policy=Unbounded((1, OBS)), shape=[1]),
        action_spec=Unbounded((1, ACT)),
        hidden_size=HIDDEN,
        rnn="lstm",
        rnn_backend="scan",
        embedding=(HIDDEN,),
        normalize_obs=True,
        normalize_value=True,
    )
    loss = make_loss(
        actor=models.actor, value_head=models.value_head, value_clip=0.2, value_normalizer=models.value_normalizer
    )
    optimizer = make_optimizer(loss.parameters(), 1e-3)
    update = make_update(
        loss_module=loss,
        optimizer=optimizer,
        clip_grad_norm=0.5,
        adapt_lr=AdaptiveLR(optimizer, desired_kl=0.01),
        compile_mode=compile_mode,
    )
    objective = Objective("model", loss, optimizer, update, EPOCHS, MINIBATCHES, target_kl=0.016)
    advantage = accelerate(
        make_advantage(value_operator=models.value_operator, vectorized=False), compile_mode=compile_mode
    )
    history = []
    for iteration in range(ITERATIONS):
        batch = everybodys_rollout(models, iteration)
        training = advantage(batch if rank is None else batch[share(ENVS, rank)])
        history.append(objective.learn(training) | {"lr": optimizer.param_groups[0]["lr"].clone()})
        models.update_normalizers(training["steps"])
        require_agreement(loss.state_dict().values(), "parameters")
    return {"state": loss.state_dict(), "history": history}


@pytest.mark.parametrize("compile_mode", [None, pytest.param("default", marks=pytest.mark.slow)])
def test_two_ranks_learn_what_one_learns_from_all_envs(compile_mode, tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "minibatches", learner.minibatches)  # puts the right one back
    first, second = run_on_ranks(learn, tmp_path, compile_mode)
    alone = learn()
    for name, value in alone["state"].items():
        assert torch.equal(first["state"][name], second["state"][name]), name
        torch.testing.assert_close(first["state"][name], value, rtol=1e-6, atol=1e-6)
    for name in alone["history"][0]:
        path = torch.stack([entry[name].double() for entry in alone["history"]])
        for side in (first, second):
            ours = torch.stack([entry[name].double() for entry in side["history"]])
            torch.testing.assert_close(ours, path, rtol=1e-4, atol=1e-6, msg=name)
    # What is to be agreed on was in play.
    epochs = [int(entry["epochs_done"]) for entry in alone["history"]]
    rates = {float(entry["lr"]) for entry in alone["history"]}
    norms = [float(entry["grad_norm"]) for entry in alone["history"]]
    assert min(epochs) < EPOCHS and len(rates) > 1 and max(norms) > 0.5, (epochs, rates, norms)


def differ() -> str:
    rank = dist.get_rank()
    state = [torch.zeros(3), torch.ones(2, dtype=torch.float64)]
    require_agreement(state, "parameters")
    state[0][1] = rank * 1e-45  # the smallest float there is
    try:
        require_agreement(state, "parameters")
    except RuntimeError as error:
        return str(error)
    return "nobody noticed"


def test_a_bit_that_differs_is_an_error_on_every_rank(tmp_path):
    assert (
        run_on_ranks(differ, tmp_path) == ["parameters differ between the 2 ranks: training is no longer one run."] * 2
    )


def test_the_fingerprint_sees_where_a_value_stands():
    x = torch.randn(5)
    assert fingerprint([x]) == fingerprint([x[:2], x[2:]]) != fingerprint([x.flip(0)])


def once() -> list:
    seen = [from_first_rank(lambda: dist.get_rank() + 10)]
    try:
        from_first_rank(lambda: 1 / 0)
    except (ZeroDivisionError, SystemExit) as error:
        seen.append(type(error).__name__)
    return seen


def test_a_failure_on_the_first_rank_ends_the_others(tmp_path):
    assert run_on_ranks(once, tmp_path) == [[10, "ZeroDivisionError"], [10, "SystemExit"]]
