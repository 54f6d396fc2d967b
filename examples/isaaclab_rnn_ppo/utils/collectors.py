"""Compact rollouts from simulator subprocesses. ``rollout`` says what a batch holds.

Shapes: N envs, T steps, B boundary slots.
"""

from __future__ import annotations

import ctypes
import logging
import signal
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase
from torchrl.weight_update import MultiProcessWeightSyncScheme

from isaaclab_rnn_ppo.utils.rollout import RolloutCollector, bytes_of, policy_from_worker_env, require_memory

__all__ = ["RolloutCollector", "bytes_of", "make_collector", "quiet_libraries", "require_memory"]

# Isaac Lab needs 3-8 s to close; TorchRL terminates at 80 % and kills at 95 % of this.
SHUTDOWN_TIMEOUT_S = 20.0


class HeldWeightSync(MultiProcessWeightSyncScheme):
    """Weight sync that leaves the model alone until the collector takes the weights.

    The stock scheme writes into the model from a background thread, so asynchronous collection
    would change policy in the middle of a rollout. Without a model it only hands the weights to
    ``RolloutCollector.update_policy_weights_``.
    """

    @property
    def model(self) -> None:
        return None

    @model.setter
    def model(self, model: nn.Module) -> None:
        pass


def _init_worker() -> None:
    """First thing in a worker: it lives and dies with the learner, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan after a killed learner
    quiet_libraries()


def quiet_libraries() -> None:
    """Silence the loggers that print hundreds of debug lines (torch 2.11, torchrl 0.14.1)."""
    logging.getLogger("torch._higher_order_ops.partitioner").setLevel(logging.WARNING)


class _LearnerSide:
    """What both multi-process collectors need in the learner: a version that moves, and a clean end.

    Of TorchRL 0.14.1's private methods ``_run_processes`` is overridden here, and ``_queue_len`` and
    ``_get_from_queue`` in ``AsyncCollector``; ``tests/test_collectors.py`` pins them.
    """

    def __init__(self, *args, first_version: int, **kwargs):
        self._version = first_version
        super().__init__(*args, **kwargs)

    @property
    def policy_version(self) -> int:
        """Version of the weights pushed last."""
        return self._version

    def update_policy_weights_(self, policy_or_weights, **kwargs) -> None:
        super().update_policy_weights_(policy_or_weights, **kwargs)
        self._version += 1

    def _run_processes(self) -> None:
        try:
            super()._run_processes()
        except BaseException:  # TorchRL cleans up on Exception only: Ctrl-C would leave workers behind
            self.shutdown(timeout=2.0, raise_on_error=False)
            raise

    def shutdown(self, timeout: float | None = None, **kwargs) -> None:
        super().shutdown(timeout=SHUTDOWN_TIMEOUT_S if timeout is None else timeout, **kwargs)


class SyncCollector(_LearnerSide, MultiSyncCollector):
    """Every batch is collected entirely with the weights pushed last."""


class AsyncCollector(_LearnerSide, MultiAsyncCollector):
    """One worker's batch at a time, collected while the learner works on the one before.

    The workers take turns, so that a batch is never older than their number: a fast worker would
    otherwise overtake a slow one, whose batch then waits while the version moves on. TorchRL's queue
    has one place; a worker that finds it taken for a second throws its rollout away and collects
    another beside the busy learner.
    """

    def __init__(self, *args, **kwargs):
        self._arrived: dict[int, tuple] = {}
        self._turn = 0
        super().__init__(*args, **kwargs)

    @property
    def _queue_len(self) -> int:
        return self.num_workers

    def _get_from_queue(self, timeout=None):
        while self._turn not in self._arrived:
            arrival = super()._get_from_queue(timeout=timeout)
            self._arrived[arrival[0]] = arrival
        arrival = self._arrived.pop(self._turn)
        self._turn = (self._turn + 1) % self.num_workers
        return arrival


def make_collector(
    *,
    create_env_fn: Callable[..., EnvBase],
    make_policy: Callable[..., nn.Module],
    num_envs: int,
    rollout_steps: int,
    num_collectors: int = 1,
    boundary_slots: int = 2,
    async_collection: bool = False,
    device: torch.device | str = "cpu",
    seed: int = 0,
    first_version: int = 0,
) -> SyncCollector | AsyncCollector:
    """Start the workers.

    The learner needs no env: ``collector.getattr_env("observation_spec")`` gives the specs, before
    the first ``iter(collector)``. Then ``collector.update_policy_weights_(actor)`` pushes weights;
    a batch is what ``next(iter(collector))`` returns (see ``rollout``).

    Args:
        create_env_fn: called in worker w as ``create_env_fn(num_envs=..., seed=seed + w)``.
        make_policy: called in a worker as ``make_policy(observation_spec=..., action_spec=...)``;
            builds the module that ``update_policy_weights_`` is given in the learner.
        num_envs: over all workers; a multiple of ``num_collectors``.
        rollout_steps: T.
        boundary_slots: B; one slot is the window end, the others truncations inside the window.
        async_collection: collect while the learner works; a batch is then one worker's.
        device: of the env and the policy in the workers.
        first_version: policy version to count from (a resumed run's).

    Raises:
        ValueError: ``num_envs`` is not a multiple of ``num_collectors``, or memory cannot hold the
            rollouts (``require_memory``).
        Exception: what the env or the policy raised in the worker.
    """
    if num_envs % num_collectors:
        raise ValueError(f"--num-envs {num_envs}: must be a multiple of --num-collectors {num_collectors}.")
    envs_per_worker = num_envs // num_collectors
    frames = envs_per_worker * rollout_steps
    cores = torch.get_num_threads()
    collector = AsyncCollector if async_collection else SyncCollector
    return collector(
        [create_env_fn] * num_collectors,
        nn.Module(),  # placeholder: the sync scheme else calls the factory here, before any env exists
        policy_factory=partial(policy_from_worker_env, make_policy),
        create_env_kwargs=[{"num_envs": envs_per_worker, "seed": seed + w} for w in range(num_collectors)],
        frames_per_batch=frames if async_collection else frames * num_collectors,
        total_frames=-1,
        device=device,
        storing_device="cpu",
        use_buffers=True,
        trust_policy=True,
        no_cuda_sync=False,
        weight_sync_schemes={"policy": HeldWeightSync()},
        collector_class=partial(
            RolloutCollector,
            boundary_slots=boundary_slots,
            num_envs=num_envs,
            batch_envs=envs_per_worker if async_collection else num_envs,
            first_version=first_version,
        ),
        init_fn=_init_worker,
        first_version=first_version,
        # Synchronous phases alternate, so both may use every core; overlapping ones share them.
        num_threads=max(1, cores - num_collectors) if async_collection else cores,
        num_sub_threads=1 if async_collection else max(1, cores // num_collectors),
        **({} if async_collection else {"cat_results": 0}),
    )
