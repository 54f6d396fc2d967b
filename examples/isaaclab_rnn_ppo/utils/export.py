"""A trained policy as one file with explicit state: ONNX, TorchScript or torch.export's pt2.

Shapes: N envs (dynamic), L layers, H hidden, A actions.
"""

from __future__ import annotations

import copy
import importlib.metadata
import io
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.nn import functional as F

from isaaclab_rnn_ppo.utils.models import GaussianHead
from isaaclab_rnn_ppo.utils.normalize import RunningNormalizer
from isaaclab_rnn_ppo.utils.rnn import RecurrentCore

FORMATS = ("onnx", "torchscript", "pt2")
FORMAT_VERSION = 1
METADATA_KEY = "metadata.json"
"""Name of the metadata inside a file: a property of an ONNX model, an extra file of the two others."""

STATE_NAMES = {"lstm": ("h", "c"), "gru": ("h",), "none": ()}
CHECK_STEPS, CHECK_ENVS = 20, 3
CHECK_TOLERANCE = 1e-5


class FixedNormalizer(nn.Module):
    """What a ``RunningNormalizer`` computes with the statistics it has now, in float32."""

    mean: Tensor
    std: Tensor

    def __init__(self, normalizer: RunningNormalizer):
        super().__init__()
        self.clip = normalizer.clip
        self.register_buffer("mean", normalizer.mean.float())
        self.register_buffer("std", normalizer.std.float())

    def forward(self, x: Tensor) -> Tensor:
        return ((x - self.mean) / self.std).clamp(-self.clip, self.clip)


class DeployablePolicy(nn.Module):
    """The deterministic policy: ``(observation, *state) -> (action, *next state)``.

    Only torch inside, and of torch only what every format and runtime has: the cells are written out,
    so that no recurrent operator of a format can read weights in another order.

    The caller keeps the state and zeroes the rows of the envs whose episode begins.

    Args:
        actor: of ``make_models``. Its weights are copied.
        squash: the action is ``tanh`` of the network's output (``tanh_normal``).

    Attributes:
        cell: ``lstm``, ``gru`` or ``none``.
        state_names: ``h`` and ``c``, ``h``, or nothing; each [N, L, H].
    """

    def __init__(self, actor: TensorDictModuleBase, *, squash: bool):
        super().__init__()
        actor = copy.deepcopy(actor).cpu()
        (head,) = (module for module in actor.modules() if isinstance(module, GaussianHead))
        cores = [module for module in actor.modules() if isinstance(module, RecurrentCore)]
        (embedding,) = (
            module.module
            for module in actor.modules()
            if getattr(module, "in_keys", None) == ["policy"] and isinstance(module.module, nn.Sequential)
        )
        self.embedding = nn.Sequential(
            *(FixedNormalizer(layer) if isinstance(layer, RunningNormalizer) else layer for layer in embedding)
        )
        self.head, self.squash = head.mean, squash
        self.cell, self.num_layers, self.hidden_size = "none", 0, 0
        if cores:
            (core,) = cores
            self.cell, self.num_layers, self.hidden_size = core.cell, core.num_layers, core.hidden_size
            for layer in range(core.num_layers):
                for name, weight in zip(("w_ih", "w_hh", "b_ih", "b_hh"), core.flat_weights()[4 * layer :]):
                    self.register_parameter(f"{name}_{layer}", nn.Parameter(weight))
        self.requires_grad_(False)

    @property
    def state_names(self) -> tuple[str, ...]:
        return STATE_NAMES[self.cell]

    def initial_state(self, num_envs: int) -> tuple[Tensor, ...]:
        return tuple(torch.zeros(num_envs, self.num_layers, self.hidden_size) for _ in self.state_names)

    def forward(self, observation: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding(observation)
        next_state: list[list[Tensor]] = [[] for _ in self.state_names]
        for layer in range(self.num_layers):
            new = self._step(layer, x, *(part[:, layer] for part in state))
            for parts, part in zip(next_state, new, strict=True):
                parts.append(part)
            x = new[0]
        action = self.head(x)
        if self.squash:
            action = action.tanh()
        return action, *(torch.stack(parts, 1) for parts in next_state)

    def _step(self, layer: int, x: Tensor, h: Tensor, *c: Tensor) -> tuple[Tensor, ...]:
        w_ih, w_hh, b_ih, b_hh = (getattr(self, f"{name}_{layer}") for name in ("w_ih", "w_hh", "b_ih", "b_hh"))
        from_input, from_state = F.linear(x, w_ih, b_ih), F.linear(h, w_hh, b_hh)
        if self.cell == "lstm":  # Hochreiter and Schmidhuber, 1997; gates in nn.LSTM's order
            i, f, g, o = (from_input + from_state).chunk(4, -1)
            next_c = f.sigmoid() * c[0] + i.sigmoid() * g.tanh()
            return o.sigmoid() * next_c.tanh(), next_c
        # Cho et al., 2014, arXiv:1406.1078, with the reset gate behind the product as in nn.GRU
        (input_r, input_z, input_n), (state_r, state_z, state_n) = from_input.chunk(3, -1), from_state.chunk(3, -1)
        n = (input_n + (input_r + state_r).sigmoid() * state_n).tanh()
        z = (input_z + state_z).sigmoid()
        return ((1 - z) * n + z * h,)


def make_metadata(policy: DeployablePolicy, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """What the deploying side needs, as plain JSON.

    Args:
        checkpoint: of ``train.py``; its ``task_info`` is part of the result.
    """
    config, task = checkpoint["config"], checkpoint["task_info"]
    shape = [None, policy.num_layers, policy.hidden_size]
    states = {name: shape for name in policy.state_names}
    return {
        "format_version": FORMAT_VERSION,
        "suite_version": importlib.metadata.version("isaaclab-rnn-ppo"),
        "task": config["task"],
        "env_overrides": list(config["env_overrides"]),
        "iteration": int(checkpoint["iteration"]),
        "frames": int(checkpoint["frames"]),
        "cell": policy.cell,
        "inputs": {"observation": [None, task["observation_sizes"]["policy"]]} | states,
        "outputs": {"action": [None, task["num_actions"]]} | {f"next_{name}": shape for name in states},
        "reset": "zeros in a row of every state where an episode begins" if states else None,
        "squashed": policy.squash,
        "trained_with_amp": config["amp"],  # the export computes in float32 always
        **{key: task[key] for key in ("observation_terms", "action_terms", "robots", "control_period_s")},
        "max_episode_steps": task["max_episode_steps"],
    }


def export_policy(policy: DeployablePolicy, path: Path, *, format: str, metadata: Mapping[str, Any]) -> float:
    """Write ``policy`` with its metadata inside, and ``path`` + ``.json`` beside it; then run the file.

    Args:
        path: of the file; its folder is made.
        format: one of ``FORMATS``.
        metadata: see ``make_metadata``.

    Returns:
        The largest difference between the file's actions and states and the policy's, over
        ``CHECK_STEPS`` steps of ``CHECK_ENVS`` envs.

    Raises:
        ValueError: unknown format.
        RuntimeError: that difference is above ``CHECK_TOLERANCE``: the export is wrong.
    """
    if format not in FORMATS:
        raise ValueError(f"--format {format}: valid are {', '.join(FORMATS)}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(metadata, indent=2)
    num_obs = metadata["inputs"]["observation"][1]
    # Not 1: an exporter takes a size of 1 for a constant.
    example = (torch.zeros(CHECK_ENVS, num_obs), *policy.initial_state(CHECK_ENVS))
    with warnings.catch_warnings():  # of the exporters about themselves
        warnings.simplefilter("ignore")
        write = {"onnx": _write_onnx, "torchscript": _write_torchscript, "pt2": _write_pt2}[format]
        write(policy, path, example, text)
        difference = _compare(policy, _load(path, format), num_obs)
    if not difference <= CHECK_TOLERANCE:
        path.unlink()
        raise RuntimeError(f"{path}: the exported policy is off by {difference:.1e} after {CHECK_STEPS} steps")
    path.with_name(path.name + ".json").write_text(text + "\n")
    return difference


def _dynamic_batch(example: tuple[Tensor, ...]) -> dict[str, Any]:
    batch = torch.export.Dim("N")
    shapes: dict[str, Any] = {"observation": {0: batch}}
    return shapes | ({"state": tuple({0: batch} for _ in example[1:])} if len(example) > 1 else {})


def _write_onnx(policy: DeployablePolicy, path: Path, example: tuple[Tensor, ...], metadata: str) -> None:
    names = policy.state_names
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    program = torch.onnx.export(
        policy,
        example,
        dynamo=True,
        verbose=False,
        input_names=["observation", *names],
        output_names=["action", *(f"next_{name}" for name in names)],
        dynamic_shapes=_dynamic_batch(example),
    )
    assert program is not None  # with dynamo=True
    model = program.model_proto
    model.metadata_props.add(key=METADATA_KEY, value=metadata)
    onnx.checker.check_model(model, full_check=True)
    onnx.save_model(model, path)


def _write_torchscript(policy: DeployablePolicy, path: Path, example: tuple[Tensor, ...], metadata: str) -> None:
    traced = torch.jit.trace(policy.eval(), example)
    torch.jit.save(traced, path, _extra_files={METADATA_KEY: metadata})


def _write_pt2(policy: DeployablePolicy, path: Path, example: tuple[Tensor, ...], metadata: str) -> None:
    program = torch.export.export(policy.eval(), example, dynamic_shapes=_dynamic_batch(example))
    buffer = io.BytesIO()  # torch.export.save insists on the suffix .pt2 of a path
    torch.export.save(program, buffer, extra_files={METADATA_KEY: metadata})
    path.write_bytes(buffer.getvalue())


def _load(path: Path, format: str):
    """The file as a function of tensors."""
    if format == "torchscript":
        return torch.jit.load(path)
    if format == "pt2":
        return torch.export.load(io.BytesIO(path.read_bytes())).module()
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        feed = {name: np.asarray(value) for name, value in zip(names, inputs, strict=True)}
        return tuple(torch.from_numpy(value) for value in session.run(None, feed))

    return run


@torch.no_grad()
def _compare(policy: DeployablePolicy, exported, num_obs: int) -> float:
    generator = torch.Generator().manual_seed(0)
    differences = []
    state = own_state = policy.initial_state(CHECK_ENVS)
    for _ in range(CHECK_STEPS):
        observation = torch.randn(CHECK_ENVS, num_obs, generator=generator)
        outputs, own_outputs = exported(observation, *state), policy(observation, *own_state)
        for output, own in zip(outputs, own_outputs, strict=True):
            differences.append((output - own).abs().max())
        state, own_state = outputs[1:], own_outputs[1:]
    return torch.stack(differences).max().item()  # NaN where any is
