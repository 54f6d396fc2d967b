"""Bytes that a transition takes, counted from each library's storage after a rollout; and the peak of a learning phase.

    uv sync --group peers
    PYTHONPATH=tests python benchmarks/memory.py --output benchmarks/results/memory.json

Sizes as in `learner.py`: observations 60, actions 8, H 256, T 32, N 64. Counted is the memory behind everything that a
library keeps of a rollout until its update ends, each storage once (`Contestant.storages` in `peers.py`). This suite
and TorchRL compute values and advantages in the learner; what that adds, 12 bytes, is counted as well. This suite
stands twice: with the boundary slots that this window with its many time-outs needs to be exact throughout, and with
train.py's default of 2, which hold the window's end and one time-out inside it.

The peak, with --peak, is what a phase (advantages, 3 epochs of 4 minibatches) adds at most to a process that holds the
rollout and has learned once from a small one: resident memory, each library in a process of its own. Results are added
to the output, and replace those of the same library.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import matplotlib
import numpy as np
import torch
from machine import added_peak_bytes
from peers import CONTESTANTS, PACKAGES, Contestant, Ours, TorchRl, make_window, random_ends

matplotlib.use("Agg")
import matplotlib.pyplot as plt

OBS, ACT = 60, 8
ADVANTAGE_BYTES = 3 * 4
"""Value, value target and advantage of a transition, float32."""


class OursTwoSlots(Ours):
    boundary_slots = 2


VARIANTS: dict[str, type[Contestant]] = {"ours, 2 slots": OursTwoSlots} | CONTESTANTS


def storage_bytes(contestant: Contestant) -> int:
    """Of all storages, each once, a view counted as what it is a view of."""
    sizes: dict[int, int] = {}
    for value in contestant.storages():
        if isinstance(value, np.ndarray):
            while isinstance(value.base, np.ndarray):
                value = value.base
            sizes[value.__array_interface__["data"][0]] = value.nbytes
        else:
            storage = value.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def measure(name: str, *, num_envs: int, num_steps: int, hidden: int) -> dict[str, float]:
    contestant = VARIANTS[name](num_envs, num_steps, OBS, ACT, hidden)
    contestant.collect(make_window(random_ends(num_envs, num_steps), num_obs=OBS))
    rollout = storage_bytes(contestant) / (num_envs * num_steps)
    added = ADVANTAGE_BYTES if isinstance(contestant, Ours | TorchRl) else 0
    return {
        "num_lstms": contestant.num_lstms,
        "rollout": round(rollout, 1),
        "with_advantages": round(rollout + added, 1),
    }


def peak_bytes(name: str, *, num_envs: int, num_steps: int, hidden: int) -> int:
    """Of one learning phase in this process."""

    def ready(envs: int) -> Contestant:
        contestant = VARIANTS[name](envs, num_steps, OBS, ACT, hidden)
        contestant.collect(make_window(random_ends(envs, num_steps), num_obs=OBS))
        contestant.prepare()
        return contestant

    ready(8).learn()
    contestant = ready(num_envs)
    return added_peak_bytes(contestant.learn)


def draw(results: dict[str, dict[str, float]], path: Path) -> None:
    names = sorted(results, key=lambda name: results[name]["with_advantages"])
    figure, axis = plt.subplots(figsize=(6, 2.8))
    bars = axis.barh(names, [results[name]["with_advantages"] for name in names], color="#c8803c")
    for bar, name in zip(bars, names, strict=True):
        if name.startswith("ours"):
            bar.set_color("#2a7ab9")
    axis.bar_label(bars, fmt="%.0f", padding=2, fontsize=8)
    axis.margins(x=0.12)
    axis.invert_yaxis()
    axis.set_xlabel("bytes a transition")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=64, help="envs N")
    parser.add_argument("--steps", type=int, default=32, help="window length T, steps")
    parser.add_argument("--hidden", type=int, default=256, help="hidden units H")
    parser.add_argument("--peak", action="store_true", help="measure the peak of a learning phase as well")
    parser.add_argument("--contestants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--output", type=Path, help="JSON file for the results; the picture goes beside it")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(2)
    sizes = {"num_envs": args.envs, "num_steps": args.steps, "hidden": args.hidden}
    if args.child:
        print(peak_bytes(args.child, **sizes))
        return
    results = json.loads(args.output.read_text())["results"] if args.output and args.output.exists() else {}
    for name in args.contestants:
        row = results[name] = measure(name, **sizes)
        if not args.peak:
            continue
        flags = ["--envs", str(args.envs), "--steps", str(args.steps), "--hidden", str(args.hidden)]
        command = [sys.executable, __file__, *flags, "--child", name]
        row["peak_mib"] = round(int(subprocess.check_output(command, text=True).split()[-1]) / 2**20)
    columns = {
        "num_lstms": "LSTMs",
        "rollout": "bytes a transition",
        "with_advantages": "with values and advantages",
        "peak_mib": "peak of a phase, MiB",
    }
    print(f"| | {' | '.join(columns.values())} |", "|--" * (len(columns) + 1) + "|", sep="\n")
    for name, row in results.items():
        print(f"| {name} | {' | '.join(f'{row[key]:,.0f}' if key in row else '' for key in columns)} |")
    if args.output:
        versions = {package: version(package) for package in sorted(PACKAGES)}
        args.output.write_text(json.dumps({"environment": sizes | versions, "results": results}, indent=1) + "\n")
        draw(results, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
