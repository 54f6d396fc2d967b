"""A resumed run is the run that was never interrupted. Shapes: N envs, T steps."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from isaaclab_rnn_ppo.utils.checkpoint import checkpoints, checksum, load_checkpoint, restore_rng
from tensor_env import make_local_collector, make_random_env
from torchrl.checkpoint import GlobalRNGState

SCRIPT = Path(__file__).parent / "train_tensor_env.py"
TRAIN = Path(__file__).parent.parent / "examples" / "isaaclab_rnn_ppo" / "train.py"
SETTINGS = """
    --task Isaac-Cartpole --asset-root bundled --device cpu --num-envs 8 --rollout-steps 8 --num-minibatches 2
    --hidden-size 16 --actor-hidden 16 --normalize-obs --normalize-value --lr-schedule adaptive
"""
TIMINGS = {"fps", "collect_s", "learn_s", "compile_s"}


def command(log_dir: Path, *argv: str) -> list[str]:
    """``train.py`` on the tensor env."""
    return [sys.executable, str(SCRIPT), *SETTINGS.split(), "--log-dir", str(log_dir), *argv]


def train(log_dir: Path, *argv: str, code: int = 0) -> tuple[Path, subprocess.CompletedProcess]:
    """Run it; its folder and its output."""
    done = subprocess.run(command(log_dir, *argv), capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return max((log_dir / "Isaac-Cartpole").iterdir()), done


def rows(run_dir: Path) -> list[dict[str, str]]:
    """Of ``metrics.csv``, without the timings."""
    with (run_dir / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in TIMINGS} for row in csv.DictReader(file)]


# The preset's entropy bonus and learning rate fall over the run, whose length a part of it does not know.
NO_SCHEDULE = ("--entropy-coeff-final", "0.005", "--max-learning-rate-final", "0.005")


def assert_same_run(one: Path, other: Path) -> None:
    assert rows(one) == rows(other)
    states = [load_checkpoint(checkpoints(run_dir)[-1]) for run_dir in (one, other)]
    for key in states[0].keys() - {"config", "workers"}:
        assert checksum(states[0][key]) == checksum(states[1][key]), key
    for a, b in zip(*(state["workers"] for state in states), strict=True):
        assert checksum(a["carrier"]) == checksum(b["carrier"])


def test_a_restored_worker_makes_the_batches_that_it_would_have_made():
    def start(seed):
        torch.manual_seed(seed)
        return make_local_collector(make_random_env(6, end_rate=0.2, log=True), rollout_steps=5)

    collector = start(0)
    rollouts = iter(collector)
    for _ in range(3):
        next(rollouts)
    state = collector.save_worker()
    expected = [next(rollouts).clone() for _ in range(3)]
    assert expected[0]["episodes", "count"].sum() > 0 and expected[0]["initial", "recurrent_state_h"].any()

    other = start(7)
    assert other.restore_worker(state)
    for batch, theirs in zip(expected, other):
        assert batch.keys() == theirs.keys() and (batch == theirs).all()
    fewer = make_local_collector(make_random_env(4), rollout_steps=5)
    assert not fewer.restore_worker(state)
    next(iter(fewer))


def test_random_numbers_of_other_devices_are_left_out():
    state = GlobalRNGState().state_dict()
    expected = torch.rand(3)
    assert restore_rng(state) and torch.equal(torch.rand(3), expected)
    count = torch.cuda.device_count() + 1
    assert not restore_rng(state | {"torch_cuda": [torch.zeros(16, dtype=torch.uint8)] * count})
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_collectors", ["1", "2"])
def test_a_run_and_its_two_halves_are_the_same(tmp_path, num_collectors):
    settings = [*NO_SCHEDULE, "--num-collectors", num_collectors]
    whole, _ = train(tmp_path / "whole", *settings, "--iterations", "8")
    train(tmp_path / "halves", *settings, "--iterations", "4")
    halves, second = train(tmp_path / "halves", *settings, "--iterations", "8", "--resume", "auto")
    assert "new episodes" not in second.stdout
    assert_same_run(whole, halves)


@pytest.mark.slow
def test_another_world_says_what_is_new(tmp_path):
    train(tmp_path, "--iterations", "2")
    _, resumed = train(tmp_path, "--iterations", "3", "--resume", "auto", "--num-envs", "4")
    assert "--resume: new episodes: the checkpoint holds no state of these environments." in resumed.stdout
    _, resumed = train(tmp_path, "--iterations", "4", "--resume", "auto", "--num-collectors", "2")
    assert "--resume: new episodes: the checkpoint holds the state of 1 simulators, not of 2." in resumed.stdout


@pytest.mark.slow
def test_a_run_of_nothing_but_nan_stops_saves_and_says_why(tmp_path):
    settings = ["--iterations", "20", "--num-epochs", "1", "--max-skipped-updates", "5"]
    run_dir, done = train(tmp_path, *settings, "env.nan_from=16", code=1)
    assert "iteration 3: 2 updates skipped: next.reward of env 0 at step 0 is nan" in done.stderr
    assert "iteration 5: 6 updates in a row skipped (--max-skipped-updates 5): next.reward of env 0" in done.stderr
    assert [row["skipped_updates"] for row in rows(run_dir)] == ["0", "0", "2", "2", "2"]
    state = load_checkpoint(checkpoints(run_dir)[-1])
    assert state["iteration"] == 5
    assert all(value.isfinite().all() for value in state["model"].values())
    batch = torch.load(run_dir / "nonfinite_batch.pt", weights_only=True)
    assert batch["steps"]["next"]["reward"].isnan().all()


@pytest.mark.slow
@pytest.mark.isaac
def test_a_resumed_run_on_isaac_lab_goes_on_without_a_dip(tmp_path):
    """Its physics state is not in a checkpoint: the returns go on within three seeds and their spread.

    Once the policy has learned: while it still fails, episodes that all begin anew report their failures first.
    """
    part, whole_run = 40, 60
    settings = ["--task", "Isaac-Cartpole", "--asset-root", "bundled", "--device", "cpu", *NO_SCHEDULE]

    def run(name: str, *argv: str) -> list[dict[str, str]]:
        log_dir = tmp_path / name
        command = [sys.executable, str(TRAIN), *settings, "--log-dir", str(log_dir), *argv]
        subprocess.run(command, capture_output=True, check=True, timeout=300)
        return rows(next((log_dir / "Isaac-Cartpole").iterdir()))

    whole = [run(f"seed {seed}", "--seed", str(seed), "--iterations", str(whole_run)) for seed in range(3)]
    first = run("parts", "--iterations", str(part))
    second = run("parts", "--iterations", str(whole_run), "--resume", "auto")
    assert first == whole[0][:part] == second[:part]
    for name in ("iteration", "frames", "policy_version"):
        assert [row[name] for row in second] == [row[name] for row in whole[0]], name
    for i in range(part, whole_run):
        returns = [float(table[i]["episode_return"]) for table in whole]
        resumed = float(second[i]["episode_return"])
        print(f"iteration {i + 1}: {', '.join(f'{value:.2f}' for value in returns)}; resumed {resumed:.2f}")
        assert resumed >= min(returns) - (max(returns) - min(returns)), i
