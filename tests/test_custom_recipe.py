"""The recipe of one's own: examples/custom_recipe, and the public names that such a recipe is built of."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

RECIPE = Path(__file__).parent.parent / "examples" / "custom_recipe"


@pytest.mark.isaac
def test_custom_recipe_trains(tmp_path):
    """Three iterations; every scalar arrives in TensorBoard, the weights move, and the reward is the task's own."""
    flags = ["--iterations", "3", "--num-envs", "32", "--log-dir", str(tmp_path)]
    subprocess.run([sys.executable, RECIPE / "recipe.py", *flags], check=True, timeout=300)
    events = EventAccumulator(str(tmp_path / "blind_balance"))
    events.Reload()
    values = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert {"loss_policy", "loss_kl", "loss_value", "kl", "Episode_Reward/pole", "Episode_Reward/cart"} <= set(values)
    assert [event.step for event in events.Scalars("kl")] == [1, 2, 3]
    assert all(math.isfinite(value) for tag in ("loss_policy", "loss_value", "grad_norm") for value in values[tag])
    assert min(values["kl"]) > 0


def test_the_recipe_is_short():
    lines = sum(len(path.read_text().splitlines()) for path in RECIPE.glob("*.py"))
    assert lines < 120
