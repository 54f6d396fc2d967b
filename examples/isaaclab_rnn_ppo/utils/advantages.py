"""Generalised advantages over a compact rollout, exact at every boundary.

Shapes: N envs, T steps, B boundary slots, L layers, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.modules import set_recurrent_mode
from torchrl.objectives.value import GAE

from isaaclab_rnn_ppo.utils.nonfinite import usable_envs
from isaaclab_rnn_ppo.utils.ranks import num_ranks, sum_over_ranks


def with_initial_state(steps: TensorDictBase, initial: TensorDictBase) -> TensorDictBase:
    """Give ``steps`` [N, T] the window's recurrent state [N, L, H] under the step keys.

    The state is expanded over T with stride 0: the recurrent cores read index 0 only.
    """
    states = {
        key: value.unsqueeze(1).expand(-1, steps.shape[1], *value.shape[1:]) for key, value in initial.items(True, True)
    }
    return steps.copy().update(states)


@dataclass(frozen=True)
class Interleaving:
    """Where steps and boundary slots sit in one sequence of length T + B.

    A valid slot follows the step whose next observation it holds; the others go to the end, where
    nothing reads them. Behind a truncation the recurrent state is reset anyway, and behind the
    window end there is nothing, so a slot never disturbs a step.

    Attributes:
        source: index into ``cat([steps, slots])`` for each position, [N, T + B].
        step: position of each step, [N, T].
        has_slot: a valid slot follows the step, [N, T].
    """

    source: Tensor
    step: Tensor
    has_slot: Tensor


def interleave(time: Tensor, valid: Tensor, num_steps: int) -> Interleaving:
    """Lay out ``num_steps`` steps and the slots ``time``, ``valid`` [N, B] (see ``Interleaving``)."""
    num_envs, num_slots = time.shape
    time = time.long()
    slots_after = torch.zeros(num_envs, num_steps, dtype=torch.long, device=time.device)
    slots_after.scatter_add_(1, time, valid.long())
    slots_before = slots_after.cumsum(1) - slots_after
    step = torch.arange(num_steps, device=time.device) + slots_before
    tail = num_steps + valid.sum(1, keepdim=True) + (~valid).cumsum(1) - 1
    slot = torch.where(valid, step.gather(1, time) + 1, tail)
    order = torch.arange(num_steps + num_slots, device=time.device).expand(num_envs, -1)
    source = torch.empty_like(order).scatter_(1, torch.cat([step, slot], 1), order)
    return Interleaving(source, step, slots_after > 0)


def boundary_values(batch: TensorDictBase, value_operator: TensorDictModuleBase) -> tuple[Tensor, Tensor, Tensor]:
    """Value of every step and of what follows it, from one pass of length T + B.

    Args:
        batch: a rollout (see ``collectors``), [N].
        value_operator: observation -> ``state_value``, with the recurrent core that training uses.

    Returns:
        ``state_value`` [N, T, 1]; ``next_value`` [N, T, 1], which at a time-out and at the window end
        is V(final observation | state after the step); ``approximated`` [N, T], where a bootstrap had
        no final observation and V(s_t) stands in.
    """
    steps, final = batch["steps"], batch["final"]
    num_steps, num_slots = steps.shape[1], final.shape[1]
    layout = interleave(final["time"], final["valid"], num_steps)

    sequence = TensorDict(batch_size=layout.source.shape, device=steps.device)
    states, observations = set(batch["initial"].keys(True, True)), set(final.keys(True, True))
    for key in value_operator.in_keys:
        if key in states:
            continue
        if key in observations:
            slots = final[key]
        else:  # `is_init`, False at a slot: it continues the trajectory of its step
            slots = steps[key].new_zeros(len(batch), num_slots, *steps[key].shape[2:])
        both = torch.cat([steps[key], slots], 1)
        index = layout.source.view(*layout.source.shape, *[1] * (both.ndim - 2))
        sequence[key] = both.gather(1, index.expand(-1, -1, *both.shape[2:]))
    with torch.no_grad(), set_recurrent_mode(True):
        values = value_operator(with_initial_state(sequence, batch["initial"]))["state_value"]

    state_value = values.gather(1, layout.step.unsqueeze(-1))
    following = (layout.step + 1).clamp(max=num_steps + num_slots - 1)
    next_value = values.gather(1, following.unsqueeze(-1))

    done, terminated = steps["next", "done"].squeeze(-1), steps["next", "terminated"].squeeze(-1)
    cut = done.clone()
    cut[:, -1] = True
    approximated = cut & ~terminated & ~layout.has_slot
    next_value = torch.where(approximated.unsqueeze(-1), state_value, next_value)
    return state_value, next_value, approximated


def nanmean_over_ranks(x: Tensor) -> Tensor:
    """Mean [] of the entries of every rank's ``x`` [*] that are not NaN."""
    if num_ranks() == 1:
        return x.nanmean()
    total, count = sum_over_ranks(torch.stack([x.nansum(dtype=torch.double), (~x.isnan()).sum().double()]))
    return (total / count).to(x.dtype)


def make_advantage(
    *,
    value_operator: TensorDictModuleBase,
    gamma: float = 0.99,
    gae_lambda: float = 0.95,
    normalize: bool = True,
    vectorized: bool = False,
    reward_scale: float = 1.0,
) -> Callable[[TensorDictBase], TensorDictBase]:
    """Advantages and value targets of a rollout (GAE: Schulman et al., 2016, arXiv:1506.02438).

    Args:
        value_operator: see ``boundary_values``.
        gamma: discount a step.
        gae_lambda: weight of longer returns.
        normalize: standardise the advantages over the whole batch, that of all ranks, of the envs that are usable.
        vectorized: TorchRL's convolutional GAE instead of its loop over time. Its shapes depend on the
            episodes' lengths, so it waits for the device.
        reward_scale: multiplies the rewards that values and advantages see, not the reported returns.

    Returns:
        a function of a rollout [N] that returns its training part: ``steps`` [N, T] with
        ``advantage``, ``value_target`` and ``state_value`` [N, T, 1]; ``initial``; and
        ``bootstrap_approximated`` [N], the number of bootstraps without a final observation.
        ``advantage`` and ``value_target`` are NaN over the window of an env that holds a value which is not usable
        (``nonfinite``): no minibatch with that env is learnt from, and the others know nothing of it.

    Raises:
        ValueError: ``vectorized`` with a gamma or lambda of 0, where TorchRL 0.14.1 fails.
    """
    if vectorized and gamma * gae_lambda == 0:
        raise ValueError(f"--vectorized-gae needs --gamma {gamma} and --gae-lambda {gae_lambda} above 0.")
    gae = GAE(gamma=gamma, lmbda=gae_lambda, value_network=None, vectorized=vectorized, time_dim=1)
    gae.set_keys()  # else set at the first call, and torch.compile compiles again at the second

    def estimate(batch: TensorDictBase) -> TensorDictBase:
        state_value, next_value, approximated = boundary_values(batch, value_operator)
        steps = batch["steps"]
        signals = steps["next"].copy().set("state_value", next_value)
        signals["reward"] = signals["reward"] * reward_scale
        results = gae(TensorDict({"state_value": state_value, "next": signals}, steps.shape, device=steps.device))
        results = results.select("advantage", "value_target", "state_value")
        window = TensorDict({"steps": steps, "initial": batch["initial"], "results": results}, batch.shape)
        usable = usable_envs(window).view(-1, 1, 1)
        for key in ("advantage", "value_target"):
            results[key] = torch.where(usable, results[key], torch.nan)
        if normalize:
            centred = results["advantage"] - nanmean_over_ranks(results["advantage"])
            results["advantage"] = centred / nanmean_over_ranks(centred.square()).sqrt().clamp(min=1e-4)
        return TensorDict(
            {
                "steps": steps.copy().update(results),
                "initial": batch["initial"],
                "bootstrap_approximated": approximated.sum(1),
            },
            batch.shape,
            device=batch.device,
        )

    return estimate
