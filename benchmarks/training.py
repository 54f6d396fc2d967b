"""Frames and wall-clock to a mean return, this suite beside rsl_rl's recurrent runner.

    python benchmarks/training.py run ours ours-async rsl_rl --seeds 0 1 2 --output benchmarks/results/training.json
    python benchmarks/training.py show --output benchmarks/results/training.json

Each run is the program that a user starts: train.py with the task's preset, and Isaac Lab's own entry point with the
configuration of `rsl_rl_lstm.py`; same envs, steps, hidden size and cores. Lines of the console are stamped as they
arrive, and the clock starts with the first collected frame: at the first iteration's line, less the time that its
collection and its updates took by the program's own account. The return is each program's mean over the last 100
episodes or a few more.

Processor time that other processes took during a run is counted from /proc; a run with more than 0.2 cores of it is
marked loaded and left out of the table. Runs are added to the output, and replace those of the same seed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib
from isaaclab_rnn_ppo.utils import resolve_asset_root
from learner_phase import environment

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
TRAIN = ROOT / "examples" / "isaaclab_rnn_ppo" / "train.py"
MAX_FOREIGN_CORES = 0.2
COLOURS = {"ours": "#2a7ab9", "ours-async": "#7ab8e0", "rsl_rl": "#c8803c"}


def command(contestant: str, *, task: str, num_envs: int, iterations: int, seed: int) -> list[str]:
    if contestant == "rsl_rl":
        isaaclab = str(Path(sys.executable).with_name("isaaclab"))
        return [
            isaaclab, "train", "--rl_library", "rsl_rl", "--task", task, "--num_envs", str(num_envs),
            "--max_iterations", str(iterations), "--seed", str(seed), "--device", "cpu",
            "--agent", "rsl_rl_lstm_cfg_entry_point", "--external_callback", "rsl_rl_lstm.register", "agent.device=cpu",
        ]  # fmt: skip
    return [
        sys.executable, str(TRAIN), "--task", task, "--num-envs", str(num_envs), "--iterations", str(iterations),
        "--seed", str(seed), "--device", "cpu", *(["--async-collection"] if contestant == "ours-async" else []),
    ]  # fmt: skip


class Ours:
    """Reads the console of train.py: a line an iteration, with speeds for collection and learning."""

    def __init__(self, frames_per_iteration: int):
        self.frames = frames_per_iteration

    def __call__(self, line: str) -> tuple[float, float] | None:
        """The return, and the seconds of the iteration, of a line that ends one."""
        if not line.startswith("iteration "):
            return None
        fields = {name: value.replace(",", "") for name, value in re.findall(r"(\w+(?: fps)?) ([\d.,naninf-]+)", line)}
        return float(fields["return"]), self.frames / float(fields["fps"])


class RslRl:
    """Reads rsl_rl's console: a block an iteration, which ends with an ETA."""

    def __init__(self, frames_per_iteration: int):
        self.seconds, self.mean = 0.0, float("nan")

    def __call__(self, line: str) -> tuple[float, float] | None:
        if found := re.search(r"(Collection|Learning) time: ([\d.]+)s", line):
            self.seconds = float(found[2]) + (self.seconds if found[1] == "Learning" else 0.0)
        if found := re.search(r"Mean reward: (-?[\d.]+)", line):
            self.mean = float(found[1])
        return (self.mean, self.seconds) if "ETA:" in line else None


def busy_seconds() -> float:
    """Processor time of the machine so far, all cores and processes."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def run(contestant: str, *, task: str, num_envs: int, steps: int, iterations: int, seed: int, threads: int) -> dict:
    """Train once; its curve, and the processor time that others took meanwhile."""
    frames = num_envs * steps
    read: Callable[[str], tuple[float, float] | None] = (RslRl if contestant == "rsl_rl" else Ours)(frames)
    argv = command(contestant, task=task, num_envs=num_envs, iterations=iterations, seed=seed)
    asset_root, _ = resolve_asset_root("bundled")
    env = os.environ | {
        "ISAACSIM_ASSET_ROOT": asset_root,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHONUNBUFFERED": "1",
    }
    start, busy, own = time.monotonic(), busy_seconds(), own_seconds()
    curve: list[dict[str, float]] = []
    first = 0.0
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=env, bufsize=1
        )
        assert process.stdout is not None
        tail: list[str] = []
        for line in process.stdout:
            tail = [*tail[-40:], line]
            if (ended := read(line)) is None:
                continue
            now = time.monotonic()
            mean, seconds = ended
            first = first if curve else now - seconds
            curve.append({"frames": frames * (len(curve) + 1), "wall_s": round(now - first, 3), "return": mean})
        if process.wait() or len(curve) < iterations:
            raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}:\n{''.join(tail)}")
    elapsed = time.monotonic() - start
    foreign = (busy_seconds() - busy - (own_seconds() - own)) / elapsed
    shown = " ".join(argv).replace(str(Path(sys.executable).parent) + "/", "").replace(f"{ROOT}/", "")
    return {
        "contestant": contestant,
        "task": task,
        "seed": seed,
        "command": shown,
        "threads": threads,
        "foreign_cores": round(foreign, 3),
        "curve": curve,
    }


def to_threshold(run: dict, threshold: float) -> dict[str, float] | None:
    """The first point of the curve at the threshold."""
    return next((point for point in run["curve"] if point["return"] >= threshold), None)


def table(runs: list[dict], threshold: float) -> str:
    rows = ["| task | | seeds | frames to the threshold | seconds to it | frames/s |", "|--|--|--|--|--|--|"]
    kept = [run for run in runs if run["foreign_cores"] <= MAX_FOREIGN_CORES]
    for task, contestant in sorted({(run["task"], run["contestant"]) for run in kept}):
        mine = [run for run in kept if (run["task"], run["contestant"]) == (task, contestant)]
        reached = [point for run in mine if (point := to_threshold(run, threshold))]

        def spread(values: list[float], form: str) -> str:
            return (
                f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})" if values else "never"
            )

        speeds = [run["curve"][-1]["frames"] / run["curve"][-1]["wall_s"] for run in mine]
        frames, seconds = ([point[key] for point in reached] for key in ("frames", "wall_s"))
        rows.append(
            f"| {task} | {contestant} | {len(reached)} of {len(mine)} | {spread(frames, ',.0f')} | "
            f"{spread(seconds, '.1f')} | {spread(speeds, ',.0f')} |"
        )
    left_out = len(runs) - len(kept)
    return "\n".join(rows) + (f"\nleft out as loaded: {left_out} of {len(runs)} runs" if left_out else "")


def draw(runs: list[dict], threshold: float, path: Path) -> None:
    """Return over wall-clock, a line a run, a panel a task."""
    tasks = sorted({run["task"] for run in runs})
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.5 * len(tasks), 3.4), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        labelled: set[str] = set()
        for run in runs:
            if run["task"] == task and run["foreign_cores"] <= MAX_FOREIGN_CORES:
                name = run["contestant"]
                axis.plot(
                    [point["wall_s"] for point in run["curve"]],
                    [point["return"] for point in run["curve"]],
                    color=COLOURS[name],
                    label=None if name in labelled else name,
                    linewidth=1.3,
                )
                labelled.add(name)
        axis.axhline(threshold, color="#999999", linewidth=0.8, linestyle="--")
        axis.set_title(task, fontsize=10)
        axis.set_xlabel("seconds from the first collected frame")
        axis.set_ylabel("mean return")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("contestants", nargs="*", help="ours, ours-async, rsl_rl")
    parser.add_argument("--task", default="Isaac-Cartpole")
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16, help="steps of a rollout that both programs are set to")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of a process")
    parser.add_argument("--threshold", type=float, default=4.5, help="mean return")
    parser.add_argument("--output", type=Path, required=True, help="JSON file; the picture goes beside it")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    document = json.loads(args.output.read_text()) if args.output.exists() else {"environment": {}, "runs": []}
    runs = document["runs"]
    if args.what == "run":
        sizes = {"num_envs": args.num_envs, "steps": args.steps, "iterations": args.iterations, "threads": args.threads}
        document["environment"] = environment()
        for seed in args.seeds:
            for contestant in args.contestants:
                new = run(contestant, task=args.task, seed=seed, **sizes)
                key = (contestant, args.task, seed)
                runs[:] = [old for old in runs if (old["contestant"], old["task"], old["seed"]) != key] + [new]
                args.output.write_text(json.dumps(document) + "\n")
                print(
                    contestant, seed, to_threshold(new, args.threshold), f"foreign {new['foreign_cores']}", flush=True
                )
    print(table(runs, args.threshold))
    draw(runs, args.threshold, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
