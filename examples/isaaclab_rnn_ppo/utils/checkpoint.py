"""Checkpoints: written whole or not at all, loaded without running code from the file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

CHECKPOINT_DIR = "checkpoints"
# What decides the shapes and the meaning of the parameters.
MODEL_SETTINGS = (
    "task",
    "rnn",
    "hidden_size",
    "num_layers",
    "actor_hidden",
    "head_hidden",
    "activation",
    "action_dist",
)


def checkpoint_path(run_dir: Path, iteration: int) -> Path:
    return run_dir / CHECKPOINT_DIR / f"iteration_{iteration:07d}.pt"


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write ``state`` to a temporary file, flush it to disk, and rename it to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def find_checkpoint(path: str | Path, *, flag: str = "--resume") -> Path:
    """The file itself, or the newest checkpoint of a run folder. ``flag`` is named in messages, here and below.

    Raises:
        ValueError: nothing there.
    """
    path = Path(path)
    if path.is_file():
        return path
    found = sorted((path / CHECKPOINT_DIR).glob("*.pt"))
    if not found:
        raise ValueError(f"{flag} {path}: neither a checkpoint file nor a run folder with one.")
    return found[-1]


def load_checkpoint(path: Path, *, flag: str = "--resume") -> dict[str, Any]:
    """Read a checkpoint file; never runs code from it.

    Raises:
        ValueError: not a whole file that this suite wrote.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the damage makes it trip over
        raise ValueError(f"{flag} {path}: not a readable checkpoint ({type(error).__name__}).") from None
    if not isinstance(state, dict) or "model" not in state:
        raise ValueError(f"{flag} {path}: not a checkpoint of this suite.")
    return state


def check_settings(checkpoint: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse to continue a run with another model or task.

    Raises:
        ValueError: names the flag and both values.
    """
    for name in MODEL_SETTINGS:
        before, now = checkpoint["config"][name], settings[name]
        if before != now:
            raise ValueError(f"--{name.replace('_', '-')} {now}: the checkpoint to resume was trained with {before}.")


def load_model(module: nn.Module, state: dict[str, torch.Tensor], *, flag: str = "--resume") -> None:
    """Load parameters, or say which differ.

    Raises:
        ValueError: a parameter is missing, not known, or of another shape.
    """
    own = module.state_dict()
    missing, unknown = own.keys() - state.keys(), state.keys() - own.keys()
    shapes = [
        f"{name} is {list(state[name].shape)} in the checkpoint and {list(own[name].shape)} here"
        for name in own.keys() & state.keys()
        if own[name].shape != state[name].shape
    ]
    problems = [
        *sorted(shapes),
        *(f"{n} is missing" for n in sorted(missing)),
        *(f"{n} is not known" for n in sorted(unknown)),
    ]
    if problems:
        raise ValueError(f"{flag}: the checkpoint is of another model: {'; '.join(problems[:3])}.")
    module.load_state_dict(state)
