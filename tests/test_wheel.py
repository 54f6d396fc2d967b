"""The wheel: builds, brings its data files, installs beside no checkout, and trains there."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "examples" / "isaaclab_rnn_ppo"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["uv", "build", "--wheel", "--quiet", "--out-dir", folder, ROOT], check=True, timeout=120)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_presets_and_type_marker(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    data = [path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".yaml") or path.name == "py.typed"]
    assert len(data) > 40
    assert {f"isaaclab_rnn_ppo/{path.relative_to(PACKAGE)}" for path in data} <= inside


@pytest.mark.slow
@pytest.mark.isaac
def test_the_wheel_trains_outside_the_checkout(wheel, tmp_path):
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"], check=True, timeout=60)
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, wheel], check=True, timeout=500)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    settings = ["--iterations", "2", "--task", "Isaac-Cartpole", "--num-envs", "32", "--device", "cpu"]
    run = subprocess.run(
        [python, "-m", "isaaclab_rnn_ppo.train", *settings],
        cwd=tmp_path,
        env=env,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "iteration 2/2" in run.stdout and "hidden_size: 64" in run.stdout  # the preset's, 256 without it
    (checkpoint,) = (tmp_path / "runs" / "Isaac-Cartpole").glob("*/checkpoints/*.pt")
    assert checkpoint.name == "iteration_0000002.pt"
    assert str(ROOT) not in subprocess.run(
        [python, "-c", "import isaaclab_rnn_ppo; print(isaaclab_rnn_ppo.__file__)"],
        cwd=tmp_path, env=env, check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
