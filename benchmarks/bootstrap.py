"""Advantages of each library against a float64 reference that steps through the window.

    uv sync --group peers
    PYTHONPATH=tests python benchmarks/bootstrap.py --output benchmarks/results/bootstrap.json

Every library plays the same windows with its own rollout code and computes advantages with its own (`peers.py`). The
reference runs the library's own critic, in double precision, one step at a time: V(final observation | state after the
step) at a time-out and at the window's end, nothing behind a termination, zero state behind either. Value heads are
scaled so that values have a standard deviation of 1; a figure is the largest difference over all steps and envs.
"""

from __future__ import annotations

import argparse
import copy
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import matplotlib
import torch
from peers import (
    CONTESTANTS,
    GAMMA,
    LAMBDA,
    PACKAGES,
    Contestant,
    Critic,
    Skrl,
    TorchRl,
    Window,
    make_window,
    random_ends,
)
from tensor_env import TERMINATE, TRUNCATE
from torch import Tensor, nn

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ENVS, STEPS, OBS, ACT, HIDDEN = 16, 32, 6, 2, 32


class SkrlTimeLimit(Skrl):
    """skrl with `time_limit_bootstrap`."""

    time_limit_bootstrap = True


class TorchRlShifted(TorchRl):
    """TorchRL's GAE with `shifted=True`, the cheaper one."""

    def advantages(self) -> Tensor:
        self.raw_gae = self.gae
        return super().advantages()


class TorchRlCompact(TorchRlShifted):
    """TorchRL's rollouts without next observations, which only a shifted GAE can read."""

    collector_options: ClassVar[dict[str, Any]] = {"compact_obs": True}


VARIANTS: dict[str, type[Contestant]] = CONTESTANTS | {
    "skrl, time_limit_bootstrap": SkrlTimeLimit,
    "torchrl, shifted": TorchRlShifted,
    "torchrl, compact_obs": TorchRlCompact,
}


def cases() -> dict[str, Tensor]:
    """Episode ends [T, N] by name."""

    def ends(kind: int, *steps: int) -> Tensor:
        table = torch.zeros(STEPS, ENVS, dtype=torch.long)
        table[list(steps), ::2] = kind
        return table

    return {
        "no end": ends(0),
        "termination inside": ends(TERMINATE, 12),
        "time-out inside": ends(TRUNCATE, 12),
        "time-out at the window end": ends(TRUNCATE, STEPS - 1),
        "time-out of a one-step episode": ends(TRUNCATE, 12, 13),
        "reset one step before the window end": ends(TRUNCATE, STEPS - 2),
        "all of them, 10 % of the steps": random_ends(ENVS, STEPS, 0.1),
    }


def reference(window: Window, critic: Critic) -> tuple[Tensor, Tensor]:
    """Advantages and values [T, N] in float64."""
    parts = copy.deepcopy(critic)
    for module in (parts.embedding, parts.lstm, parts.head):
        module.double()
    num_steps, num_envs = window.ends.shape
    batch_first = parts.lstm.batch_first

    def step(obs: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        x = parts.embedding(obs.double()).unsqueeze(1 if batch_first else 0)
        out, state = parts.lstm(x, state)
        return parts.head(out.squeeze(1 if batch_first else 0)).squeeze(-1), state

    state = (torch.zeros(1, num_envs, parts.lstm.hidden_size, dtype=torch.float64),) * 2
    values, following = [], []
    with torch.no_grad():
        for t in range(num_steps):
            value, state = step(window.roots[t], state)
            values.append(value)
            following.append(step(window.finals[t], state)[0])
            keep = window.done[t].logical_not().view(1, -1, 1)
            state = (state[0] * keep, state[1] * keep)
    advantages, last = torch.zeros(num_steps, num_envs, dtype=torch.float64), torch.zeros(num_envs)
    for t in reversed(range(num_steps)):
        going, inside = 1 - window.terminated[t].double(), 1 - window.done[t].double()
        delta = window.rewards[t].double() + GAMMA * going * following[t] - values[t]
        last = delta + GAMMA * LAMBDA * inside * last
        advantages[t] = last
    return advantages, torch.stack(values)


def measure(name: str, ends: Tensor) -> float:
    contestant = VARIANTS[name](ENVS, STEPS, OBS, ACT, HIDDEN)
    window = make_window(ends, num_obs=OBS)
    contestant.collect(window)
    with torch.no_grad():
        scale = 1 / reference(window, contestant.critic())[1].std()
        output = [layer for layer in contestant.critic().head.modules() if isinstance(layer, nn.Linear)][-1]
        for parameter in output.parameters():
            parameter.mul_(scale)
    contestant.collect(window)
    return float((contestant.advantages() - reference(window, contestant.critic())[0]).abs().max())


def shown(error: float) -> str:
    return f"{error:.0e}" if error < 1e-3 else f"{error:.2f}"


def table(errors: dict[str, dict[str, float]]) -> str:
    names = list(next(iter(errors.values())))
    rows = [f"| | {' | '.join(names)} |", "|--" * (len(names) + 1) + "|"]
    for case, row in errors.items():
        rows.append(f"| {case} | {' | '.join(shown(row[name]) for name in names)} |")
    return "\n".join(rows)


def draw(errors: dict[str, dict[str, float]], path: Path) -> None:
    """A heat map: libraries across, cases down."""
    names, kinds = list(next(iter(errors.values()))), list(errors)
    values = torch.tensor([[errors[case][name] for name in names] for case in kinds]).clamp(min=1e-7).log10()
    figure, axis = plt.subplots(figsize=(9.5, 3.6))
    axis.imshow(values, cmap="RdYlGn_r", vmin=-7, vmax=1, aspect="auto")
    axis.set_xticks(range(len(names)), names, rotation=20, ha="right", fontsize=8)
    axis.set_yticks(range(len(kinds)), kinds, fontsize=8)
    for y, case in enumerate(kinds):
        for x, name in enumerate(names):
            axis.text(x, y, shown(errors[case][name]), ha="center", va="center", fontsize=7)
    axis.set_title("largest error of an advantage, values of standard deviation 1", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--contestants", nargs="+", choices=VARIANTS, default=[n for n in VARIANTS if "2 LSTMs" not in n]
    )
    parser.add_argument("--output", type=Path, help="JSON file for the results; the picture goes beside it")
    args = parser.parse_args()
    errors = {case: {name: measure(name, ends) for name in args.contestants} for case, ends in cases().items()}
    print(table(errors))
    if args.output:
        sizes = {"envs": ENVS, "steps": STEPS, "hidden": HIDDEN, "gamma": GAMMA, "gae_lambda": LAMBDA}
        versions = {package: version(package) for package in sorted(PACKAGES)}
        args.output.write_text(json.dumps({"environment": sizes | versions, "results": errors}, indent=1) + "\n")
        draw(errors, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
