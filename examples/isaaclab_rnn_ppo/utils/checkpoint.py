"""Checkpoints: written whole or not at all, loaded without running code from the file."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Buffer, Iterator, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torchrl.checkpoint import GlobalRNGState

from isaaclab_rnn_ppo.utils.ranks import job_name

CHECKPOINT_DIR = "checkpoints"
JOB_NAME = "torchrun_job"
# What a resumed run reads; optimizers come with the model's entries.
RESUME_ENTRIES = ("model", "config", "iteration", "frames", "policy_version", "episodes", "rng", "workers", "rank_rng")
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
    "normalize_obs",
    "normalize_value",
    "critic_obs",
)


def checkpoint_path(run_dir: Path, iteration: int) -> Path:
    """Where a run's checkpoint of an iteration lies."""
    return run_dir / CHECKPOINT_DIR / f"iteration_{iteration:07d}.pt"


def checkpoints(run_dir: Path) -> list[Path]:
    """Those of a run folder, oldest first; not ``best.pt``."""
    return sorted((run_dir / CHECKPOINT_DIR).glob("iteration_*.pt"))


@cache
def versions() -> dict[str, str]:
    """Of this suite and of what reads a checkpoint."""
    return {name: version(name) for name in ("isaaclab-rnn-ppo", "torch", "torchrl", "tensordict")}


def checksum(state: Any) -> str:
    """SHA-256 over a nest of dicts, lists, tensors and plain values."""
    digest = hashlib.sha256()

    def parts(value: Any) -> Iterator[Buffer]:
        if isinstance(value, Tensor):
            yield f"{value.dtype}{tuple(value.shape)}".encode()
            yield value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        elif isinstance(value, dict):
            for key, item in value.items():
                yield repr(key).encode()
                yield from parts(item)
        elif isinstance(value, list | tuple):
            for item in value:
                yield from parts(item)
        else:
            yield repr(value).encode()

    for part in parts(state):
        digest.update(part)
    return digest.hexdigest()


def save_checkpoint(path: Path, state: dict[str, Any], *, keep: int | None = None) -> None:
    """Write ``state`` and its checksum to a temporary file, flush it to disk, and rename it to ``path``.

    Args:
        keep: delete all but the last ``keep`` checkpoints of the run afterwards; None keeps all.

    Raises:
        OSError: the disk is full, say. What was there before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()
    torch.save(state | {"checksum": checksum(state)}, content)
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.getbuffer())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    for old in checkpoints(path.parent.parent)[: -keep if keep else 0]:
        old.unlink()


def find_checkpoint(path: str | Path, *, flag: str = "--resume") -> Path:
    """The file itself, or the newest checkpoint of a run folder. ``flag`` is named in messages, here and below.

    Raises:
        ValueError: nothing there.
    """
    path = Path(path)
    if path.is_file():
        return path
    found = checkpoints(path)
    if not found:
        raise ValueError(f"{flag} {path}: neither a checkpoint file nor a run folder with one.")
    return found[-1]


def load_checkpoint(path: Path, *, entries: Sequence[str] = (), flag: str = "--resume") -> dict[str, Any]:
    """Read a checkpoint file; never runs code from it.

    Args:
        entries: what it must hold.

    Raises:
        ValueError: not a whole file that this version of the suite wrote.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever the damage makes it trip over
        raise ValueError(f"{flag} {path}: not a readable checkpoint ({type(error).__name__}).") from None
    if not isinstance(state, dict) or "model" not in state or "checksum" not in state:
        raise ValueError(f"{flag} {path}: not a checkpoint of this suite.")
    if state.pop("checksum") != checksum(state):
        raise ValueError(f"{flag} {path}: damaged, its content does not match its checksum.")
    if missing := [entry for entry in entries if entry not in state]:
        raise ValueError(f"{flag} {path}: not a checkpoint of this version, it has no {', '.join(missing)}.")
    return state


def resume_from(resume: str, *, log_dir: str | Path, task: str) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that ``--resume`` means, and its content.

    A damaged file at the end of a run folder falls back to the one before, with a warning.

    Args:
        resume: a checkpoint file, a run folder, or ``auto``: the latest run of ``task`` in ``log_dir``.

    Returns:
        path and content, or None: ``auto`` found no run to continue.

    Raises:
        ValueError: nothing readable there.
    """
    if resume == "auto":
        runs = [run for run in sorted((Path(log_dir) / task).glob("*")) if checkpoints(run)]
        if not runs:
            return None
        folder = runs[-1]
    elif Path(resume).is_dir():
        folder = Path(resume)
    else:
        path = find_checkpoint(resume)
        return path, load_checkpoint(path, entries=RESUME_ENTRIES)
    newest = find_checkpoint(folder)
    for path in reversed(checkpoints(folder)):
        try:
            return path, load_checkpoint(path, entries=RESUME_ENTRIES)
        except ValueError as error:
            warnings.warn(f"{error} Trying the one before.", stacklevel=2)
    raise ValueError(f"--resume {newest.parent}: no checkpoint there is readable.")


def mark_run(run_dir: Path) -> None:
    """Note which ``torchrun`` job a run belongs to, for ``restarted_run``."""
    if (name := job_name()) is not None:
        (run_dir / JOB_NAME).write_text(name)


def restarted_run(resume: str | None, *, log_dir: str | Path, task: str) -> str | None:
    """The run folder of this very job, after ``torchrun`` has restarted its ranks; None without a checkpoint.

    Args:
        resume: what the job was told to continue, or None; it may lie outside ``log_dir``.
    """
    runs = sorted((Path(log_dir) / task).glob("*"))
    if resume is not None:
        runs += [Path(resume), Path(resume).parent.parent]
    own = [run for run in runs if (run / JOB_NAME).is_file() and (run / JOB_NAME).read_text() == job_name()]
    own = [run for run in own if checkpoints(run)]
    return str(own[-1]) if own else None


def check_settings(checkpoint: dict[str, Any], settings: dict[str, Any]) -> None:
    """Refuse to continue a run with another model or task.

    Raises:
        ValueError: names the flag and both values.
    """
    for name in MODEL_SETTINGS:
        before, now = checkpoint["config"][name], settings[name]
        if before != now:
            raise ValueError(f"--{name.replace('_', '-')} {now}: the checkpoint to resume was trained with {before}.")


def restore_rng(state: dict[str, Any]) -> bool:
    """Restore what TorchRL's ``GlobalRNGState`` gave; of CUDA only with as many devices. Whether all was restored."""
    num_devices = len(state.get("torch_cuda", ()))
    complete = num_devices in (0, torch.cuda.device_count())
    GlobalRNGState().load_state_dict({k: v for k, v in state.items() if complete or k != "torch_cuda"})
    return complete


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
