"""Compact rollouts from simulator subprocesses. ``rollout`` says what a batch holds.

Shapes: N envs, T steps, B boundary slots.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase
from torchrl.weight_update import MultiProcessWeightSyncScheme

from isaaclab_rnn_ppo.utils.rollout import RolloutCollector, bytes_of, policy_from_worker_env, require_memory

__all__ = [
    "AsyncCollector",
    "RestartingCollector",
    "RolloutCollector",
    "SyncCollector",
    "WorkerFault",
    "bytes_of",
    "make_collector",
    "quiet_libraries",
    "require_memory",
]

# Isaac Lab needs 3-8 s to close; TorchRL terminates at 80 % and kills at 95 % of this.
SHUTDOWN_TIMEOUT_S = 20.0
FAULT_TIMEOUT_S = 2.0  # of one that hangs anyway


class WorkerFault(RuntimeError):
    """A worker died or does not answer."""


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

    def _init_on_sender_impl(self, *args, **kwargs) -> None:
        """Like the stock one of TorchRL 0.14.1; a signal in the middle of a push cannot keep the process from ending.

        What the signal raises may leave ``threading.Condition.notify`` half done, and the queue's thread asleep for
        ever: at its exit, Python would wait for it.
        """
        super()._init_on_sender_impl(*args, **kwargs)
        for queues in (self._weight_init_queues, self._instruction_queues):
            for to_worker in queues.values():
                to_worker.cancel_join_thread()

    def _wait_for_ack(self, worker_ids=None, timeout=None) -> None:
        """Like the stock one of TorchRL 0.14.1, which waits for ever for a worker that is gone."""
        for acks in self._ack_queues.values():
            self.context.wait_for(acks)


def _init_worker() -> None:
    """First thing in a worker: it lives and dies with the learner, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan after a killed learner
    quiet_libraries()


def quiet_libraries() -> None:
    """Silence the loggers that print hundreds of debug lines (torch 2.11, torchrl 0.14.1)."""
    logging.getLogger("torch._higher_order_ops.partitioner").setLevel(logging.WARNING)


# A mixin: both collectors have this base, whose constructor chooses between them.
if TYPE_CHECKING:
    from torchrl.collectors import MultiCollector

    from isaaclab_rnn_ppo.utils.ray_collector import RolloutsFromRay
else:
    MultiCollector = object


class _LearnerSide(MultiCollector):
    """What both multi-process collectors need in the learner: a version that moves, and a clean end.

    Of TorchRL 0.14.1's private methods ``_run_processes`` and ``_recv_and_check`` are overridden here, and
    ``_queue_len`` and ``_get_from_queue`` in ``AsyncCollector``; ``tests/test_collectors.py`` pins them.
    """

    asynchronous = False

    def __init__(self, *args, first_version: int, worker_timeout_s: float, failures: SimpleQueue, **kwargs):
        self._version, self.worker_timeout_s, self._failures = first_version, worker_timeout_s, failures
        self._shutdown_timeout_s = SHUTDOWN_TIMEOUT_S
        super().__init__(*args, **kwargs)

    def failure(self) -> str | None:
        """What a worker said before it ended, if it could."""
        return None if self._failures.empty() else self._failures.get()

    def wait_for(self, messages: Any) -> Any:
        """Next entry of a worker's queue.

        Raises:
            WorkerFault: a worker died, or nothing came for ``worker_timeout_s``.
        """
        deadline = time.monotonic() + self.worker_timeout_s
        while True:
            try:
                return messages.get(timeout=0.5)
            except queue.Empty:
                if not self.alive:
                    raise WorkerFault("a worker died") from None
                if time.monotonic() > deadline:
                    raise self._hangs() from None

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
            self.queue_out = _WatchedQueue(self.queue_out, self)
        except BaseException as error:  # TorchRL cleans up on Exception only: Ctrl-C would leave workers behind
            self.shutdown(timeout=FAULT_TIMEOUT_S, raise_on_error=False)
            if isinstance(error.__cause__, EOFError):  # its pipe closed, and no exception came through it
                raise WorkerFault("a worker died while it started") from error
            raise

    def _recv_and_check(self, pipe: Any, **kwargs) -> Any:
        try:
            return super()._recv_and_check(pipe, **{"timeout": self.worker_timeout_s} | kwargs)
        except TimeoutError:
            raise self._hangs() from None

    def _hangs(self) -> WorkerFault:
        self._shutdown_timeout_s = FAULT_TIMEOUT_S  # TorchRL's iterator shuts down before anyone sees the fault
        return WorkerFault(f"no worker answered for {self.worker_timeout_s:g} s (--worker-timeout)")

    @property
    def alive(self) -> bool:
        """Whether every worker runs."""
        return all(not process._closed and process.is_alive() for process in self.procs)

    def shutdown(self, timeout: float | None = None, **kwargs) -> None:
        super().shutdown(timeout=self._shutdown_timeout_s if timeout is None else timeout, **kwargs)


class _WatchedQueue:
    """A queue of rollouts whose ``get`` does not wait for a worker that is gone."""

    def __init__(self, rollouts: Any, collector: _LearnerSide):
        self._rollouts, self._collector = rollouts, collector

    def get(self, timeout: float | None = None) -> Any:
        return self._collector.wait_for(self._rollouts)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollouts, name)


class SyncCollector(_LearnerSide, MultiSyncCollector):
    """Every batch is collected entirely with the weights pushed last."""


class AsyncCollector(_LearnerSide, MultiAsyncCollector):
    """One worker's batch at a time, collected while the learner works on the one before.

    The workers take turns, so that a batch is never older than their number: a fast worker would
    otherwise overtake a slow one, whose batch then waits while the version moves on. TorchRL's queue
    has one place; a worker that finds it taken for a second throws its rollout away and collects
    another beside the busy learner.
    """

    asynchronous = True

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
    collector_devices: Sequence[str] | None = None,
    boundary_slots: int = 2,
    async_collection: bool = False,
    backend: str = "multiprocess",
    device: torch.device | str = "cpu",
    seed: int = 0,
    first_version: int = 0,
    worker_timeout_s: float = 600.0,
    accelerate_policy: bool = False,
) -> SyncCollector | AsyncCollector | RolloutsFromRay:
    """Start the workers.

    The learner needs no env: ``collector.getattr_env("observation_spec")`` gives the specs, before
    the first ``iter(collector)``. Then ``collector.update_policy_weights_(actor)`` pushes weights;
    a batch is what ``next(iter(collector))`` returns (see ``rollout``).

    Args:
        create_env_fn: called in worker w as ``create_env_fn(num_envs=..., seed=seed + w)``.
        make_policy: called in a worker as ``make_policy(observation_spec=..., action_spec=...)``;
            builds the module that ``update_policy_weights_`` is given in the learner.
        num_envs: over all workers; a multiple of ``num_collectors``.
        collector_devices: of env and policy, one a worker, where they are not all on ``device``; ``create_env_fn`` gets
            its own as ``device=...``.
        rollout_steps: T.
        boundary_slots: B; one slot is the window end, the others truncations inside the window.
        async_collection: collect while the learner works; a batch is then one worker's.
        backend: ``multiprocess`` or ``ray`` (``ray_collector``): where the workers run.
        device: of the env and the policy in the workers.
        first_version: policy version to count from (a resumed run's).
        worker_timeout_s: a worker that sends nothing for longer counts as dead.
        accelerate_policy: compile the workers' policy step, and on CUDA replay it as a graph.

    Raises:
        ValueError: ``num_envs`` is not a multiple of ``num_collectors``, the devices are not as many, Ray is not
            installed, or memory cannot hold the rollouts (``require_memory``).
        Exception: what the env or the policy raised in the worker.
    """
    if num_envs % num_collectors:
        raise ValueError(f"--num-envs {num_envs}: must be a multiple of --num-collectors {num_collectors}.")
    if collector_devices is not None and len(collector_devices) != num_collectors:
        raise ValueError(f"--collector-devices: {len(collector_devices)} devices for {num_collectors} collectors.")
    envs_per_worker = num_envs // num_collectors
    env_kwargs: list[dict[str, Any]] = [{"num_envs": envs_per_worker, "seed": seed + w} for w in range(num_collectors)]
    for kwargs, own_device in zip(env_kwargs, collector_devices or ()):
        kwargs["device"] = own_device
    frames = envs_per_worker * rollout_steps
    rollout_options = {
        "boundary_slots": boundary_slots,
        "num_envs": num_envs,
        "batch_envs": envs_per_worker if async_collection else num_envs,
        "first_version": first_version,
        "accelerate_policy": accelerate_policy,
    }
    if backend == "ray":
        if find_spec("ray") is None:
            raise ValueError("--collector-backend ray: Ray is not installed; the project's extra `ray` has it.")
        from isaaclab_rnn_ppo.utils.ray_collector import make_ray_collector  # Ray is optional, and slow to import

        return make_ray_collector(
            create_env_fn=create_env_fn,
            make_policy=make_policy,
            env_kwargs=env_kwargs,
            rollout_steps=rollout_steps,
            async_collection=async_collection,
            device=str(device),
            worker_timeout_s=worker_timeout_s,
            rollout_options=rollout_options,
        )
    cores = torch.get_num_threads()
    failures = get_context("spawn").SimpleQueue()
    collector = AsyncCollector if async_collection else SyncCollector
    return collector(
        [create_env_fn] * num_collectors,
        nn.Module(),  # placeholder: the sync scheme else calls the factory here, before any env exists
        policy_factory=partial(policy_from_worker_env, make_policy),
        create_env_kwargs=env_kwargs,
        frames_per_batch=frames if async_collection else frames * num_collectors,
        total_frames=-1,
        device=list(collector_devices or [device] * num_collectors),
        storing_device="cpu",
        use_buffers=True,
        trust_policy=True,
        no_cuda_sync=False,
        weight_sync_schemes={"policy": HeldWeightSync()},
        collector_class=partial(RolloutCollector, failures=failures, **rollout_options),
        init_fn=_init_worker,
        failures=failures,
        first_version=first_version,
        worker_timeout_s=worker_timeout_s,
        # Synchronous phases alternate, so both may use every core; overlapping ones share them.
        num_threads=max(1, cores - num_collectors) if async_collection else cores,
        num_sub_threads=1 if async_collection else max(1, cores // num_collectors),
        **({} if async_collection else {"cat_results": 0}),
    )


class RestartingCollector:
    """A collector whose workers are started again when one dies or hangs.

    The interrupted batch is thrown away and collected again, from new episodes, with the current
    weights and under the version that it would have had.

    Args:
        start: makes the collector; called as ``start(first_version=..., seed=...)``.
        seed: of the first start; later ones take others, not to repeat what was seen.
        max_restarts: over the whole run.
        first_version: of the weights before the first push.

    Attributes:
        num_restarts: so far.
    """

    def __init__(self, start: Callable[..., Any], *, seed: int, max_restarts: int, first_version: int):
        self._start, self._seed, self.max_restarts, self.num_restarts = start, seed, max_restarts, 0
        self.collector: Any = start(first_version=first_version, seed=seed)
        self._is_down, self._rollouts = False, None

    def collect(self, policy: nn.Module) -> TensorDictBase:
        """Push the weights of ``policy`` and return the next batch.

        Raises:
            WorkerFault: one more fault than ``max_restarts``.
        """
        version = self.collector.policy_version
        while True:
            try:
                if self._is_down:
                    self.collector = self._start(first_version=version, seed=self._seed + 10_000 * self.num_restarts)
                    self._is_down = False
                self.collector.update_policy_weights_(policy)
                if self._rollouts is None:  # not before the first push: asynchronous workers start here
                    self._rollouts = iter(self.collector)
                return next(self._rollouts)
            except RuntimeError as fault:  # TorchRL's own check raises no other
                reason = str(fault)
                if not self._is_down:
                    if self.collector.alive and not isinstance(fault, WorkerFault):
                        raise
                    reason = self.collector.failure() or reason
                    self.collector.shutdown(timeout=FAULT_TIMEOUT_S, raise_on_error=False)
                self._is_down, self._rollouts = True, None
                if self.num_restarts == self.max_restarts:
                    raise WorkerFault(
                        f"{reason}; {self.num_restarts} restarts were allowed (--max-worker-restarts)"
                    ) from fault
                self.num_restarts += 1
                print(f"{reason}: restart {self.num_restarts} of {self.max_restarts}", file=sys.stderr, flush=True)

    @property
    def policy_version(self) -> int:
        """Version of the weights pushed last."""
        return self.collector.policy_version

    def save_workers(self) -> list[dict[str, Any]]:
        """What each worker needs to go on (``RolloutCollector.save_worker``), between two batches.

        Empty where it cannot be had: asynchronous workers are in the middle of a batch, and one that is gone is
        started again by the next ``collect``.
        """
        if self.collector.asynchronous:
            return []
        try:
            return self.collector.map_fn("save_worker")
        except RuntimeError as fault:  # TorchRL's own check raises no other
            if self.collector.alive and not isinstance(fault, WorkerFault):
                raise
            return []

    def restore_workers(self, states: list[dict[str, Any]]) -> str | None:
        """Go on from ``save_workers``, before the first ``collect``; what could not be restored, or None."""
        if len(states) != self.collector.num_workers:
            return f"the checkpoint holds the state of {len(states)} simulators, not of {self.collector.num_workers}"
        if not all(self.collector.map_fn("restore_worker", [(state,) for state in states])):
            return "the checkpoint holds no state of these environments"
        return None

    def getattr_env(self, name: str) -> Any:
        """Attribute of the first worker's env; before the first ``collect`` only."""
        return self.collector.getattr_env(name)

    def shutdown(self) -> None:
        if not self._is_down:
            self.collector.shutdown()
