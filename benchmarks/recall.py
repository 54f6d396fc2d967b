"""Does memory matter, and is it found? Isaac-Cartpole-Recall with lstm, gru and no recurrent core.

    python benchmarks/recall.py run --seeds 0 1 2      # adds to results/recall.csv and recall_runs.csv
    python benchmarks/recall.py plot                   # results/recall.png from results/recall.csv

Every run is `train.py --task Isaac-Cartpole-Recall` with its preset; only --rnn and --seed differ. A run that is in the
CSV already is replaced.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

RESULTS = Path(__file__).resolve().parent / "results"
TRAIN = Path(__file__).resolve().parent.parent / "examples" / "isaaclab_rnn_ppo" / "train.py"
CURVES, RUNS, PICTURE = RESULTS / "recall.csv", RESULTS / "recall_runs.csv", RESULTS / "recall.png"
COLUMNS = ("frames", "recall_rate", "episode_return", "collect_s", "learn_s")
LAST = 10
"""Iterations that a run's final recall rate is the mean of."""


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def run(rnn: str, seed: int, extra: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TRAIN), "--task", "Isaac-Cartpole-Recall", "--rnn", rnn, "--seed", str(seed)]
        start = time.monotonic()
        subprocess.run([*command, "--log-dir", folder, *extra], check=True, stdout=subprocess.DEVNULL)
        wall_s = time.monotonic() - start
        metrics = read(next(Path(folder).glob("*/*/metrics.csv")))
    key = {"rnn": rnn, "seed": str(seed)}
    curve = [key | {"iteration": row["iteration"]} | {name: row[name] for name in COLUMNS} for row in metrics]
    final = sum(float(row["recall_rate"]) for row in metrics[-LAST:]) / LAST
    machine = f"{os.cpu_count()} CPU cores, {platform.machine()}, torch {torch.__version__}"
    summary = key | {"recall_rate": f"{final:.3f}", "wall_s": f"{wall_s:.0f}", "frames": metrics[-1]["frames"]}
    for path, rows in ((CURVES, curve), (RUNS, [summary | {"machine": machine}])):
        others = [row for row in read(path) if (row["rnn"], row["seed"]) != (rnn, str(seed))]
        write(path, sorted(others + rows, key=lambda row: (row["rnn"], row["seed"], int(row.get("iteration", 0)))))
    print(" ".join(f"{name}={value}" for name, value in summary.items()), flush=True)


def plot() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    colors = {"lstm": "tab:blue", "gru": "tab:green", "none": "tab:red"}
    rows = read(CURVES)
    for rnn, color in colors.items():
        for seed in sorted({row["seed"] for row in rows if row["rnn"] == rnn}):
            curve = [row for row in rows if (row["rnn"], row["seed"]) == (rnn, seed)]
            frames = [float(row["frames"]) / 1e6 for row in curve]
            label = f"--rnn {rnn}" if seed == "0" else None
            axes.plot(frames, [float(row["recall_rate"]) for row in curve], color=color, lw=1, label=label)
    axes.axhline(0.9, color="grey", lw=0.8, ls=":")
    axes.axhline(0.6, color="grey", lw=0.8, ls=":")
    axes.set(
        xlabel="frames (millions)", ylabel="recall_rate", ylim=(0, 1), title="Isaac-Cartpole-Recall, three seeds each"
    )
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "plot"))
    parser.add_argument("--rnn", nargs="+", default=["lstm", "gru", "none"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args, extra = parser.parse_known_args()
    if args.what == "plot":
        plot()
        return
    for seed in args.seeds:
        for rnn in args.rnn:
            run(rnn, seed, extra)


if __name__ == "__main__":
    main()
