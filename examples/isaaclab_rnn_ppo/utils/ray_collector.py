"""The same rollouts from workers that Ray places, on this machine or on others (``--collector-backend ray``).

Needs the extra ``ray``. Shapes: N envs, W workers.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.collectors.distributed import RayCollector

from isaaclab_rnn_ppo.utils.collectors import SHUTDOWN_TIMEOUT_S, WorkerFault
from isaaclab_rnn_ppo.utils.rollout import RolloutCollector, policy_from_worker_env
from isaaclab_rnn_ppo.utils.signals import EXIT_CODES

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# `uv run` would make Ray build an environment for the workers anew; they take the one that is installed. Ray reads it
# when it is imported.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError


class RolloutsFromRay(RayCollector):
    """TorchRL's ``RayCollector`` with the learner's side of ``collectors._LearnerSide``.

    Of TorchRL 0.14.1 the public ``iterator`` and ``update_policy_weights_`` are replaced. The stock ones stack the
    workers' batches to [W, N], stop at once for an endless run (``total_frames=-1``), leave a worker idle until the
    learner asks again, wait for ever for one that hangs, and write weights into the policy without a word to the
    collector, so that no version could be told.
    """

    def __init__(self, *args, sync: bool, first_version: int, worker_timeout_s: float, owns_ray: bool, **kwargs):
        self.asynchronous, self._version, self.worker_timeout_s = not sync, first_version, worker_timeout_s
        self.owns_ray, self.alive = owns_ray, True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*weights.*")  # there is no policy here to take them from
            super().__init__(*args, sync=sync, weight_sync_schemes={}, **kwargs)

    def _wait_for(self, answers: Any) -> Any:
        """What workers answer.

        Raises:
            WorkerFault: a worker raised or died, or nothing came for ``worker_timeout_s``.
        """
        try:
            return ray.get(answers, timeout=self.worker_timeout_s)
        except RayActorError as error:
            self.alive = False
            raise WorkerFault("a worker died") from error
        except RayTaskError as error:
            self.alive = False
            raise WorkerFault(f"a worker: {type(error.cause).__name__}: {str(error.cause)[:2000]}") from error
        except GetTimeoutError:
            self.alive = False
            raise WorkerFault(f"no worker answered for {self.worker_timeout_s:g} s (--worker-timeout)") from None

    @property
    def policy_version(self) -> int:
        """Version of the weights pushed last."""
        return self._version

    def failure(self) -> None:
        """Nothing but what ``WorkerFault`` says."""

    def getattr_env(self, name: str) -> Any:
        """Attribute of the first worker's env."""
        return self._wait_for(self.remote_collectors[0].getattr_env.remote(name))

    def map_fn(self, method_name: str, list_of_args: list[tuple] | None = None, **kwargs: Any) -> list[Any]:
        """Call a method of every worker, between two batches."""
        arguments = list_of_args or [()] * len(self.remote_collectors)
        calls = zip(self.remote_collectors, arguments, strict=True)
        return self._wait_for([worker.cascade_execute.remote(method_name, *args) for worker, args in calls])

    def update_policy_weights_(self, policy: nn.Module) -> None:
        """Send the weights to every worker, once for each machine. A worker takes them before its next rollout."""
        weights = ray.put(TensorDict.from_module(policy).data.cpu())
        for worker in self.remote_collectors:
            worker.update_policy_weights_.remote(weights)
        self._version += 1

    def iterator(self) -> Iterator[TensorDictBase]:
        """Batches [N] of all workers, in their order; or of one after the other, which goes on collecting meanwhile."""
        workers = self.remote_collectors
        if not self.asynchronous:
            while True:
                yield torch.cat(self._wait_for([worker.next.remote() for worker in workers]))
        running = [worker.next.remote() for worker in workers]
        while True:
            for w, worker in enumerate(workers):
                batch = self._wait_for(running[w])
                running[w] = worker.next.remote()
                yield batch

    def shutdown(self, timeout: float | None = None, raise_on_error: bool = True) -> None:
        """Close the envs, then the workers, then what ``make_ray_collector`` started of Ray."""
        with suppress(RayError):  # those that are gone, or busy for longer
            closing = [worker.shutdown.remote() for worker in self.remote_collectors]
            ray.get(closing, timeout=SHUTDOWN_TIMEOUT_S if timeout is None else timeout)
        super().shutdown()
        if self.owns_ray:
            ray.shutdown()


def make_ray_collector(
    *,
    create_env_fn: Callable[..., Any],
    make_policy: Callable[..., nn.Module],
    env_kwargs: list[dict[str, Any]],
    rollout_steps: int,
    async_collection: bool,
    device: str,
    worker_timeout_s: float,
    rollout_options: dict[str, Any],
) -> RolloutsFromRay:
    """``make_collector``'s collector on Ray: on the cluster that this process has joined or that ``RAY_ADDRESS`` names,
    else on one that is started here and ends with the collector.

    Every worker gets an equal share of the cluster's GPUs, one at most, and sees it as ``cuda:0``.

    Args:
        env_kwargs: of ``create_env_fn``, one for each of W workers; on a GPU, ``device`` as well.
        device: ``cpu``, or any CUDA device for "a GPU".
        rollout_options: of ``RolloutCollector``.

    Raises:
        ValueError: Ray has no GPU, or the env or the policy refused its settings.
    """
    owns_ray = not ray.is_initialized()
    if owns_ray:
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}  # modules are found as here, and by spawn
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        handlers = {signum: signal.getsignal(signum) for signum in EXIT_CODES}
        ray.init(**quiet, runtime_env={"env_vars": paths})
        for signum, handler in handlers.items():  # Ray takes SIGTERM for itself, and dies of it without a word to us
            signal.signal(signum, handler)
    try:
        num_workers, resources = len(env_kwargs), ray.cluster_resources()
        cuda = torch.device(device).type == "cuda"
        if cuda and not resources.get("GPU"):
            raise ValueError(f"--collector-backend ray: --device {device}, and the Ray cluster has no GPU.")
        device, own_device = ("cuda:0", {"device": "cuda:0"}) if cuda else ("cpu", {})
        frames = rollout_steps * env_kwargs[0]["num_envs"]
        return RolloutsFromRay(
            [create_env_fn] * num_workers,
            policy_factory=partial(policy_from_worker_env, make_policy),
            frames_per_batch=frames if async_collection else frames * num_workers,
            total_frames=sys.maxsize,
            sync=not async_collection,
            device=device,
            storing_device="cpu",
            collector_class=RolloutCollector,
            collector_kwargs=[{"create_env_kwargs": kwargs | own_device} | rollout_options for kwargs in env_kwargs],
            remote_configs={
                "num_cpus": min(1.0, resources["CPU"] / num_workers),
                "num_gpus": min(1.0, resources["GPU"] / num_workers) if cuda else 0,
                "scheduling_strategy": "SPREAD",
            },
            first_version=rollout_options["first_version"],
            worker_timeout_s=worker_timeout_s,
            owns_ray=owns_ray,
        )
    except BaseException as error:
        if owns_ray:
            ray.shutdown()
        if not isinstance(error, ActorDiedError):
            raise
        if refused := re.search(r"^ValueError: (.*)$", str(error), re.M):  # the worker's exception is in the text only
            raise ValueError(refused[1]) from None
        raise
