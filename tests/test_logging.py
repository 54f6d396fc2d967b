"""What is logged where, and what may fail without a run failing."""

import csv
import subprocess

import pytest
from isaaclab_rnn_ppo.utils.logging import MetricsCsv, make_torchrl_logger


@pytest.fixture
def run_dir(tmp_path):
    folder = tmp_path / "package:Isaac-Task" / "20260101-000000-0"
    folder.mkdir(parents=True)
    return folder


def test_a_resumed_run_is_the_same_run_of_wandb(run_dir, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for _ in range(2):
        logger = make_torchrl_logger("wandb", run_dir)
        assert logger.experiment.id == "package-Isaac-Task-20260101-000000-0"
        logger.experiment.finish()


@pytest.mark.slow
def test_wandb_without_its_server_is_offline(run_dir, monkeypatch):
    settings = {"API_KEY": "a" * 40, "BASE_URL": "http://127.0.0.1:9", "INIT_TIMEOUT": "3", "SILENT": "true"}
    for name, value in settings.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    with pytest.warns(UserWarning, match=r"--logger wandb: .*; offline instead, `wandb sync` sends it later$"):
        logger = make_torchrl_logger("wandb", run_dir)
    logger.log_metrics({"x": 1.0}, step=1)
    logger.experiment.finish()
    assert list((run_dir / "wandb").glob("offline-run-*"))


def test_rows_wait_for_a_full_disk(tmp_path):
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k", "tmpfs", tmp_path], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        metrics = MetricsCsv(tmp_path / "metrics.csv")
        (tmp_path / "filler").write_bytes(bytes(4096))
        with pytest.warns(UserWarning, match="metrics.csv lacks rows, training goes on: .*No space left"):
            for i in range(300):
                metrics.write({"iteration": i, "value": "x" * 20})
        (tmp_path / "filler").unlink()
        metrics.close()
        with (tmp_path / "metrics.csv").open(newline="") as file:
            iterations = [row["iteration"] for row in csv.DictReader(file)]
        assert len(iterations) >= 150 and iterations[:150] == [str(i) for i in range(150)]
    finally:
        subprocess.run(["umount", tmp_path], check=True)
