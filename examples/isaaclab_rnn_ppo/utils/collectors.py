"""Compact rollouts from simulator subprocesses.

Shapes: N envs, T steps, B boundary slots, L layers, H hidden, K log entries.

A batch is a tensordict ``[N]`` with parts, because ``[N, T]`` cannot hold entries of another shape:

==================  =========  ==================================================================
part                shape      entries
==================  =========  ==================================================================
``steps``           [N, T]     observation groups, ``action``, ``action_log_prob``, ``is_init``,
                               ``policy_version``, ``("next", "reward" | "done" | "terminated")``
``initial``         [N]        recurrent state [L, H] at the window start
``final``           [N, B]     true next observation at each boundary that needs a bootstrap;
                               ``time`` (step index), ``valid``. Slots 0..B-2 hold truncations
                               inside the window, slot B-1 the window end
``episodes``        [N]        sums over the episodes that ended in the window: ``return``,
                               ``length``, ``count``, ``log`` [K]
``worker``          [N]        index of the worker that stepped the env
==================  =========  ==================================================================
"""

from __future__ import annotations

import contextvars
import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable
from functools import partial

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors import Collector, MultiAsyncCollector, MultiSyncCollector
from torchrl.envs import EnvBase
from torchrl.envs.utils import set_exploration_type
from torchrl.weight_update import MultiProcessWeightSyncScheme

# Isaac Lab needs 3-8 s to close; TorchRL terminates at 80 % and kills at 95 % of this.
SHUTDOWN_TIMEOUT_S = 20.0

# Root entries of the environment that are not observations.
_NOT_OBSERVATIONS = {"is_init", "episode_reward", "log"}

# TorchRL calls the policy factory without the env whose specs the policy needs.
_worker_env: contextvars.ContextVar[EnvBase] = contextvars.ContextVar("worker_env")


def bytes_of(tensordict: TensorDictBase) -> int:
    """Bytes of the tensors in ``tensordict``."""
    return sum(value.numel() * value.element_size() for value in tensordict.values(True, True))


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


class RolloutCollector(Collector):
    """Collects the batch that the module docstring describes. Runs in a worker.

    Three private hooks of TorchRL 0.14.1's ``Collector`` are overridden, pinned by
    ``tests/test_collectors.py``: ``_init_policy`` (to give the factory the env's specs),
    ``_maybe_make_final_rollout`` (allocates the batch instead of T copies of a step) and
    ``_postproc`` (nothing to filter). ``rollout`` and ``update_policy_weights_`` are public.

    Args:
        create_env_fn: makes a vectorised env of batch size [N] whose ``("next", group)`` is the true
            next observation, also where the episode ended (NaN where it is not known).
        boundary_slots: B, at least 1.
        num_workers: how many workers share this machine's memory.
        first_version: version of the weights that the next push replaces.
    """

    def __init__(
        self,
        create_env_fn: Callable[[], EnvBase],
        *,
        boundary_slots: int = 2,
        num_workers: int = 1,
        first_version: int = 0,
        **kwargs,
    ):
        self.boundary_slots = boundary_slots
        self._num_workers = num_workers
        self._version = self._pending_version = first_version
        self._pending_weights: TensorDictBase | None = None
        self._weights_lock = threading.Lock()
        kwargs.update(use_buffers=True, trust_policy=True, auto_register_policy_transforms=True)
        super().__init__(create_env_fn, **kwargs)

    def _init_policy(self, policy, policy_factory, env, trust_policy):
        token = _worker_env.set(env)
        try:
            return super()._init_policy(policy, policy_factory, env, trust_policy)
        finally:
            _worker_env.reset(token)

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        spec, n, t, b = self.env.observation_spec, self.n_env, self.frames_per_batch, self.boundary_slots
        self._state_keys = [key[1:] for key in self.policy.out_keys if isinstance(key, tuple) and key[0] == "next"]
        states = {key[0] for key in self._state_keys}
        self._groups = [key for key in spec.keys() if key not in _NOT_OBSERVATIONS | states]
        self._num_log = spec["log"].shape[-1] if "log" in spec.keys() else 0
        self._length = torch.zeros(n, 1, device=self.env.device)

        observations = {key: spec[key].zero() for key in self._groups}
        flag = torch.zeros(n, 1, dtype=torch.bool)
        step = TensorDict(
            observations
            | {
                "action": self.env.action_spec.zero(),
                "action_log_prob": torch.zeros(n),
                "is_init": flag,
                "policy_version": torch.zeros(n, dtype=torch.int32),
                "next": {"reward": torch.zeros(n, 1), "done": flag, "terminated": flag},
            },
            [n],
        )
        final = TensorDict(observations | {"time": torch.zeros(n, dtype=torch.int32), "valid": flag[:, 0]}, [n])
        worker = self.worker_idx or 0
        batch = TensorDict(
            {
                "steps": step.unsqueeze(1).expand(n, t),
                "initial": TensorDict({key: spec[key].zero() for key in self._state_keys}, [n]),
                "final": final.unsqueeze(1).expand(n, b),
                "episodes": {
                    "return": torch.zeros(n),
                    "length": torch.zeros(n),
                    "count": torch.zeros(n),
                    "log": torch.zeros(n, self._num_log),
                },
                "worker": torch.full((n,), worker, dtype=torch.int32),
                # MultiSyncCollector reads this entry; it names the env, not the trajectory.
                ("collector", "traj_ids"): torch.arange(n) + worker * n,
            },
            [n],
        )
        require_memory(
            bytes_of(batch) * self._num_workers,
            where="the rollouts of all workers",
            hint="lower --num-envs or --rollout-steps",
        )
        self._final_rollout = batch.to(self.storing_device).clone()

    def update_policy_weights_(self, policy_or_weights: TensorDictBase, **kwargs) -> None:
        """Take the weights for the next rollout. Called from TorchRL's receiver thread."""
        with self._weights_lock:
            # A copy: what comes through the queue can be the learner's own, shared memory.
            self._pending_weights = policy_or_weights.data.clone()
            self._pending_version += 1

    def _apply_pending_weights(self) -> None:
        with self._weights_lock:
            weights, self._pending_weights = self._pending_weights, None
            self._version = self._pending_version
        if weights is not None:
            TensorDict.from_module(self.policy).data.update_(weights)

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Step every env T times with one version of the weights and return the batch [N]."""
        self._apply_pending_weights()
        batch, carrier = self._final_rollout, self._carrier
        steps, final, episodes = batch["steps"], batch["final"], batch["episodes"]
        steps["policy_version"].fill_(self._version)
        for key in ("valid", "time", *self._groups):
            final[key].zero_()
        episodes.zero_()
        for key in self._state_keys:
            batch["initial"][key].copy_(carrier[key])

        # What an env step needs to see: the rest of the policy's outputs ends with the step.
        to_env = ["action", *(("next", *key) for key in self._state_keys), *carrier.keys(True, True)]
        num_truncations = torch.zeros(self.n_env, 1, dtype=torch.long, device=final.device)
        with set_exploration_type(self.exploration_type):
            for t in range(self.frames_per_batch):
                chosen = self.policy(carrier.copy())
                for key in (*self._groups, "is_init", "action", "action_log_prob"):
                    steps[key][:, t].copy_(chosen[key])
                stepped, carrier = self.env.step_and_maybe_reset(chosen.select(*to_env))
                following = stepped["next"]
                for key in ("reward", "done", "terminated"):
                    steps["next", key][:, t].copy_(following[key])
                self._store_boundary(t, following, final, num_truncations)
                self._count_episodes(following, episodes)
                # NaN marks a final observation that the env does not have; roots never carry it.
                carrier = carrier.select(*to_env[1 + len(self._state_keys) :])
        self._carrier = carrier
        return batch

    def _store_boundary(self, t: int, following: TensorDictBase, final: TensorDictBase, count: torch.Tensor) -> None:
        """Keep the true next observation where step ``t`` is cut and not terminated."""
        observations = {key: following[key].to(final.device) for key in self._groups}
        known = torch.stack([o.flatten(1).isfinite().all(1) for o in observations.values()]).all(0)
        terminated, done = following["terminated"].to(final.device), following["done"].to(final.device)
        if t == self.frames_per_batch - 1:
            slot = torch.full_like(count, self.boundary_slots - 1)
            store = ~terminated
        else:
            slot, store = count, done & ~terminated
        mask = store & known.unsqueeze(1) & (slot < self.boundary_slots - (t < self.frames_per_batch - 1))
        slot = slot.clamp(max=self.boundary_slots - 1)
        values = observations | {"time": t, "valid": True}
        for key, value in values.items():
            entry = final[key]
            index = slot.view(-1, *[1] * (entry.ndim - 1)).expand(-1, 1, *entry.shape[2:])
            old = entry.gather(1, index)
            new = value.unsqueeze(1) if isinstance(value, torch.Tensor) else torch.full_like(old, value)
            entry.scatter_(1, index, torch.where(mask.view(-1, *[1] * (entry.ndim - 1)), new, old))
        count += mask

    def _count_episodes(self, following: TensorDictBase, episodes: TensorDictBase) -> None:
        done = following["done"]
        self._length += 1
        ended = {
            "return": following["episode_reward"],
            "length": self._length,
            "count": torch.ones_like(self._length),
        }
        for key, value in ended.items():
            episodes[key].add_(torch.where(done, value, 0.0).squeeze(1).to(episodes.device))
        if self._num_log:
            episodes["log"].add_(torch.where(done, following["log"], 0.0).to(episodes.device))
        self._length = torch.where(done, 0.0, self._length)

    def _postproc(self, tensordict_out: TensorDictBase) -> TensorDictBase:
        return tensordict_out


def require_memory(num_bytes: int, *, where: str, hint: str, shm: str = "/dev/shm") -> None:
    """Raise before a batch is allocated that shared or host memory cannot hold.

    A batch too large for ``/dev/shm`` otherwise ends in a bare bus error.

    Raises:
        ValueError: with both sizes and the flag to turn.
    """
    limits = {f"shared memory ({shm})": (lambda s: s.f_bavail * s.f_frsize)(os.statvfs(shm))}
    with open("/proc/meminfo") as lines:
        meminfo = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    limits["host memory"] = meminfo["MemAvailable"]
    for name, available in limits.items():
        if num_bytes > available:
            raise ValueError(
                f"{where} need {num_bytes / 2**20:,.1f} MiB and {name} has {available / 2**20:,.1f} MiB left: {hint}"
                + (", or enlarge it (docker run --shm-size, --ipc=host)." if "shm" in name else ".")
            )


def _init_worker() -> None:
    """First thing in a worker: it lives and dies with the learner, which alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no orphan after a killed learner
    quiet_libraries()


def quiet_libraries() -> None:
    """Silence the loggers that print hundreds of debug lines (torch 2.11, torchrl 0.14.1)."""
    logging.getLogger("torch._higher_order_ops.partitioner").setLevel(logging.WARNING)


def _make_worker_policy(make_policy: Callable[..., nn.Module]) -> nn.Module:
    env = _worker_env.get()
    return make_policy(observation_spec=env.observation_spec, action_spec=env.action_spec)


class _LearnerSide:
    """What both multi-process collectors need in the learner: a version that moves, and a clean end."""

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
    """One worker's batch at a time, collected while the learner works on the one before."""


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
    a batch is what ``next(iter(collector))`` returns (see the module docstring).

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
        ValueError: ``num_envs`` is not a multiple of ``num_collectors``.
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
        policy_factory=partial(_make_worker_policy, make_policy),
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
            num_workers=num_collectors,
            first_version=first_version,
        ),
        init_fn=_init_worker,
        first_version=first_version,
        # Synchronous phases alternate, so both may use every core; overlapping ones share them.
        num_threads=max(1, cores - num_collectors) if async_collection else cores,
        num_sub_threads=1 if async_collection else max(1, cores // num_collectors),
        **({} if async_collection else {"cat_results": 0}),
    )
