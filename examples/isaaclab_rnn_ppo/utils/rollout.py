"""The worker's side of a rollout: steps the envs and fills one compact batch.

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
``episodes``        [N]        sums over the episodes that ended in the window, those whose return is
                               usable (``nonfinite``): ``return``, ``length``, ``count``, ``log`` [K]
``worker``          [N]        index of the worker that stepped the env
==================  =========  ==================================================================
"""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torchrl.checkpoint import GlobalRNGState
from torchrl.collectors import Collector
from torchrl.envs import EnvBase
from torchrl.envs.utils import set_exploration_type

from isaaclab_rnn_ppo.utils.checkpoint import restore_rng
from isaaclab_rnn_ppo.utils.nonfinite import is_usable
from isaaclab_rnn_ppo.utils.update import accelerate

# Root entries of an env that are not observations.
_NOT_OBSERVATIONS = {"is_init", "episode_reward"}

# TorchRL calls the policy factory without the env whose specs the policy needs.
_worker_env: contextvars.ContextVar[EnvBase] = contextvars.ContextVar("worker_env")


def policy_from_worker_env(make_policy: Callable[..., nn.Module]) -> nn.Module:
    """``make_policy(observation_spec=..., action_spec=...)`` of the env that this worker just built, on its device."""
    env = _worker_env.get()
    return make_policy(observation_spec=env.observation_spec, action_spec=env.action_spec).to(env.device)


def accelerated_policy(policy: TensorDictModuleBase) -> Callable[[TensorDictBase], TensorDictBase]:
    """``policy`` as one compiled step, on CUDA a replayed graph; writes the action, its log-probability and the state.

    TorchRL's ``compile_policy`` and ``cudagraph_policy`` stay unused (0.14.1): ``CudaGraphModule``
    waits for the device at every step. Weights are read where they lie, so pushes need nothing more.
    """
    outputs = [key for key in policy.out_keys if isinstance(key, tuple) or key in ("action", "action_log_prob")]

    def act(step: TensorDictBase) -> TensorDictBase:
        return policy(step).select(*outputs)

    on_cuda = next(policy.parameters()).is_cuda
    accelerated = accelerate(act, compile_mode="default", cudagraphs=on_cuda)

    def step(carrier: TensorDictBase) -> TensorDictBase:
        # Without the device, which the first carrier lacks and the others have: else a second graph.
        inputs = TensorDict({key: carrier.get(key) for key in policy.in_keys}, carrier.batch_size)
        return carrier.copy().update(accelerated(inputs))

    return step


def bytes_of(tensordict: TensorDictBase) -> int:
    """Bytes of the tensors in ``tensordict``."""
    return sum(value.numel() * value.element_size() for value in tensordict.values(True, True))


class RolloutCollector(Collector):
    """Collects the batch that the module docstring describes. Runs in a worker.

    Two private hooks of TorchRL 0.14.1's ``Collector`` are overridden: ``_init_policy`` (to give the
    factory the env's specs) and ``_maybe_make_final_rollout`` (allocates the batch instead of T copies
    of a step); ``_carrier`` and ``_final_rollout`` are read and written. ``rollout`` and
    ``update_policy_weights_`` are public. ``tests/test_collectors.py`` pins what they replace.

    Across steps the worker holds the batch and the carrier, which is what the next step starts from:
    observation, flags and recurrent state of one step.

    Args:
        create_env_fn: makes a vectorised env of batch size [N] whose ``("next", group)`` is the true
            next observation, also where the episode ended (not finite where it is not known).
        boundary_slots: B, at least 1.
        num_envs: over all workers of this machine, for the memory check.
        batch_envs: envs in one of the learner's batches, likewise.
        first_version: version of the weights that the next push replaces.
        accelerate_policy: compile the policy step, and on CUDA replay it as a graph.
        failures: told in one line of what ends ``rollout``.
    """

    def __init__(
        self,
        create_env_fn: Callable[[], EnvBase],
        *,
        boundary_slots: int = 2,
        num_envs: int = 0,
        batch_envs: int = 0,
        first_version: int = 0,
        accelerate_policy: bool = False,
        failures: SimpleQueue | None = None,
        **kwargs,
    ):
        self._failures = failures
        self.boundary_slots, self.accelerate_policy = boundary_slots, accelerate_policy
        self._memory_envs: dict[str, Any] = {"num_envs": num_envs, "batch_envs": batch_envs}
        self._version = self._pending_version = first_version
        self._pending_weights: TensorDictBase | None = None
        self._weights_lock = threading.Lock()
        device = torch.device(kwargs.get("env_device") or kwargs.get("device") or "cpu")
        if device.type == "cuda":
            torch.cuda.set_device(device)  # before env and policy allocate: nothing of theirs on another GPU
        kwargs.update(use_buffers=True, trust_policy=True, auto_register_policy_transforms=True, track_traj_ids=False)
        super().__init__(create_env_fn, **kwargs)

    def __bool__(self) -> bool:
        return True  # Ray asks while the constructor fails, and TorchRL's __len__ would fail on top

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
        self._groups = [key for key, _ in spec.items() if key not in _NOT_OBSERVATIONS | states]
        # What an env step needs: the rest of the policy's outputs (features, parameters) ends with the step.
        self._to_env = ["action", *(("next", *key) for key in self._state_keys), *self._carrier.keys(True, True)]
        rewards = dict(self.env.full_reward_spec.items())
        self._num_log = rewards["log"].shape[-1] if "log" in rewards else 0

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
        require_memory(bytes_of(batch) / n, device=self.env.device, **self._memory_envs)
        self._final_rollout = batch.to(self.storing_device).clone()
        stored = self._final_rollout["steps"]
        self._observation_storages = [(key, stored[key]) for key in self._groups]
        self._storages = [(key, stored[key]) for key in ("is_init", "action", "action_log_prob")]
        self._next_storages = dict(stored["next"].items())
        self._num_finals, self._first_step = torch.zeros(2, n, dtype=torch.long, device=self.storing_device)
        self._num_steps = 0
        self._act = accelerated_policy(self.policy) if self.accelerate_policy else self.policy

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

    def save_worker(self) -> dict[str, Any]:
        """RNG states and, where the env has a state of its own (``state_dict``), all that the next step starts from.

        An Isaac Lab env has none: what its physics engine holds cannot be read.
        """
        env = dict(self.env.base_env.state_dict())
        state = {"rng": GlobalRNGState().state_dict(), "env": env}
        if env:
            counts = {"num_steps": self._num_steps, "first_step": self._first_step}
            state |= {"carrier": self._carrier.to_dict(), **counts}
        return tree_map_only(Tensor, lambda tensor: tensor.cpu().clone(), state)  # not the live ones: they go on

    def restore_worker(self, state: dict[str, Any]) -> bool:
        """Go on from ``save_worker``; whether the episodes go on too, or only the RNGs."""
        restore_rng(state["rng"])
        if not state["env"] or state["first_step"].shape != self._first_step.shape:
            return False
        self.env.base_env.load_state_dict(state["env"])
        self._carrier.update(TensorDict(state["carrier"], self._carrier.batch_size).to(self.env.device))
        self._num_steps = state["num_steps"]
        self._first_step.copy_(state["first_step"])
        return True

    @torch.no_grad()
    def rollout(self) -> TensorDictBase:
        """Step every env T times with one version of the weights and return the batch [N]."""
        self._apply_pending_weights()
        batch = self._final_rollout
        batch["steps", "policy_version"].fill_(self._version)
        batch["final"].zero_()
        batch["episodes"].zero_()
        self._num_finals.zero_()
        for key in self._state_keys:
            batch["initial"][key].copy_(self._carrier[key])
        try:
            with set_exploration_type(self.exploration_type):
                for t in range(self.frames_per_batch):
                    self._collect_step(t)  # a method, so that nothing of a step outlives it
        except Exception as error:
            if self._failures is not None:
                self._failures.put(f"worker {self.worker_idx}: {type(error).__name__}: {str(error)[:2000]}")
            raise
        return batch

    def _collect_step(self, t: int) -> None:
        for key, storage in self._observation_storages:
            observation = self._carrier.get(key)
            storage[:, t].copy_(observation)
            # Stored as it came, acted on as 0: a sensor's NaN reaches neither the physics nor the recurrent state.
            self._carrier.set(key, torch.where(is_usable(observation), observation, 0.0))
        chosen = self._act(self._carrier)
        for key, storage in self._storages:
            storage[:, t].copy_(chosen.get(key))
        stepped, self._carrier = self.env.step_and_maybe_reset(chosen.select(*self._to_env))
        following = stepped.get("next")
        for key, storage in self._next_storages.items():
            storage[:, t].copy_(following.get(key))
        # From here on with the flags in host memory, and only the rows that need it: most steps have none.
        ended = self._next_storages["done"][:, t, 0].nonzero().squeeze(1)
        goes_on = ~self._next_storages["terminated"][:, t, 0]
        cut = goes_on.nonzero().squeeze(1) if t == self.frames_per_batch - 1 else ended[goes_on[ended]]
        if len(cut):
            self._store_finals(t, following, cut)
        self._num_steps += 1
        if len(ended):
            self._count_episodes(following, ended)

    def _store_finals(self, t: int, following: TensorDictBase, envs: Tensor) -> None:
        """Keep the true next observation of ``envs``, which step ``t`` cuts without terminating them."""
        final, end_slot = self._final_rollout["final"], self.boundary_slots - 1
        observations = [following.get(key)[envs.to(following.device)].to(envs.device) for key in self._groups]
        keep = is_usable(torch.cat([observation.flatten(1) for observation in observations], 1)).all(1)
        if t == self.frames_per_batch - 1:
            envs = envs[keep]
            slots = torch.full_like(envs, end_slot)
        else:
            keep &= self._num_finals[envs] < end_slot
            envs = envs[keep]
            slots = self._num_finals[envs]
            self._num_finals[envs] += 1
        for key, observation in zip(self._groups, observations):
            final.get(key)[envs, slots] = observation[keep]
        final.get("time")[envs, slots] = t
        final.get("valid")[envs, slots] = True

    def _count_episodes(self, following: TensorDictBase, ended: Tensor) -> None:
        lengths = self._num_steps - self._first_step[ended]
        self._first_step[ended] = self._num_steps
        returns = following.get("episode_reward")[ended.to(following.device), 0].to(ended.device)
        known = is_usable(returns)  # one wild reward is no reason to have no statistics
        ended, lengths, returns = ended[known], lengths[known], returns[known]
        sums, rows = self._final_rollout["episodes"], ended.to(following.device)
        sums.get("count")[ended] += 1
        sums.get("length")[ended] += lengths
        sums.get("return")[ended] += returns
        if self._num_log:
            sums.get("log")[ended] += following.get("log")[rows].to(ended.device)


def require_memory(
    bytes_per_env: float,
    *,
    num_envs: int,
    batch_envs: int,
    device: torch.device | str = "cpu",
    shm: str = "/dev/shm",
) -> None:
    """Raise before a batch is allocated that shared, host or device memory cannot hold.

    A batch too large for ``/dev/shm`` otherwise ends in a bare bus error in the middle of the run.

    Args:
        bytes_per_env: of a batch.
        num_envs: over all workers; their batches lie in shared memory together.
        batch_envs: envs in one of the learner's batches, which it holds once more.
        device: the learner's, where its batch goes.
        shm: mount point of the shared memory.

    Raises:
        ValueError: with both sizes and the flag to turn.
    """
    with open("/proc/meminfo") as lines:
        meminfo = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    space = os.statvfs(shm)
    shared, batch = bytes_per_env * num_envs, bytes_per_env * batch_envs
    checks = [
        (f"shared memory ({shm})", shared, space.f_bavail * space.f_frsize),
        ("host memory", shared + batch, meminfo["MemAvailable"]),
    ]
    device = torch.device(device)
    if device.type == "cuda":
        checks.append((f"device memory ({device})", batch, torch.cuda.mem_get_info(device)[0]))
    for name, needed, available in checks:
        if needed > available:
            larger = ", or enlarge it (docker run --shm-size, --ipc=host)" if "shared" in name else ""
            raise ValueError(
                f"the rollouts need {needed / 2**20:,.1f} MiB of {name}, which has {available / 2**20:,.1f} MiB left: "
                f"lower --num-envs or --rollout-steps{larger}."
            )
