"""The benchmarks run where the optional libraries are not installed, with those that are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def output_of(script: str, *flags: str) -> list[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, str(ROOT / "benchmarks" / script), *flags]
    return subprocess.run(command, env=env, check=True, capture_output=True, text=True, timeout=300).stdout.splitlines()


@pytest.mark.slow
def test_advantages_are_exact_here_and_not_where_time_outs_are_approximated():
    lines = output_of("bootstrap.py", "--contestants", "ours", "rsl_rl", "torchrl, compact_obs")
    head, _, *table = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|"))
    assert head == ["", "ours", "rsl_rl", "torchrl, compact_obs"]
    assert len(table) == 7
    for case, ours, rsl_rl, compact in table:
        assert float(ours) < 1e-5, case
        assert float(compact) > 0.1, case
        assert (float(rsl_rl) > 0.1) == ("time-out" in case or "reset" in case or "all" in case), case


@pytest.mark.slow
def test_lstm_passes_of_a_learning_phase_are_counted():
    flags = ["--envs", "8", "--steps", "8", "--hidden", "16", "--rounds", "2", "--contestants", "ours", "rsl_rl"]
    one, two = (json.loads(line) for line in output_of("learner.py", *flags) if line.startswith("{"))
    assert 4.0 < one["lstm_passes"]["ours"] <= 4.5  # 3 epochs of T 8 and one pass of T 8 and the boundary slots
    assert two["lstm_passes"]["rsl_rl"] > 6.0  # 3 epochs of two LSTMs, padded, and V of the last observation
