"""A trained actor from its checkpoint alone: which file a user means, and what is in it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensordict.nn import TensorDictModuleBase

from isaaclab_rnn_ppo.utils.checkpoint import CHECKPOINT_DIR, find_checkpoint, load_checkpoint, load_model
from isaaclab_rnn_ppo.utils.evaluate import BEST_NAME
from isaaclab_rnn_ppo.utils.models import Models
from isaaclab_rnn_ppo.utils.task_info import specs_of

_FLAG = "--checkpoint"
_ACTOR_PREFIX = "actor_network."  # of TorchRL's PPO losses
_ENTRIES = ("model", "config", "iteration", "frames", "task_info")


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """``--checkpoint``, ``--task`` and ``--log-dir``."""
    parser.add_argument(
        _FLAG,
        required=True,
        help="checkpoint file; run folder (its newest); latest or best (the newest of that kind in --log-dir)",
    )
    parser.add_argument("--task", help="Isaac Lab task id that the checkpoint must be of")
    parser.add_argument("--log-dir", default="runs", help="folder that holds the runs (default: %(default)s)")


def check_output(flag: str, path: Path) -> None:
    """Raise before the work, not after it, where ``path`` cannot be written.

    Raises:
        ValueError: names the flag and why.
    """
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{flag} {path}: cannot be written ({error.strerror}).") from None
    if not existed:
        path.unlink()


def resolve_checkpoint(name: str, *, log_dir: str | Path = "runs", task: str | None = None) -> Path:
    """The file that ``--checkpoint name`` means.

    Args:
        name: ``latest`` or ``best``: the file written last, or the ``best.pt`` written last, of all runs
            in ``log_dir`` (of ``task``, where given); else a checkpoint file or a run folder.

    Raises:
        ValueError: there is none.
    """
    if name not in ("latest", "best"):
        return find_checkpoint(name, flag=_FLAG)
    pattern = f"{task or '*'}/*/{CHECKPOINT_DIR}/{BEST_NAME if name == 'best' else 'iteration_*.pt'}"
    found = sorted(Path(log_dir).glob(pattern), key=lambda path: path.stat().st_mtime)
    if not found:
        hint = "; training writes it with --eval-interval" if name == "best" else ""
        raise ValueError(f"{_FLAG} {name}: nothing like {log_dir}/{pattern}{hint}.")
    return found[-1]


def open_checkpoint(path: Path, *, task: str | None = None) -> dict[str, Any]:
    """Read a checkpoint of ``train.py``.

    Args:
        task: id that it must be of, or None for any.

    Raises:
        ValueError: not a whole checkpoint of this suite, or of another task.
    """
    checkpoint = load_checkpoint(path, entries=_ENTRIES, flag=_FLAG)
    trained_on = checkpoint["config"]["task"]
    if task is not None and task != trained_on:
        raise ValueError(f"{_FLAG} {path}: a policy of {trained_on}, not of --task {task}.")
    return checkpoint


def restore_actor(
    checkpoint: Mapping[str, Any], model_factory: Callable[[argparse.Namespace], Callable[..., Models]]
) -> TensorDictModuleBase:
    """The actor, on the CPU, with its weights and normaliser statistics.

    Args:
        checkpoint: from ``open_checkpoint``.
        model_factory: of ``train.py``.

    Raises:
        ValueError: its parameters are not those of its settings.
    """
    settings = argparse.Namespace(**checkpoint["config"] | {"device": "cpu", "rnn_backend": "auto"})
    actor = model_factory(settings)(**specs_of(checkpoint["task_info"])).actor
    own = {key: value for key, value in checkpoint["model"].items() if key.startswith(_ACTOR_PREFIX)}
    load_model(actor, {key.removeprefix(_ACTOR_PREFIX): value for key, value in own.items()}, flag=_FLAG)
    return actor
