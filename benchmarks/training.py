"""Frames and wall-clock to a mean return, this suite beside rsl_rl's recurrent runner.

    python benchmarks/training.py run ours ours-async rsl_rl --seeds 3 4 5 --output benchmarks/results/training.json
    python benchmarks/training.py show --output benchmarks/results/training.json

Each run is the program that a user starts: train.py with the task's preset, and Isaac Lab's own entry point with the
configuration of `rsl_rl_lstm.py`; same envs, steps, hidden size and cores. `ours-async` has settings of its own for
Isaac-Cartpole (`ASYNC`): shorter windows, since a batch is one window older there, and a larger step. Presets and
these settings were chosen on seeds 0 to 2; seeds 3 and up tell more. Lines of the console are stamped as they
arrive, and the clock starts with the first collected frame: at the first iteration's line, less the time that its
collection and its updates took by the program's own account. The return is each program's mean over the last 100
episodes or a few more.

The threshold is a return of 4.5 on Isaac-Cartpole, where 5 is the most, and of 19.5 on Isaac-Cartpole-Recall, which
went with recall rates of 0.71 to 1 in this suite's runs; without memory they got 11.6 at most (recall.csv).

Processor time that other processes took during a run is counted from /proc; the seconds of a run with more than 0.2
cores of it say nothing, and the table leaves them out. Its frames it keeps, and the processor time of the program
itself, simulator included, which load changes less. Runs are added to the output, and replace those of the same seed.
"""

from __future__ import annotations

import argparse
import contextlib
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
from machine import environment

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parent.parent
TRAIN = ROOT / "examples" / "isaaclab_rnn_ppo" / "train.py"
MAX_FOREIGN_CORES = 0.2
THRESHOLDS = {"Isaac-Cartpole": 4.5, "Isaac-Cartpole-Recall": 19.5}
ASYNC_STEPS = 8
ASYNC = {
    "Isaac-Cartpole": (
        f"--rollout-steps {ASYNC_STEPS} --num-epochs 5 --desired-kl 0.02 --entropy-coeff 0.002 "
        "--max-learning-rate-final 1e-3"
    )
}
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
        "--seed", str(seed), "--device", "cpu",
        *(["--async-collection", *ASYNC.get(task, "").split()] if contestant == "ours-async" else []),
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


def group_seconds(group: int) -> float:
    """Processor time so far of the processes of a process group that are alive."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def end_group(process: subprocess.Popen) -> None:
    """What is left of a run that was broken off."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(contestant: str, *, task: str, num_envs: int, steps: int, iterations: int, seed: int, threads: int) -> dict:
    """Train once; its curve, and the processor time that others took meanwhile."""
    if contestant == "ours-async" and task in ASYNC:
        steps, iterations = ASYNC_STEPS, iterations * steps // ASYNC_STEPS
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
    first = first_cpu = 0.0
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as cleanup:
        process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env=env,
            start_new_session=True,
        )
        cleanup.callback(end_group, process)
        assert process.stdout is not None
        tail: list[str] = []
        for line in process.stdout:
            tail = [*tail[-40:], line]
            if (ended := read(line)) is None:
                continue
            now, cpu = time.monotonic(), group_seconds(process.pid)
            mean, seconds = ended
            if not curve:
                first, first_cpu = now - seconds, cpu
            point = {
                "frames": frames * (len(curve) + 1),
                "wall_s": now - first,
                "cpu_s": cpu - first_cpu,
                "return": mean,
            }
            curve.append({name: round(value, 3) for name, value in point.items()})
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


def to_threshold(run: dict) -> dict[str, float] | None:
    """The first point of the curve at the task's threshold."""
    return next((point for point in run["curve"] if point["return"] >= THRESHOLDS[run["task"]]), None)


def table(runs: list[dict]) -> str:
    columns = ["task", "", "seeds", "frames", "seconds", "processor seconds", "frames/s", "frames/processor second"]
    rows = [f"| {' | '.join(columns)} |", "|--" * len(columns) + "|"]

    def spread(values: list[float], form: str) -> str:
        return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})" if values else "-"

    for task, contestant in sorted({(run["task"], run["contestant"]) for run in runs}):
        mine = [run for run in runs if (run["task"], run["contestant"]) == (task, contestant)]
        quiet = [run for run in mine if run["foreign_cores"] <= MAX_FOREIGN_CORES]
        reached = [point for run in mine if (point := to_threshold(run))]
        in_peace = [point for run in quiet if (point := to_threshold(run))]
        figures = [
            spread([point["frames"] for point in reached], ",.0f"),
            spread([point["wall_s"] for point in in_peace], ".1f"),
            spread([point["cpu_s"] for point in reached], ".1f"),
            spread([run["curve"][-1]["frames"] / run["curve"][-1]["wall_s"] for run in quiet], ",.0f"),
            spread([run["curve"][-1]["frames"] / run["curve"][-1]["cpu_s"] for run in mine], ",.0f"),
        ]
        rows.append(f"| {task} | {contestant} | {len(reached)} of {len(mine)} | {' | '.join(figures)} |")
    loaded = sum(run["foreign_cores"] > MAX_FOREIGN_CORES for run in runs)
    return "\n".join(rows) + (f"\nseconds left out, as loaded: {loaded} of {len(runs)} runs" if loaded else "")


def draw(runs: list[dict], path: Path) -> None:
    """Return over processor time, a line a run, a panel a task."""
    tasks = sorted({run["task"] for run in runs})
    figure, axes = plt.subplots(1, len(tasks), figsize=(5.5 * len(tasks), 3.4), squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        labelled: set[str] = set()
        for run in runs:
            if run["task"] == task:
                name = run["contestant"]
                axis.plot(
                    [point["cpu_s"] for point in run["curve"]],
                    [point["return"] for point in run["curve"]],
                    color=COLOURS[name],
                    label=None if name in labelled else name,
                    linewidth=1.3,
                )
                labelled.add(name)
        axis.axhline(THRESHOLDS[task], color="#999999", linewidth=0.8, linestyle="--")
        axis.set_title(task, fontsize=10)
        axis.set_xlabel("processor seconds since the first iteration, simulator included")
        axis.set_ylabel("mean return")
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "show"])
    parser.add_argument("contestants", nargs="*", help="ours, ours-async, rsl_rl")
    parser.add_argument("--task", choices=THRESHOLDS, default="Isaac-Cartpole")
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=16, help="steps of a rollout that both programs are set to")
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of a process")
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
                print(contestant, seed, to_threshold(new), f"foreign {new['foreign_cores']}", flush=True)
    print(table(runs))
    draw(runs, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
