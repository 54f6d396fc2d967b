"""Does a long run grow? Memory and open files of the learner and its worker over ``train.py``.

    python benchmarks/soak.py --iterations 2000 --output benchmarks/results/soak.json

What follows ``--`` goes to ``train.py``. The figures at the end are compared with those of iteration 200: the resident
memory of either process may be 5 % larger and no more, and no file may be open that was not. Exit code 1 if it is.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = Path(__file__).parent.parent / "examples" / "isaaclab_rnn_ppo" / "train.py"
SETTINGS = "--task Isaac-Cartpole --device cpu --num-envs 64 --rollout-steps 16 --num-epochs 1 --num-minibatches 1"
REFERENCE, TOLERANCE = 200, 1.05


def processes(learner: int) -> dict[str, int]:
    children = Path(f"/proc/{learner}/task/{learner}/children").read_text().split()
    worker = next(pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text())
    return {"learner": learner, "worker": int(worker)}


def measure(pid: int) -> dict[str, int]:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {"rss_kib": int(status["VmRSS"].split()[0]), "open_files": len(os.listdir(f"/proc/{pid}/fd"))}


def last_iteration(log_dir: Path) -> int:
    for path in log_dir.glob("*/*/metrics.csv"):
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        return int(rows[-1]["iteration"]) if rows else 0
    return 0


def soak(iterations: int, every: int, flags: list[str]) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TRAIN), *SETTINGS.split(), "--iterations", str(iterations), "--log-dir", folder]
        run = subprocess.Popen([*command, *flags], stdout=subprocess.DEVNULL)
        samples, start = [], time.monotonic()
        while run.poll() is None:
            time.sleep(0.2)
            iteration = last_iteration(Path(folder))
            # Not the very last: the processes are on their way out then.
            if iteration >= every * (len(samples) + 1) and iteration < iterations:
                figures = {name: measure(pid) for name, pid in processes(run.pid).items()}
                samples.append({"iteration": iteration, "seconds": round(time.monotonic() - start), **figures})
                print(samples[-1], flush=True)
    if run.returncode:
        raise SystemExit(f"train.py ended with {run.returncode}")
    return {"command": " ".join([SETTINGS, "--iterations", str(iterations), *flags]), "samples": samples}


def verdict(samples: list[dict]) -> list[str]:
    """What grew between ``REFERENCE`` and the last sample."""
    before, after = next(s for s in samples if s["iteration"] >= REFERENCE), samples[-1]
    grown = []
    for name in ("learner", "worker"):
        if after[name]["rss_kib"] > TOLERANCE * before[name]["rss_kib"]:
            grown.append(f"{name}: {before[name]['rss_kib']} KiB became {after[name]['rss_kib']} KiB")
        num_open = min(
            sample[name]["open_files"] for sample in samples[-5:]
        )  # tensors on their way are open for a moment
        if num_open > before[name]["open_files"]:
            grown.append(f"{name}: {before[name]['open_files']} open files became {num_open}")
    return grown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=2000, help="above 400 (default: %(default)s)")
    parser.add_argument("--every", type=int, default=50, help="iterations between samples (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON file for the samples")
    parser.add_argument("flags", nargs="*", help="for train.py, behind --")
    args = parser.parse_args()
    result = soak(args.iterations, args.every, args.flags) | {
        "machine": f"{platform.processor()}, {os.cpu_count()} cores"
    }
    result["grown"] = verdict(result["samples"])
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit("\n".join(result["grown"]) or None)


if __name__ == "__main__":
    main()
