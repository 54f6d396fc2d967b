"""Exported policies against the training policy, run by fresh processes that know nothing of this suite.

Shapes: T steps, N envs.
"""

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from isaaclab_rnn_ppo import export as export_script
from isaaclab_rnn_ppo.train import model_factory
from isaaclab_rnn_ppo.utils import make_loss, parse_args, save_checkpoint
from isaaclab_rnn_ppo.utils.export import DeployablePolicy, export_policy, make_metadata
from isaaclab_rnn_ppo.utils.restore import open_checkpoint, restore_actor
from isaaclab_rnn_ppo.utils.task_info import specs_of
from tensordict import TensorDict
from torchrl.envs.utils import ExplorationType, set_exploration_type

NUM_OBS, NUM_ACTIONS, T = 7, 3, 200
BATCHES = (1, 64)
FORMATS = ("onnx", "torchscript", "pt2")
VARIANTS = {
    "lstm1": ["--rnn", "lstm"],
    "lstm2": ["--rnn", "lstm", "--num-layers", "2"],
    "gru1": ["--rnn", "gru"],
    "gru2": ["--rnn", "gru", "--num-layers", "2"],
    "none": ["--rnn", "none", "--action-dist", "tanh_normal", "--head-hidden", "8"],
}
TASK_INFO = {
    "observation_sizes": {"policy": NUM_OBS},
    "num_actions": NUM_ACTIONS,
    "observation_terms": [{"name": "joint_pos", "size": 4}, {"name": "joint_vel", "size": 3, "scale": 0.2}],
    "action_terms": [
        {"name": "legs", "size": 3, "joints": ["a", "b", "c"], "scale": 7.5, "offset": 0.0, "clip": None},
    ],
    "robots": {"robot": ["a", "b", "c"]},
    "control_period_s": 1 / 60,
    "max_episode_steps": 300,
}
EXTENSIONS = {"onnx": "onnx", "torchscript": "ts", "pt2": "pt2"}

# What a deploying process runs: `sys.argv` is a folder, then the modules that it must not have imported.
DEPLOY = """
import json, pathlib, sys
import numpy as np
{load}
folder = pathlib.Path(sys.argv[1])
for file in sorted(folder.glob("*.{extension}")):
    run, metadata = load(str(file))
    assert json.loads(metadata) == json.loads(pathlib.Path(str(file) + ".json").read_text())
    states = {{name: shape for name, shape in json.loads(metadata)["inputs"].items() if name != "observation"}}
    for case in sorted(folder.glob(f"{{file.stem}}.*.npz")):
        inputs = np.load(case)
        actions = []
        state = [np.zeros([inputs["observation"].shape[1], *shape[1:]], np.float32) for shape in states.values()]
        for observation, is_init in zip(inputs["observation"], inputs["is_init"]):
            for part in state:
                part[is_init] = 0.0
            action, *state = [np.asarray(part).copy() for part in run(observation, *state)]
            actions.append(action)
        np.save(case.with_suffix(".{extension}.npy"), np.stack(actions))
found = [name for name in sys.argv[2:] if name in sys.modules]
assert not found, found
"""
LOAD = {
    "onnx": """
import onnxruntime
def load(path):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]
    metadata = session.get_modelmeta().custom_metadata_map["metadata.json"]
    return lambda *inputs: session.run(None, dict(zip(names, inputs))), metadata
""",
    "torchscript": """
import torch
def load(path):
    extra = {"metadata.json": ""}
    module = torch.jit.load(path, _extra_files=extra)
    return lambda *inputs: module(*map(torch.from_numpy, inputs)), extra["metadata.json"]
""",
    "pt2": """
import torch
def load(path):
    extra = {"metadata.json": ""}
    module = torch.export.load(path, extra_files=extra).module()
    return lambda *inputs: module(*map(torch.from_numpy, inputs)), extra["metadata.json"]
""",
}


def make_checkpoint(*argv: str) -> dict:
    """A checkpoint of ``train.py`` with random weights, a used normaliser and actions of order 1."""
    settings = ["--task", "Isaac-Cartpole", "--device", "cpu", "--hidden-size", "16", "--actor-hidden", "16"]
    args = parse_args([*settings, "--normalize-obs", *argv])
    torch.manual_seed(0)
    models = model_factory(args)(**specs_of(TASK_INFO))
    models.normalizers[0][1].update(torch.randn(500, NUM_OBS) * torch.arange(1, NUM_OBS + 1) + 5)
    with torch.no_grad():
        for name, parameter in models.actor.named_parameters():
            parameter.mul_(150 if "mean" in name and len(parameter) == NUM_ACTIONS else 2)
    loss = make_loss(actor=models.actor, value_head=models.value_head)
    return {
        "model": loss.state_dict(),
        "iteration": 60,
        "frames": 1000,
        "config": vars(args),
        "task_info": TASK_INFO,
    }


@torch.no_grad()
def training_actions(checkpoint: dict, observation: torch.Tensor, is_init: torch.Tensor) -> torch.Tensor:
    """The training policy [T, N, A] on observations [T, N, obs], stepped as a collector steps it."""
    args = Namespace(**checkpoint["config"])
    models = model_factory(args)(**specs_of(TASK_INFO))
    make_loss(actor=models.actor, value_head=models.value_head).load_state_dict(checkpoint["model"])
    n = observation.shape[1]
    states = {key: torch.zeros(n, args.num_layers, args.hidden_size) for key in models.actor.in_keys if "state" in key}
    actions = []
    for step, init in zip(observation, is_init, strict=True):
        inputs = {"policy": step, "is_init": init.unsqueeze(-1)} | states
        with set_exploration_type(ExplorationType.DETERMINISTIC):
            out = models.actor(TensorDict(inputs, [n]))
        states = {key: out["next", key] for key in states}
        actions.append(out["action"])
    return torch.stack(actions)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    """A folder with every variant as ``VARIANT.FORMAT`` and its cases ``VARIANT.N.npz``."""
    folder = tmp_path_factory.mktemp("exported")
    generator = torch.Generator().manual_seed(1)
    for variant, argv in VARIANTS.items():
        checkpoint = make_checkpoint(*argv)
        save_checkpoint(folder / f"{variant}.pt", checkpoint)
        for extension, format in zip(EXTENSIONS.values(), FORMATS, strict=True):
            out = str(folder / f"{variant}.{extension}")
            export_script.main(["--checkpoint", str(folder / f"{variant}.pt"), "--format", format, "--out", out])
        for n in BATCHES:
            observation = torch.randn(T, n, NUM_OBS, generator=generator) * 8 + 5
            is_init = torch.rand(T, n, generator=generator) < 0.05
            actions = training_actions(checkpoint, observation, is_init)
            arrays = {"observation": observation, "is_init": is_init, "actions": actions}
            np.savez(folder / f"{variant}.{n}.npz", **{key: value.numpy() for key, value in arrays.items()})
    return folder


@pytest.mark.parametrize("format", FORMATS)
def test_a_fresh_process_tracks_the_training_policy(exported, format):
    code = DEPLOY.format(load=LOAD[format], extension=EXTENSIONS[format])
    forbidden = ["torchrl", "tensordict", "isaaclab", "isaaclab_rnn_ppo", *(["torch"] if format == "onnx" else [])]
    subprocess.run([sys.executable, "-c", code, str(exported), *forbidden], check=True, timeout=120)
    for variant in VARIANTS:
        for n in BATCHES:
            wanted = np.load(exported / f"{variant}.{n}.npz")
            got = np.load(exported / f"{variant}.{n}.{EXTENSIONS[format]}.npy")
            assert got.shape == (T, n, NUM_ACTIONS)
            assert wanted["actions"].std() > 0.1, "the case tells nothing"
            worst = np.abs(got - wanted["actions"]).max()
            print(f"{format} {variant} N {n}: {worst:.1e}")
            assert worst <= 1e-5, f"{variant}, N {n}"


@pytest.mark.parametrize("variant", ["lstm2", "gru1"])
def test_the_reference_notices_a_lost_reset_and_a_lost_normaliser(exported, variant):
    """The cases above can fail: without resets, and without statistics, actions differ by far more than 1e-5."""
    case = np.load(exported / f"{variant}.64.npz")
    observation, is_init = torch.from_numpy(case["observation"]), torch.from_numpy(case["is_init"])
    checkpoint = open_checkpoint(exported / f"{variant}.pt")
    without_reset = training_actions(checkpoint, observation, torch.zeros_like(is_init))
    assert np.abs(without_reset.numpy() - case["actions"]).max() > 1e-2
    key = "actor_network.module.0.module.0.module.0.mean"
    checkpoint["model"][key] = torch.zeros_like(checkpoint["model"][key])
    without_statistics = training_actions(checkpoint, observation, is_init)
    assert np.abs(without_statistics.numpy() - case["actions"]).max() > 1e-2


def test_metadata(exported):
    metadata = json.loads((exported / "lstm2.onnx.json").read_text())
    assert metadata["task"] == "Isaac-Cartpole" and metadata["iteration"] == 60 and metadata["cell"] == "lstm"
    assert metadata["format_version"] == 1 and metadata["suite_version"]
    state = [None, 2, 16]
    assert metadata["inputs"] == {"observation": [None, NUM_OBS], "h": state, "c": state}
    assert metadata["outputs"] == {"action": [None, NUM_ACTIONS], "next_h": state, "next_c": state}
    for key in ("observation_terms", "action_terms", "robots", "control_period_s"):
        assert metadata[key] == TASK_INFO[key]
    assert json.loads((exported / "gru1.ts.json").read_text())["inputs"].keys() == {"observation", "h"}
    assert json.loads((exported / "none.pt2.json").read_text())["inputs"].keys() == {"observation"}


def test_a_wrong_export_is_refused(exported, tmp_path, monkeypatch):
    """An export whose file computes something else is found and not left behind."""
    checkpoint = open_checkpoint(exported / "gru1.pt")
    policy = DeployablePolicy(restore_actor(checkpoint, model_factory), squash=False)
    other = DeployablePolicy(restore_actor(checkpoint, model_factory), squash=True)
    monkeypatch.setattr("isaaclab_rnn_ppo.utils.export._load", lambda path, format: other)
    out = tmp_path / "wrong.ts"
    with pytest.raises(RuntimeError, match="is off by"):
        export_policy(policy, out, format="torchscript", metadata=make_metadata(policy, checkpoint))
    assert not out.exists()


README = Path(__file__).parent.parent / "examples" / "isaaclab_rnn_ppo" / "README.md"


def test_the_deploy_loop_of_the_readme_runs(exported, tmp_path):
    (loop,) = re.findall(r"```python\n(# deploy\.py.*?)```", README.read_text(), re.DOTALL)
    (tmp_path / "policy.onnx").write_bytes((exported / "lstm2.onnx").read_bytes())
    end = "\nimport sys\nassert not {'torch', 'torchrl', 'isaaclab'} & set(sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", loop + end], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert "legs" in done.stdout


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--checkpoint", "{dir}/lstm1.pt", "--task", "Isaac-Ant"], ["Isaac-Cartpole", "Isaac-Ant"]),
        (["--checkpoint", "{tmp}/truncated.pt"], ["truncated.pt", "not a readable checkpoint"]),
        (["--checkpoint", "{dir}/lstm1.onnx"], ["lstm1.onnx", "not a readable checkpoint"]),
        (["--checkpoint", "{tmp}/other.pt"], ["other.pt", "not a checkpoint"]),
        (["--checkpoint", "{tmp}/old.pt"], ["old.pt", "task_info"]),
        (["--checkpoint", "{tmp}/shapes.pt"], ["log_std", "[3]", "[4]"]),
        (["--checkpoint", "{tmp}/nowhere"], ["nowhere", "neither a checkpoint file nor a run folder"]),
        (["--checkpoint", "best", "--log-dir", "{tmp}"], ["best", "--eval-interval"]),
        (["--checkpoint", "{dir}/lstm1.pt", "--format", "tflite"], ["--format", "tflite", "torchscript"]),
        (["--checkpoint", "{dir}/lstm1.pt", "--out", "{tmp}"], ["--out", "Is a directory"]),
        (["--checkpoint", "{dir}/lstm1.pt", "--out", "{tmp}/truncated.pt/policy"], ["--out", "cannot be written"]),
        ([], ["--checkpoint"]),
    ],
)
def test_a_mistake_is_one_message_and_code_2(argv, parts, exported, tmp_path, capsys):
    whole = (exported / "lstm1.pt").read_bytes()
    (tmp_path / "truncated.pt").write_bytes(whole[: len(whole) // 2])
    torch.save({"weights": torch.zeros(3)}, tmp_path / "other.pt")
    checkpoint = make_checkpoint("--rnn", "lstm")
    save_checkpoint(tmp_path / "old.pt", {key: value for key, value in checkpoint.items() if key != "task_info"})
    save_checkpoint(tmp_path / "shapes.pt", checkpoint | {"task_info": TASK_INFO | {"num_actions": 4}})
    argv = [part.format(dir=exported, tmp=tmp_path) for part in argv]
    defaults = {"--format": "onnx", "--out": str(tmp_path / "out.onnx")}
    argv += [part for flag, value in defaults.items() if flag not in argv for part in (flag, value)]
    with pytest.raises(SystemExit) as end:
        export_script.main(argv)
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("export.py: error: ") and message.count("\n") == 1
    assert all(part in message for part in parts), message


def test_latest_and_best_choose_by_time(exported, tmp_path, capsys):
    checkpoint = make_checkpoint()
    names = ["a/checkpoints/iteration_0000010.pt", "b/checkpoints/iteration_0000005.pt", "b/checkpoints/best.pt"]
    for k, name in enumerate(names):
        save_checkpoint(tmp_path / "Isaac-Cartpole" / name, checkpoint | {"iteration": k})
    settings = ["--log-dir", str(tmp_path), "--format", "torchscript", "--out", str(tmp_path / "policy.ts")]
    for name, iteration in {"latest": 1, "best": 2, str(tmp_path / "Isaac-Cartpole" / "a"): 0}.items():
        export_script.main(["--checkpoint", name, *settings])
        assert f"iteration {iteration})" in capsys.readouterr().out
