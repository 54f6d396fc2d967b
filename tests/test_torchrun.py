"""train.py under torchrun, two ranks on the CPU: on the tensor env, and on the real simulator.

All of them start many processes: ``pytest -m slow tests/test_torchrun.py``.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from isaaclab_rnn_ppo.utils.checkpoint import checkpoints, load_checkpoint
from test_faults import assert_gone, descendants
from test_resume import NO_SCHEDULE, SCRIPT, SETTINGS, TRAIN, assert_same_run, rows

pytestmark = pytest.mark.slow


@contextmanager
def torchrun(
    folder: Path,
    *argv: str,
    script: Path = SCRIPT,
    options: tuple[str, ...] = (),
    ranks: tuple[str, ...] = ("--standalone", "--nproc-per-node=2"),
) -> Iterator[subprocess.Popen]:
    """Two ranks; what they print goes to ``folder/output``."""
    folder.mkdir(exist_ok=True)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *ranks,
        *options,
        str(script),
    ]
    settings = SETTINGS.split() if script == SCRIPT else []
    with (folder / "output").open("a") as output:
        job = subprocess.Popen(
            [*launch, *settings, "--log-dir", str(folder), *argv],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},  # as SCALING.md says
        )
    try:
        yield job
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def output(folder: Path) -> str:
    return (folder / "output").read_text()


def run_dir(folder: Path) -> Path:
    (found,) = (folder / "Isaac-Cartpole").iterdir()
    return found


def wait_for(folder: Path, job: subprocess.Popen, text: str) -> None:
    while text not in output(folder):
        assert job.poll() is None, output(folder)[-4000:]
        time.sleep(0.05)


def pids_of(rank: int, job: subprocess.Popen) -> list[int]:
    """Children of torchrun, by their environment."""
    children = [int(child) for child in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
    return [c for c in children if f"RANK={rank}".encode() in Path(f"/proc/{c}/environ").read_bytes().split(b"\0")]


def pid_of(rank: int, job: subprocess.Popen) -> int:
    (found,) = pids_of(rank, job)
    return found


def test_a_killed_rank_ends_all_and_the_restart_resumes(tmp_path):
    argv = ["--iterations", "60", "--checkpoint-interval", "1", "env.delay_s=0.01"]
    with torchrun(tmp_path, *argv, options=("--max-restarts=1",)) as job:
        wait_for(tmp_path, job, "iteration 3/")
        before = descendants(job.pid)
        killed_at = time.monotonic()
        os.kill(pid_of(1, job), signal.SIGKILL)
        while "exitcode: -9" not in output(tmp_path):  # torchrun says so when the others have ended
            assert time.monotonic() - killed_at < 60
            time.sleep(0.05)
        assert_gone(before)
        assert job.wait(timeout=200) == 0, output(tmp_path)[-4000:]
    text = output(tmp_path)
    assert "failed (exitcode: -9) local_rank: 1" in text
    assert "rank 0: train.py: error: another rank is gone" in text
    assert text.count(f"run folder: {run_dir(tmp_path)}") == 2
    assert [row["iteration"] for row in rows(run_dir(tmp_path))] == [str(k) for k in range(1, 61)]


def test_a_killed_rank_of_two_nodes_restarts_and_resumes_both(tmp_path):
    """A node is a ``torchrun`` of its own, with one rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        head = f"--rdzv-endpoint=localhost:{free.getsockname()[1]}"
    ranks = ("--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=7", head)
    argv = ["--iterations", "60", "--checkpoint-interval", "1", "env.delay_s=0.01"]
    start = partial(torchrun, tmp_path, *argv, options=("--max-restarts=3",), ranks=ranks)
    with start() as one, start() as other:
        wait_for(tmp_path, one, "iteration 3/")
        (killed,) = [pid for job in (one, other) for pid in pids_of(1, job)]
        os.kill(killed, signal.SIGKILL)
        for job in (one, other):
            assert job.wait(timeout=200) == 0, output(tmp_path)[-4000:]
    assert output(tmp_path).count(f"run folder: {run_dir(tmp_path)}") == 2
    assert [row["iteration"] for row in rows(run_dir(tmp_path))] == [str(k) for k in range(1, 61)]


def test_a_killed_rank_without_restarts_is_named(tmp_path):
    with torchrun(tmp_path, "--iterations", "10000", "env.delay_s=0.01") as job:
        wait_for(tmp_path, job, "iteration 3/")
        before = descendants(job.pid)
        os.kill(pid_of(1, job), signal.SIGKILL)
        assert job.wait(timeout=60) != 0
        assert_gone(before)
    assert "rank      : 1 (local_rank: 1)\n  exitcode  : -9" in output(tmp_path)


def test_a_signal_to_one_rank_stops_all_after_the_same_iteration(tmp_path):
    with torchrun(tmp_path, "--iterations", "10000", "--checkpoint-interval", "10000", "env.delay_s=0.01") as job:
        wait_for(tmp_path, job, "iteration 3/")
        os.kill(pid_of(1, job), signal.SIGTERM)
        job.wait(timeout=60)
    for rank in (0, 1):
        assert f"rank {rank}: stopped by SIGTERM; --resume" in output(tmp_path)
    (path,) = checkpoints(run_dir(tmp_path))
    assert load_checkpoint(path)["iteration"] == int(rows(run_dir(tmp_path))[-1]["iteration"]) >= 3


def test_a_resumed_run_of_two_ranks_is_the_one_that_was_never_interrupted(tmp_path):
    for name, *lengths in (("whole", "8"), ("halves", "4", "8")):
        for length in lengths:
            resume = ["--resume", str(run_dir(tmp_path / name))] if length != lengths[0] else []
            with torchrun(tmp_path / name, "--iterations", length, *NO_SCHEDULE, *resume) as job:
                assert job.wait(timeout=200) == 0, output(tmp_path / name)[-4000:]
    assert_same_run(run_dir(tmp_path / "whole"), run_dir(tmp_path / "halves"))


@pytest.mark.isaac
def test_two_ranks_learn_cartpole_as_one_run(tmp_path):
    """That the ranks hold the same bits after each of the iterations, train.py itself checks."""
    argv = ["--task", "Isaac-Cartpole", "--device", "cpu", "--num-envs", "128", "--iterations", "60"]
    with torchrun(tmp_path, *argv, script=TRAIN) as job:
        assert job.wait(timeout=400) == 0, output(tmp_path)[-4000:]
    table = rows(run_dir(tmp_path))
    assert [int(row["frames"]) for row in table] == [2 * 128 * 16 * k for k in range(1, 61)]
    assert sum(float(row["episode_return"]) for row in table[-10:]) / 10 >= 4.5
