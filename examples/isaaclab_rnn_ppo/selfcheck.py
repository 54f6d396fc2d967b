"""Is recurrent PPO wired right for this task? ``python -m isaaclab_rnn_ppo.selfcheck --task TASK``.

Takes the flags of ``train.py``, collects a few rollouts with changing weights and trains nothing. It
prints a line for each of five properties and ends with code 1 if one does not hold. What it cannot
tell is whether hyperparameters suit a task.

Shapes: N envs, T steps, B boundary slots, L layers, H hidden.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode

from isaaclab_rnn_ppo.train import make_worker_policy, model_factory, seed_everything
from isaaclab_rnn_ppo.utils import (
    Models,
    make_collector,
    make_env,
    parse_args,
    quiet_libraries,
    resolve_asset_root,
    user_errors,
    with_initial_state,
)

RATIO_TOLERANCE = 1e-4
STATE_TOLERANCE = 1e-4
# bf16 keeps 8 bits: one rounding step of a feature, in a GEMM of another shape, moves a ratio this far.
BF16_TOLERANCE = 0.1
MAX_WINDOWS = 40


@dataclass(frozen=True)
class Check:
    """What was checked, whether it holds, and the numbers."""

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}  {self.name}: {self.detail}"


@torch.no_grad()
def ratios(models: Models, batch: TensorDictBase) -> Tensor:
    """New over stored probability of every action, [N, T], as the first minibatch computes it."""
    window = with_initial_state(batch["steps"], batch["initial"])
    with set_recurrent_mode(True):
        dist = models.actor.get_dist(window)
    return (dist.log_prob(window["action"]) - window["action_log_prob"]).exp()


@torch.no_grad()
def replay(models: Models, batch: TensorDictBase) -> tuple[Tensor, dict[str, Tensor]]:
    """Step through a window as a worker does: features [N, T, H] and the state behind it [N, L, H]."""
    steps = batch["steps"]
    state = dict(batch["initial"].items())
    inputs = [key for key in models.collector_policy.in_keys if key not in state]
    features = []
    for t in range(steps.shape[1]):
        step = TensorDict({key: steps[key][:, t] for key in inputs} | state, steps.shape[:1], device=steps.device)
        step = models.collector_policy(step)
        state = {key: step["next", key] for key in state}
        features.append(step["features"])
    return torch.stack(features, 1), state


@torch.no_grad()
def outputs(models: Models, steps: TensorDictBase, initial: TensorDictBase) -> Tensor:
    """Everything that a loss computes from observations: policy mean and value, [N, T, A + 1]."""
    with set_recurrent_mode(True):
        window = models.actor.get_dist_params(with_initial_state(steps, initial))
        value = models.value_operator(with_initial_state(steps, initial))
    return torch.cat([window["loc"], value["state_value"]], -1)


def check_ratio(models: Models, batch: TensorDictBase, tolerance: float = RATIO_TOLERANCE) -> Check:
    """The learner recomputes the log-probabilities that the workers stored."""
    error = (ratios(models, batch) - 1).abs()
    return Check(
        "first-minibatch ratio is 1",
        bool(error.max() <= tolerance),
        f"max |ratio - 1| is {error.max():.1e} over {error.numel():,} steps (allowed {tolerance:.0e})"
        + ("" if error.max() <= tolerance else f"; {int((error > tolerance).sum()):,} steps are above it"),
    )


def check_states(
    models: Models, batch: TensorDictBase, following: TensorDictBase, tolerance: float = STATE_TOLERANCE
) -> Check:
    """Stepping through a window from its stored state ends in the state that the next one starts from."""
    name = "replayed hidden states equal the collected ones"
    if not len(batch["initial"].keys()):
        return Check(name, True, "the policy has no recurrent state")
    features, state = replay(models, batch)
    with torch.no_grad(), set_recurrent_mode(True):
        trained = models.actor.get_dist_params(with_initial_state(batch["steps"], batch["initial"]))["features"]
    starts = following["steps", "is_init"][:, 0].unsqueeze(-1)
    errors = {
        key: torch.where(starts, 0.0, value - following["initial", key]).abs().max() for key, value in state.items()
    }
    errors["features inside the window"] = (features - trained).abs().max()
    worst = max(errors, key=lambda key: float(errors[key]))
    return Check(
        name,
        bool(errors[worst] <= tolerance),
        f"largest difference {errors[worst]:.1e} in {worst} (allowed {tolerance:.0e})",
    )


def check_resets(models: Models, batch: TensorDictBase, following: TensorDictBase) -> Check:
    """Every episode starts with ``is_init``, and nothing before it changes what comes after."""
    name = "resets isolate episodes"
    steps, initial = batch["steps"], batch["initial"]
    num_steps = steps.shape[1]
    starts = torch.cat([steps["is_init"][:, 1:], following["steps", "is_init"][:, :1]], 1)
    done = steps["next", "done"]
    if (unmarked := int((done != starts).sum())) > 0:
        return Check(
            name, False, f"at {unmarked} of {int((done | starts).sum())} episode starts is_init and done disagree"
        )
    flags = steps["is_init"].squeeze(-1)
    found = int(flags[:, 1:].sum())
    note = f"{found} resets inside the window"
    if found == 0:  # the task's own are too rare: reset every env in the middle of what it recorded
        flags = flags.clone()
        flags[:, num_steps // 2] = True
        note = "no reset inside the window, so one was imposed on every env"
    steps = steps.copy().set("is_init", flags.unsqueeze(-1))
    # Everything before an env's last reset becomes something else.
    time = torch.arange(num_steps, device=flags.device)
    last = torch.where(flags, time, -1).max(1, keepdim=True).values
    before, after = time < last, (time >= last) & (last >= 0)
    other = steps.copy()
    for group in {key for view in (models.actor, models.value_operator) for key in view.in_keys} & set(steps.keys()):
        if group != "is_init":
            other[group] = torch.where(before.unsqueeze(-1), steps[group].roll(1, 0) + 1.0, steps[group])
    other_initial = TensorDict(
        {key: torch.where(last.unsqueeze(-1) >= 0, value + 1.0, value) for key, value in initial.items()},
        initial.shape,
    )
    change = (outputs(models, steps, initial) - outputs(models, other, other_initial)).abs()[after]
    return Check(
        name,
        bool((change == 0).all()),
        f"{note}; another past changes the mean or the value after it by {change.max():.1e} (allowed 0)",
    )


def check_finals(batch: TensorDictBase, following: TensorDictBase) -> Check:
    """A bootstrap has the true next observation at the window's end and at every time-out inside it."""
    name = "final observations are present"
    steps, final = batch["steps"], batch["final"]
    groups = [key for key in final.keys() if key not in ("time", "valid")]
    num_steps = steps.shape[1]
    done, terminated = steps["next", "done"].squeeze(-1), steps["next", "terminated"].squeeze(-1)
    wanted = done & ~terminated
    wanted[:, -1] = ~terminated[:, -1]
    time, valid = final["time"].long(), final["valid"]
    held = torch.zeros(done.shape, dtype=torch.long, device=done.device).scatter_add_(1, time, valid.long())
    problems = []
    if missing := int((wanted & (held == 0)).sum()):
        inside = int((wanted & (held == 0))[:, :-1].sum())
        problems.append(
            f"{missing} of {int(wanted.sum())} are missing, {inside} of them at time-outs inside the window"
            + (" (see --boundary-slots)" if inside else "")
        )
    if unwanted := int((held > wanted.long()).sum()):
        problems.append(f"{unwanted} belong to no boundary")

    def flat(part: TensorDictBase) -> Tensor:
        return torch.cat([part[group].flatten(2) for group in groups], -1)

    # What the env shows after each step: equal to a final observation unless the step ended an episode.
    shown = torch.cat([flat(steps)[:, 1:], flat(following["steps"])[:, :1]], 1)
    observed = flat(final)
    index = time.unsqueeze(-1).expand(-1, -1, observed.shape[-1])
    same = (observed == shown.gather(1, index)).all(-1)
    ended = done.gather(1, time)
    at_end = valid & (time == num_steps - 1) & ~ended
    if different := int((at_end & ~same).sum()):
        problems.append(f"{different} of {int(at_end.sum())} at the window's end differ from the next observation")
    cut = valid & ended
    if stale := int((cut & same).sum()):
        problems.append(f"{stale} of {int(cut.sum())} at time-outs are the observation after the reset")
    if bad := int((~observed.isfinite().all(-1) & valid).sum()):
        problems.append(f"{bad} are not finite")
    seen = f"{int(valid.sum())} held, {int(cut.sum())} of them at time-outs"
    return Check(name, not problems, "; ".join([*problems, seen]))


def check_workers(
    models: Models, batch: TensorDictBase, *, version: int, num_workers: int, tolerance: float = RATIO_TOLERANCE
) -> Check:
    """Every worker acted with the weights pushed last, by its version tag and by its probabilities."""
    name = "all workers act with the pushed weights"
    error = (ratios(models, batch) - 1).abs()
    problems, seen = [], batch["worker"].unique().tolist()
    if len(seen) != num_workers:
        problems.append(f"{len(seen)} of {num_workers} workers are in the batch")
    for worker in seen:
        own = batch["worker"] == worker
        versions = batch["steps", "policy_version"][own].unique().tolist()
        if versions != [version]:
            problems.append(f"worker {worker} acted with version {', '.join(map(str, versions))}")
        if error[own].max() > tolerance:
            problems.append(f"worker {worker} acted with other weights: max |ratio - 1| is {error[own].max():.1e}")
    return Check(name, not problems, "; ".join(problems) or f"{len(seen)} of {num_workers}, version {version}")


def perturb(module: nn.Module) -> None:
    """Change every parameter by about a tenth, as many updates would."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.1).add_(0.02 * torch.randn_like(parameter))


def run_checks(
    models: Models,
    collect: Callable[[], tuple[TensorDictBase, int]],
    *,
    num_workers: int,
    ratio_tolerance: float = RATIO_TOLERANCE,
    state_tolerance: float = STATE_TOLERANCE,
    max_windows: int = MAX_WINDOWS,
) -> list[Check]:
    """The five checks, on weights and statistics that are not the initial ones.

    Args:
        collect: pushes the weights, collects, and returns a batch of its own and the version pushed.
        num_workers: how many workers a batch is from.
        max_windows: how long to wait for a time-out inside a window.
    """
    batch, _ = collect()
    for group, normalizer in models.normalizers:
        normalizer.update(batch["steps"][group])
    perturb(models.actor)
    perturb(models.value_operator)
    batch, version = collect()
    following, next_version = collect()
    for _ in range(max_windows):
        if (batch["steps", "next", "done"] & ~batch["steps", "next", "terminated"])[:, :-1].any():
            break
        batch, version = following, next_version
        following, next_version = collect()
    return [
        check_ratio(models, batch, ratio_tolerance),
        check_states(models, batch, following, state_tolerance),
        check_resets(models, batch, following),
        check_finals(batch, following),
        check_workers(models, batch, version=version, num_workers=num_workers, tolerance=ratio_tolerance),
    ]


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    quiet_libraries()
    seed_everything(args.seed)
    with user_errors():
        asset_root, asset_line = resolve_asset_root(args.asset_root, task=args.task)
        print(asset_line, flush=True)
        # Synchronous whatever the flag says: a stale policy would fail the ratio check by design.
        collector = make_collector(
            create_env_fn=partial(
                make_env, args.task, device=args.device, overrides=args.env_overrides, asset_root=asset_root
            ),
            make_policy=partial(make_worker_policy, model_factory(args)),
            num_envs=args.num_envs,
            rollout_steps=args.rollout_steps,
            num_collectors=args.num_collectors,
            boundary_slots=args.boundary_slots,
            device=args.device,
            seed=args.seed,
        )
    try:
        models = model_factory(args)(
            observation_spec=collector.getattr_env("observation_spec"),
            action_spec=collector.getattr_env("action_spec"),
        )
        rollouts = iter(collector)

        def collect() -> tuple[TensorDictBase, int]:
            collector.update_policy_weights_(models.collector_policy)
            return next(rollouts).clone().to(args.device), collector.policy_version

        coarse = args.amp == "bf16"
        checks = run_checks(
            models,
            collect,
            num_workers=args.num_collectors,
            ratio_tolerance=BF16_TOLERANCE if coarse else RATIO_TOLERANCE,
            state_tolerance=BF16_TOLERANCE if coarse else STATE_TOLERANCE,
        )
    finally:
        collector.shutdown()
    print(*checks, sep="\n", flush=True)
    return 0 if all(check.passed for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
