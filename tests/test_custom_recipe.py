"""The recipe of one's own, examples/custom_recipe, and the public names that such a recipe is built of."""

import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
from isaaclab_rnn_ppo import utils
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "examples" / "custom_recipe"


@pytest.mark.isaac
def test_custom_recipe_trains(tmp_path):
    """Three iterations: the task's own rewards and the loss's own terms arrive in TensorBoard, and the policy moves."""
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
    assert sum(len(path.read_text().splitlines()) for path in RECIPE.glob("*.py")) < 120


def public_functions() -> dict[str, object]:
    """Every public function, and every method that a public class defines itself."""
    found = {}
    for name in utils.__all__:
        value = getattr(utils, name)
        if inspect.isclass(value):
            methods = vars(value).items()
            found |= {f"{name}.{n}": m for n, m in methods if inspect.isfunction(m) and not n.startswith("_")}
        else:
            found[name] = value
    return found


def test_public_names_are_the_modules_own_and_sorted():
    assert utils.__all__ == sorted(utils.__all__, key=lambda name: (not name.isupper(), name.islower(), name))
    assert all(getattr(utils, name).__module__.startswith("isaaclab_rnn_ppo.") for name in utils.__all__)


@pytest.mark.parametrize("name", utils.__all__)
def test_every_public_name_is_documented(name):
    value = getattr(utils, name)
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert own and own.strip()


@pytest.mark.parametrize("name", public_functions())
def test_every_public_signature_is_typed(name):
    signature = inspect.signature(public_functions()[name])
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in signature.parameters.values():
        if parameter.name != "self" and parameter.kind not in variadic:
            assert parameter.annotation is not inspect.Parameter.empty, parameter.name
    assert signature.return_annotation is not inspect.Signature.empty


@pytest.mark.slow
def test_pyright_finds_nothing():
    done = subprocess.run([sys.executable, "-m", "pyright"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and done.stdout.startswith("0 errors, 0 warnings"), done.stdout
