"""Processes that are killed, stopped or told to go, and disks that are full: ``train.py`` on the tensor env.

All of them start processes, again and again: ``pytest -m slow tests/test_faults.py``.
"""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from isaaclab_rnn_ppo.utils.checkpoint import checkpoints, load_checkpoint
from test_resume import assert_same_run, command, rows, train

NUM_ITERATIONS = 150
RUN = ["--iterations", str(NUM_ITERATIONS), "--checkpoint-interval", "1", "--num-epochs", "1", "env.delay_s=0.005"]
RUN += ["--hidden-size", "256"]  # a checkpoint that takes a moment to write


@contextmanager
def process(log_dir: Path, *argv: str, shm: Path | None = None) -> Iterator[subprocess.Popen]:
    """``train.py``, in a process group of its own; its stderr goes to ``log_dir/stderr``.

    Args:
        shm: a folder below /dev/shm that the run sees as /dev/shm.
    """
    log_dir.mkdir(exist_ok=True)
    enter = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"', str(shm)] if shm else []
    with (log_dir / "stderr").open("a") as stderr:
        run = subprocess.Popen(
            [*enter, *command(log_dir, *argv)], stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
    try:
        yield run
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(child) for child in children.read_text().split()] if children.exists() else []
    return found + [grandchild for child in found for grandchild in descendants(child)]


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids: list[int]) -> None:
    """10 s from now at the latest."""
    deadline = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in pids if is_alive(pid)]


def workers(learner: int) -> list[int]:
    """Of its children the spawned ones, not multiprocessing's resource tracker."""
    pids = [pid for pid in descendants(learner) if is_alive(pid)]
    return [pid for pid in pids if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]


def wait_for(condition: Callable[[], object], run: subprocess.Popen, timeout_s: float = 120.0, every_s: float = 0.05):
    """Until ``condition`` holds, or the process has ended."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()) and run.poll() is None:
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(every_s)
    return found


def run_folder(log_dir: Path) -> Path | None:
    return max((log_dir / "Isaac-Cartpole").glob("*"), default=None)


def num_rows(log_dir: Path) -> int:
    folder = run_folder(log_dir)
    return len(rows(folder)) if folder and (folder / "metrics.csv").exists() else 0


def newest(log_dir: Path) -> int:
    """Iteration of the newest checkpoint, which has to be whole; 0 where there is none."""
    found = checkpoints(run_folder(log_dir)) if run_folder(log_dir) else []
    return load_checkpoint(found[-1])["iteration"] if found else 0


@pytest.fixture
def shm():
    """A folder in memory for one run's shared memory, to see what it leaves there."""
    folder = Path("/dev/shm") / f"test_faults_{os.getpid()}"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    folder.mkdir()
    yield folder
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()


def kill_learner(
    log_dir: Path, shm: Path, *, writing: bool = False, delay_s: float = 0.0, started: bool = True
) -> None:
    """Resume, kill it (``started``: after an iteration of its own), and see what is left of it."""
    before = newest(log_dir)
    with process(log_dir, *RUN, "--resume", "auto", shm=shm) as run:
        if started or writing:
            wait_for(lambda: num_rows(log_dir) > before, run)
        time.sleep(delay_s)
        family = descendants(run.pid)
        if writing:
            folder = run_folder(log_dir) / "checkpoints"
            wait_for(lambda: any(name.endswith(".tmp") for name in os.listdir(folder)), run, every_s=0.0)
        assert run.poll() is None, "too late: the run has ended"
        run.kill()
        run.wait()
    unfinished = [path.name for path in run_folder(log_dir).glob("checkpoints/*.tmp")] if run_folder(log_dir) else []
    print(f"killed after iteration {num_rows(log_dir)}, half-written: {unfinished}")
    assert_gone(family)
    assert list(shm.iterdir()) == []
    assert newest(log_dir) >= max(before, num_rows(log_dir) - 1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_a_killed_learner_loses_nothing_but_the_iteration_in_flight(seed, tmp_path, shm):
    """Ten times; four of them while a checkpoint is being written. In the end it is the run without a fault."""
    moments = random.Random(seed)
    kill_learner(tmp_path, shm, started=False, delay_s=moments.uniform(0, 10))
    for writing in (True, False, True, False, False, True, False, True, False):
        kill_learner(tmp_path, shm, writing=writing, delay_s=moments.uniform(0, 1))
    faulty, _ = train(tmp_path, *RUN, "--resume", "auto")
    whole, _ = train(tmp_path / "whole", *RUN)
    assert [row["iteration"] for row in rows(faulty)] == [str(i + 1) for i in range(NUM_ITERATIONS)]
    assert_same_run(faulty, whole)


def strike(log_dir: Path, run: subprocess.Popen, number: signal.Signals, delay_s: float, *, collecting: bool) -> float:
    """Send a worker the signal, and wait for the restart; the seconds that it took."""
    stderr, num_before = log_dir / "stderr", num_rows(log_dir)
    if collecting:  # else while the one before it is still starting
        wait_for(lambda: num_rows(log_dir) > num_before, run)
    time.sleep(delay_s)
    restarts = stderr.read_text().count(": restart ")
    os.kill(random.choice(wait_for(lambda: workers(run.pid), run)), number)
    start = time.monotonic()
    wait_for(lambda: stderr.read_text().count(": restart ") > restarts, run)
    print(f"{number.name} after iteration {num_rows(log_dir)}: noticed after {time.monotonic() - start:.1f} s")
    return time.monotonic() - start


@pytest.mark.slow
def test_killed_and_stopped_workers_are_replaced(tmp_path):
    """Ten are killed, three of them while they start, and one is stopped: every batch is whole and of its version."""
    moments = random.Random(0)
    settings = ["--iterations", "150", "--num-epochs", "1", "--max-worker-restarts", "11", "--worker-timeout", "30"]
    with process(tmp_path, *settings, "--num-collectors", "2", "env.delay_s=0.05") as run:
        wait_for(lambda: num_rows(tmp_path) > 2, run)
        for kill in range(10):
            strike(tmp_path, run, signal.SIGKILL, moments.uniform(0, 2), collecting=kill % 3 != 2)
        assert strike(tmp_path, run, signal.SIGSTOP, 0.0, collecting=True) < 36
        assert run.wait(timeout=300) == 0
    table = rows(run_folder(tmp_path))
    assert [row["iteration"] for row in table] == [row["policy_version"] for row in table]
    assert [int(row["frames"]) for row in table] == [64 * (i + 1) for i in range(150)]
    assert {row["staleness"] for row in table} == {"0"} and table[-1]["worker_restarts"] == "11"
    # The env ends 1 step in 10: an episode that a fault cut short is not counted as one.
    assert 5 < float(table[-1]["episode_length"]) < 20
    # CPython's thread that hands tensors over says so when a worker is gone before it could take one.
    message = (tmp_path / "stderr").read_text()
    assert message.count("Traceback") == len(re.findall(r'Traceback.*\n +File ".*resource_sharer\.py"', message))


@pytest.mark.slow
def test_one_worker_too_many(tmp_path):
    with process(tmp_path, "--iterations", "999", "--max-worker-restarts", "0", "env.delay_s=0.01") as run:
        wait_for(lambda: num_rows(tmp_path) > 2, run)
        os.kill(workers(run.pid)[0], signal.SIGKILL)
        assert run.wait(timeout=60) == 1
    message = (tmp_path / "stderr").read_text()
    assert re.search(r"train.py: error: .*; 0 restarts were allowed .*; --resume .* continues the run", message)
    assert "Traceback" not in message and newest(tmp_path) == num_rows(tmp_path)


@pytest.mark.slow
def test_what_a_worker_raises_is_said(tmp_path):
    _, done = train(tmp_path, "--iterations", "9", "--max-worker-restarts", "1", "env.fail_at=20", code=1)
    reason = "worker 0: RuntimeError: the table ends at step 20"
    assert f"{reason}: restart 1 of 1" in done.stderr
    assert f"train.py: error: {reason}; 1 restarts were allowed (--max-worker-restarts); --resume " in done.stderr
    assert newest(tmp_path) == num_rows(tmp_path) == 4


PHASES = {
    "collection": ["--num-epochs", "1", "env.delay_s=0.5"],
    "update": ["--num-epochs", "100"],
    "compilation": ["--compile", "max-autotune"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 0)])
@pytest.mark.parametrize("phase", PHASES)
def test_told_to_go(phase, number, code, tmp_path):
    """Whatever it is doing: gone within 30 s, and the last whole iteration saved."""
    argv = ["--iterations", "999", "--checkpoint-interval", "500", *PHASES[phase]]
    if phase == "compilation":
        folder, _ = train(tmp_path, "--iterations", "2")
        (folder / "config.yaml").unlink()
        argv += ["--resume", "auto"]
    with process(tmp_path, *argv) as run:
        if phase == "compilation":
            wait_for(lambda: (folder / "config.yaml").exists(), run)
            time.sleep(3.0)
        else:
            wait_for(lambda: num_rows(tmp_path) == 2, run)
            time.sleep(2.0)
        family = descendants(run.pid)
        run.send_signal(number)
        start = time.monotonic()
        assert run.wait(timeout=30) == code
        print(f"{number.name} during {phase}: gone after {time.monotonic() - start:.1f} s")
    assert_gone(family)
    assert newest(tmp_path) == num_rows(tmp_path) >= 2
    message = (tmp_path / "stderr").read_text()
    assert (
        f"stopped by {number.name}; --resume {run_folder(tmp_path)} continues the run." in message
        and "Traceback" not in message
    )


@pytest.mark.slow
def test_a_full_disk_does_not_stop_training(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        with process(disk, *RUN) as run:
            wait_for(lambda: newest(disk) >= 2, run)
            filler = (disk / "filler").open("wb", buffering=0)
            with pytest.raises(OSError, match="No space left"):
                while True:
                    filler.write(bytes(4096))
            saved = newest(disk)
            rows_then = num_rows(disk)
            assert saved > 0 and run.wait(timeout=120) == 0
        assert newest(disk) == saved and num_rows(disk) >= rows_then
        filler.close()
        (disk / "filler").unlink()
        train(disk, *RUN, "--resume", "auto")
        assert newest(disk) == num_rows(disk) == NUM_ITERATIONS
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)


@pytest.mark.parametrize("kind", ["below a file", "read-only"])
def test_an_unwritable_log_folder_is_known_before_the_simulator(kind, tmp_path):
    folder = tmp_path / "logs"
    if kind == "below a file":
        folder.touch()
    else:
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], capture_output=True).returncode:
            pytest.skip("mounting a tmpfs needs root")
    try:
        done = subprocess.run(command(folder), capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        reason = "Not a directory" if kind == "below a file" else "Read-only file system"
        assert re.fullmatch(rf"train.py: error: --log-dir {folder}.*: cannot be written \({reason}\).\n", done.stderr)
    finally:
        if kind == "read-only":
            subprocess.run(["umount", folder], check=True)
