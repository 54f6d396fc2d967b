"""What happens to values that are not finite, or so large that they might as well not be.

A rollout keeps them as they came; the window of an env that holds one gets advantages and value targets
of NaN (``advantages``), and a minibatch whose loss or gradient is not usable is skipped on the device
(``update``). Here is what both go by, and what the host says about it once an iteration.

Shapes: N envs, T steps.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from tensordict import TensorDictBase
from torch import Tensor

from isaaclab_rnn_ppo.utils.ranks import num_ranks, rank

# Losses, norms and Adam's second moment hold squares: those of larger values overflow in float32.
LARGEST = 1e18


class NonFiniteRun(RuntimeError):
    """Too many updates in a row were skipped."""


def is_usable(x: Tensor) -> Tensor:
    """Whether each entry is finite and at most ``LARGEST`` in size."""
    return x.abs() < LARGEST  # False for NaN


def usable_envs(batch: TensorDictBase) -> Tensor:
    """Whether every floating-point entry of an env's window is usable, [N]."""
    values = [value for value in batch.values(True, True) if value.is_floating_point()]
    return torch.stack([is_usable(value).flatten(1).all(1) for value in values]).all(0)


def first_unusable(steps: TensorDictBase) -> str | None:
    """Key, env and step of the earliest entry of ``steps`` [N, T] that is not usable. Waits for the device."""
    found = []
    for key, value in steps.items(True, True):
        if value.is_floating_point() and not (usable := is_usable(value)).all():
            step, env = (~usable.reshape(*steps.shape, -1).all(2)).T.nonzero()[0].tolist()
            name = ".".join(key) if isinstance(key, tuple) else key
            bad = value[env, step].flatten()
            found.append(
                (step, len(found), f"{name} of env {env} at step {step} is {bad[~is_usable(bad)][0].item():g}")
            )
    return min(found)[2] if found else None


def check_skipped(
    batch: TensorDictBase, *, iteration: int, skipped: int, in_a_row: int, max_in_a_row: int, run_dir: Path
) -> None:
    """Say why updates of this iteration were skipped; end the run if it does not get past them.

    Args:
        batch: the rollout [N].
        skipped: updates of the iteration.
        in_a_row: updates that were skipped up to the iteration's end, without one that was not.
        run_dir: gets ``nonfinite_batch.pt``, the rollout as a nest of dicts, at the end of the run.

    Raises:
        NonFiniteRun: ``in_a_row`` is above ``max_in_a_row``.
    """
    if not skipped:
        return
    everything = "every input" if num_ranks() == 1 else "every input of this rank"
    cause = first_unusable(batch["steps"]) or f"{everything} is finite, the loss or its gradient is not"
    if in_a_row <= max_in_a_row:
        warnings.warn(f"iteration {iteration}: {skipped} updates skipped: {cause}", stacklevel=2)
        return
    path = run_dir / ("nonfinite_batch.pt" if rank() == 0 else f"nonfinite_batch_rank{rank()}.pt")
    torch.save(batch.cpu().to_dict(), path)
    raise NonFiniteRun(
        f"iteration {iteration}: {in_a_row} updates in a row skipped (--max-skipped-updates {max_in_a_row}): {cause}; "
        f"the batch is in {path}"
    )
