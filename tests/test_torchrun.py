"""train.py under torchrun on the real simulator, as a user runs it: two ranks on the CPU."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
TRAIN = ROOT / "examples" / "isaaclab_rnn_ppo" / "train.py"

pytestmark = [pytest.mark.isaac, pytest.mark.slow]


def start(folder: Path, *argv: str, torchrun: tuple[str, ...] = ()) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        *torchrun,
        str(TRAIN),
    ]
    settings = ["--task", "Isaac-Cartpole", "--device", "cpu", "--log-dir", str(folder / "runs"), *argv]
    output = (folder / "output").open("w")
    return subprocess.Popen([*command, *settings], stdout=output, stderr=subprocess.STDOUT, cwd=folder)


def rows(folder: Path) -> list[dict[str, str]]:
    (run_dir,) = (folder / "runs" / "Isaac-Cartpole").iterdir()
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def wait_for_checkpoint(folder: Path, job: subprocess.Popen, iteration: int) -> None:
    while not list(folder.glob(f"runs/*/*/checkpoints/iteration_{iteration:07d}.pt")):
        assert job.poll() is None, (folder / "output").read_text()[-4000:]
        time.sleep(0.1)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def rank_of(pid: int) -> str | None:
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((v.decode().removeprefix("RANK=") for v in variables if v.startswith(b"RANK=")), None)


def descendants(pid: int) -> list[int]:
    return [d for child in children(pid) for d in (child, *descendants(child))]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_two_ranks_learn_cartpole_as_one_run(tmp_path):
    """That the ranks hold the same bits after each of the iterations, train.py itself checks."""
    job = start(tmp_path, "--num-envs", "128", "--iterations", "60")
    assert job.wait(timeout=400) == 0, (tmp_path / "output").read_text()[-4000:]
    table = rows(tmp_path)
    assert [int(row["frames"]) for row in table] == [2 * 128 * 16 * k for k in range(1, 61)]
    assert sum(float(row["episode_return"]) for row in table[-10:]) / 10 >= 4.5


def test_a_killed_rank_ends_all_and_the_restart_resumes(tmp_path):
    job = start(
        tmp_path, "--num-envs", "8", "--iterations", "40", "--checkpoint-interval", "1", torchrun=("--max-restarts=1",)
    )
    wait_for_checkpoint(tmp_path, job, 3)
    ranks = {rank_of(pid): pid for pid in children(job.pid)}
    before = [pid for rank in ranks.values() for pid in (rank, *descendants(rank))]
    killed_at = time.monotonic()
    os.kill(ranks["1"], signal.SIGKILL)
    while any(map(running, before)):
        assert time.monotonic() - killed_at < 60, [pid for pid in before if running(pid)]
        time.sleep(0.1)
    assert job.wait(timeout=200) == 0
    output = (tmp_path / "output").read_text()
    assert "failed (exitcode: -9) local_rank: 1" in output
    assert "rank 0: train.py: error: another rank is gone" in output
    assert [int(row["iteration"]) for row in rows(tmp_path)] == list(range(1, 41))
    assert output.count("run folder:") == 2  # the second time it is the first one's


def test_a_rank_that_dies_without_restarts_is_named(tmp_path):
    job = start(tmp_path, "--num-envs", "8", "--iterations", "400", "--checkpoint-interval", "1")
    wait_for_checkpoint(tmp_path, job, 1)
    ranks = {rank_of(pid): pid for pid in children(job.pid)}
    os.kill(ranks["1"], signal.SIGKILL)
    assert job.wait(timeout=60) != 0
    assert "rank      : 1 (local_rank: 1)\n  exitcode  : -9" in (tmp_path / "output").read_text()


def test_a_signal_stops_all_ranks_after_the_same_iteration(tmp_path):
    job = start(tmp_path, "--num-envs", "8", "--iterations", "400", "--checkpoint-interval", "100")
    while not (tmp_path / "output").read_text().count("iteration 3/"):
        assert job.poll() is None
        time.sleep(0.1)
    (rank, *_) = [pid for pid in children(job.pid) if rank_of(pid) == "1"]
    os.kill(rank, signal.SIGTERM)  # one of them only
    job.wait(timeout=60)
    output = (tmp_path / "output").read_text()
    assert all(f"rank {rank}: stopped by SIGTERM; --resume" in output for rank in (0, 1)), output
    (path,) = tmp_path.glob("runs/*/*/checkpoints/*.pt")
    last = torch.load(path, weights_only=False)["iteration"]
    assert last == int(rows(tmp_path)[-1]["iteration"]) >= 3
