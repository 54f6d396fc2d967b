"""Data-parallel learners: one process ("rank") a GPU, started by ``torchrun``, that agree on every update.

Every rank has its own envs and an equal share of every minibatch. Gradients and whatever a decision
hangs on are averaged over the ranks, so that each takes the very same step, and none sends parameters
to another. Without ``torchrun`` there is one rank, and what is summed or averaged is what it was.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isaaclab_rnn_ppo.utils.signals import EXIT_CODES, Interrupted

_SEED_STRIDE = 1_000_003  # more than the collectors and restarts of a rank add to its seed


def torchrun_variable(name: str) -> int:
    """``LOCAL_RANK``, ``LOCAL_WORLD_SIZE`` or ``TORCHELASTIC_RESTART_COUNT``; without ``torchrun`` 0, 1 and 0."""
    alone = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "TORCHELASTIC_RESTART_COUNT": 0}
    return int(os.environ[name]) if dist.is_torchelastic_launched() else alone[name]


def rank() -> int:
    """Of this process, over all nodes."""
    return dist.get_rank() if dist.is_initialized() else 0


def seed_of_rank(seed: int) -> int:
    """``seed`` on rank 0, others on the others."""
    return (seed + _SEED_STRIDE * rank()) % 2**31


def num_ranks() -> int:
    """Over all nodes."""
    return dist.get_world_size() if dist.is_initialized() else 1


def job_name() -> str | None:
    """Of the ``torchrun`` that started this process, the same after it has restarted the ranks; None without it."""
    if not dist.is_torchelastic_launched():
        return None
    name, agent = os.environ["TORCHELASTIC_RUN_ID"], os.getppid()
    if name != "none":  # --rdzv-id, or a random one of --standalone
        return name
    started = Path(f"/proc/{agent}/stat").read_text().rsplit(")", 1)[1].split()[19]  # proc(5): starttime
    return f"{socket.gethostname()}-{agent}-{started}"


def lost_contact(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone. Gloo raises plain ``RuntimeError`` (torch 2.11)."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


@contextmanager
def data_parallel(device: str, *, timeout_s: float) -> Iterator[None]:
    """Join the other ranks where ``torchrun`` started this process.

    Args:
        device: of the learner; NCCL on CUDA, gloo on the CPU. It becomes CUDA's current one, before anything is
            allocated.
        timeout_s: how long a rank waits for the others, which collect and restart workers meanwhile. ``torchrun``
            notices a rank that is gone, and long before.
    """
    if not dist.is_torchelastic_launched():
        yield
        return
    cuda = torch.device(device).type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device(device) if cuda else None,
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def sum_over_ranks(value: Tensor) -> Tensor:
    """Sum [*] of the ``value`` [*] of every rank."""
    if not dist.is_initialized():
        return value
    total = value.clone()
    dist.all_reduce(total)
    return total


def average_over_ranks(values: list[Tensor]) -> list[Tensor]:
    """Mean over the ranks of each tensor, in one all-reduce of them all."""
    if not dist.is_initialized():
        return values
    flat = torch.cat([value.reshape(-1) for value in values]) / dist.get_world_size()
    dist.all_reduce(flat)
    parts = flat.split([value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values)]


def from_first_rank(function: Callable[[], Any]) -> Any:
    """What ``function`` returns on rank 0, where alone it runs.

    Raises:
        Exception: on rank 0, what ``function`` raised.
        SystemExit: on the others, then.
    """
    if not dist.is_initialized():
        return function()
    box: list[Any] = [None, False]
    try:
        if rank() == 0:
            box = [function(), True]
    finally:
        dist.broadcast_object_list(box, device=torch.device("cpu"))
    result, succeeded = box
    if not succeeded:
        raise SystemExit(2)
    return result


def gather_on_first_rank(value: Any) -> list[Any]:
    """The ``value`` of every rank on rank 0, in their order; nothing on the others."""
    if not dist.is_initialized():
        return [value]
    values = [None] * num_ranks() if rank() == 0 else None
    dist.gather_object(value, values)
    return values or []


def fingerprint(tensors: Iterable[Tensor]) -> Tensor:
    """Of the bits of ``tensors`` (float32, float64), int64 []: a sum that depends on what stands where."""
    bits = torch.cat([tensor.detach().reshape(-1).view(torch.int32) for tensor in tensors]).long()
    weights = torch.arange(1, len(bits) + 1, device=bits.device) * 0x1E3779B97F4A7C15  # products and sum wrap around
    return (bits * weights).sum()


def require_agreement(tensors: Iterable[Tensor], what: str) -> None:
    """Raise on every rank where the ranks do not hold the same bits. Waits for the device.

    Raises:
        RuntimeError: they differ.
    """
    if not dist.is_initialized():
        return
    own = fingerprint(tensors)
    extremes = torch.stack([own, ~own])  # ~x falls as x rises, and knows no overflow
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX)
    highest, lowest = extremes[0], ~extremes[1]
    if highest != lowest:
        raise RuntimeError(f"{what} differ between the {num_ranks()} ranks: training is no longer one run.")


class AgreedStop:
    """SIGTERM, SIGUSR1 or Ctrl-C of any rank, as ``Interrupted`` on all of them after the same iteration.

    A rank that left alone would keep the others waiting in an all-reduce, where no signal reaches them. So from here on
    the first signal is only kept, and later ones are ignored; ``torchrun`` kills what has not left 30 s after its own.
    One rank alone is interrupted at once, as ever.
    """

    def __init__(self) -> None:
        self._kept = 0
        if dist.is_initialized():
            for signum in EXIT_CODES:
                signal.signal(signum, self._keep)

    def _keep(self, signum: int, frame: Any) -> None:
        self._kept = self._kept or signum

    def check(self) -> None:
        """Call on every rank.

        Raises:
            Interrupted: a rank was signalled.
        """
        if not dist.is_initialized():
            return
        signum = torch.tensor(self._kept)
        dist.all_reduce(signum, op=dist.ReduceOp.MAX)
        if signum:
            raise Interrupted(int(signum))
