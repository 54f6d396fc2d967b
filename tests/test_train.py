"""The recipe end to end on the real simulator, as a user runs it."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

TRAIN = Path(__file__).parent.parent / "examples" / "isaaclab_rnn_ppo" / "train.py"
SIMULATOR = ("isaaclab", "isaaclab_tasks", "newton", "warp", "pxr", "omni")
COLUMNS = [
    "iteration",
    "frames",
    "episode_return",
    "episode_length",
    "fps",
    "collect_s",
    "learn_s",
    "loss_policy",
    "loss_value",
    "entropy",
    "kl",
    "grad_norm",
    "lr",
    "policy_version",
    "bytes_per_transition",
]


def train(*argv: str, check: bool = True) -> subprocess.CompletedProcess:
    """Run train.py's main and fail if the learner has imported the simulator."""
    code = f"""
import sys
sys.argv = [{str(TRAIN)!r}, *{list(argv)!r}]
sys.path.insert(0, {str(TRAIN.parent)!r})
import train

if __name__ == "__main__":
    train.main()
    found = sorted(set({SIMULATOR!r}) & set(sys.modules))
    assert not found, f"the learner imported {{found}}"
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=check)


def rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.isaac
def test_train_and_resume(tmp_path):
    settings = ["--task", "Isaac-Cartpole", "--num-envs", "32", "--no-stagger-episodes", "--device", "cpu"]
    settings += ["--log-dir", str(tmp_path)]
    first = train(*settings, "--iterations", "3", "env.episode_length_s=0.5")
    (run_dir,) = (tmp_path / "Isaac-Cartpole").iterdir()
    assert (run_dir / "config.yaml").is_file()
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["iteration_0000003.pt"]
    table = rows(run_dir)
    assert [row["iteration"] for row in table] == ["1", "2", "3"]
    assert set(COLUMNS) <= set(table[0])
    assert [row["policy_version"] for row in table] == ["1", "2", "3"]
    assert [row["staleness"] for row in table] == ["0", "0", "0"]
    assert float(table[-1]["episode_length"]) == 30  # 0.5 s of 1/60 s steps: every episode times out there
    assert float(table[-1]["Episode_Termination/time_out"]) == 1
    assert "iteration 3/3" in first.stdout and "assets:" in first.stdout
    settings_lines = len((run_dir / "config.yaml").read_text().splitlines())
    # besides them: asset root, run folder, one line an iteration
    assert first.stdout.count("\n") == settings_lines + 5, first.stdout

    train(*settings, "--iterations", "5", "--resume", str(run_dir), "env.episode_length_s=0.5")
    table = rows(run_dir)
    assert [row["iteration"] for row in table] == ["1", "2", "3", "4", "5"]
    assert [row["policy_version"] for row in table] == ["1", "2", "3", "4", "5"]
    assert [int(row["frames"]) for row in table] == [32 * 16 * k for k in range(1, 6)]


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--resume", "{tmp}/damaged.pt"], ["damaged.pt", "not a readable checkpoint"]),
        (["--resume", "{tmp}"], ["neither a checkpoint file nor a run folder"]),
        (["--asset-root", "{tmp}/nowhere"], ["--asset-root", "nowhere"]),
    ],
)
def test_mistakes_known_before_the_simulator_starts(argv, parts, tmp_path):
    (tmp_path / "damaged.pt").write_bytes(b"PK\x03\x04 no checkpoint")
    argv = [part.format(tmp=tmp_path) for part in argv]
    run = train("--task", "Isaac-Cartpole", "--device", "cpu", *argv, check=False)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert all(part in run.stderr for part in parts), run.stderr


@pytest.mark.isaac
@pytest.mark.slow
def test_it_learns_cartpole(tmp_path):
    settings = ["--task", "Isaac-Cartpole", "--num-envs", "256", "--rollout-steps", "16", "--iterations", "60"]
    train(*settings, "--device", "cpu", "--log-dir", str(tmp_path))
    (run_dir,) = (tmp_path / "Isaac-Cartpole").iterdir()
    returns = [float(row["episode_return"]) for row in rows(run_dir)[-10:]]
    assert sum(returns) / len(returns) >= 4.3
