"""Evaluation: roll a policy in a collector's subprocess and count whole episodes, at once or beside training.

Shapes: N envs, E episodes, K entries of Isaac Lab's episode log.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch.utils._pytree import tree_map
from torchrl.envs import EnvBase
from torchrl.envs.transforms import Transform
from torchrl.envs.utils import ExplorationType, set_exploration_type

from isaaclab_rnn_ppo.utils.checkpoint import CHECKPOINT_DIR, load_checkpoint, save_checkpoint
from isaaclab_rnn_ppo.utils.collectors import WorkerFault, make_collector
from isaaclab_rnn_ppo.utils.video import CameraFrames, write_mp4

TERMINATION_PREFIX = "Episode_Termination/"
BACKGROUND_NICENESS = 19
SEED_OFFSET = 1000
"""From a run's seed to that of its evaluation."""

BEST_NAME = "best.pt"
"""In a run's ``checkpoints``: the one with the highest evaluation return."""


class EvaluationPolicy(TensorDictModuleBase):
    """The actor with its mean action, or as it explores in training."""

    def __init__(self, actor: TensorDictModuleBase, *, deterministic: bool = True):
        super().__init__()
        self.actor = actor
        self.exploration = ExplorationType.DETERMINISTIC if deterministic else ExplorationType.RANDOM
        self.in_keys, self.out_keys = actor.in_keys, actor.out_keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        with set_exploration_type(self.exploration):
            return self.actor(tensordict)


class EpisodeRecorder:
    """Every episode that ended, one row each. Lives in the worker.

    Rows: env, return, length in steps, terminated (else truncated), and Isaac Lab's log [K].
    """

    def __init__(self, num_envs: int):
        self._num_envs = num_envs
        self.start()

    def start(self) -> None:
        """Forget everything: the envs have been reset."""
        self._length = torch.zeros(self._num_envs)
        self._rows: list[torch.Tensor] = []

    def record(self, following: TensorDictBase) -> None:
        """Take in a step's ``next``."""
        self._length += 1
        envs = following.get("done")[:, 0].nonzero()[:, 0]
        if not len(envs):
            return
        log = following.get("log", None)
        columns = [
            envs.unsqueeze(1),
            following.get("episode_reward")[envs],
            self._length[envs.cpu()].unsqueeze(1),
            following.get("terminated")[envs],
            *([] if log is None else [log[envs]]),
        ]
        self._rows.append(torch.cat([column.cpu().double() for column in columns], 1))
        self._length[envs.cpu()] = 0

    def take(self) -> np.ndarray:
        """Rows [E, 4 + K] since the last call, in the order in which the episodes ended."""
        rows, self._rows = self._rows, []
        return torch.cat(rows).numpy() if rows else np.zeros((0, 0))


class RecordEpisodes(Transform):
    """Feeds an ``EpisodeRecorder``."""

    def __init__(self, recorder: EpisodeRecorder):
        super().__init__()
        self.recorder = recorder

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        self.recorder.record(next_tensordict)
        return next_tensordict


def make_evaluation_env(
    create_env_fn: Callable[..., EnvBase], num_frames: int = 0, background: bool = False, **kwargs
) -> EnvBase:
    """The env with its recorders, which ``Evaluator`` reaches as attributes of the base env. Runs in the worker.

    Args:
        create_env_fn: makes the env (with a camera where ``num_frames`` is not 0).
        num_frames: frames to draw an evaluation.
        background: leave the machine to others: one thread, lowest priority.
    """
    if background:
        os.nice(BACKGROUND_NICENESS)
        torch.set_num_threads(1)
    env = create_env_fn(**kwargs)
    base = env.base_env
    base.recorder = EpisodeRecorder(env.batch_size[0])
    env.append_transform(RecordEpisodes(base.recorder))
    if num_frames:
        frames = CameraFrames(base._env.unwrapped, num_frames)
        env.append_transform(frames)
        base.start_frames, base.take_frames = frames.start, frames.take
    return env


def make_evaluation_policy(
    make_actor: Callable[..., TensorDictModuleBase],
    deterministic: bool,
    sizes: dict[str, int] | None,
    *,
    observation_spec,
    action_spec,
) -> EvaluationPolicy:
    """Runs in the worker.

    Raises:
        ValueError: the env's sizes are not those that the policy was trained with.
    """
    if sizes is not None:
        found = {name: observation_spec[name].shape[-1] for name in sizes if name != "action"}
        found["action"] = action_spec.shape[-1]
        if found != sizes:
            raise ValueError(f"--checkpoint: the policy was trained with sizes {sizes}, and the task now has {found}.")
    actor = make_actor(observation_spec=observation_spec, action_spec=action_spec)
    return EvaluationPolicy(actor, deterministic=deterministic)


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation saw.

    Attributes:
        returns, lengths: of E episodes; lengths in steps.
        terminations: reason -> number of these episodes; Isaac Lab's own names where the task has them, else
            ``terminated`` and ``time_out``.
        log: means of the other entries of Isaac Lab's episode log.
        num_unfinished: envs that did not finish as many episodes as asked within the time limit.
    """

    returns: np.ndarray
    lengths: np.ndarray
    terminations: dict[str, int]
    log: dict[str, float]
    num_unfinished: int

    def summary(self) -> dict[str, Any]:
        """Plain numbers for a table or JSON; NaN is None."""

        def spread(values: np.ndarray) -> dict[str, float | None]:
            if not len(values):
                return dict.fromkeys(("mean", "std", "min", "max"))
            return {name: float(getattr(values, name)()) for name in ("mean", "std", "min", "max")}

        return {
            "episodes": len(self.returns),
            "return": spread(self.returns),
            "length_steps": spread(self.lengths),
            "terminations": self.terminations,
            "log": {name: value if math.isfinite(value) else None for name, value in self.log.items()},
            "unfinished_envs": self.num_unfinished,
        }


def count_episodes(rows: np.ndarray, log_names: Sequence[str], *, num_envs: int, episodes_per_env: int) -> Evaluation:
    """Count the first ``episodes_per_env`` episodes of every env.

    The same number of each: a mean over whatever ended first would favour short episodes.

    Args:
        rows: [E, 4 + K] of ``EpisodeRecorder``, in time order.
    """
    counts = np.zeros(num_envs, int)
    kept = []
    for row in rows:
        env = int(row[0])
        if counts[env] < episodes_per_env:
            counts[env] += 1
            kept.append(row)
    table = np.stack(kept) if kept else np.zeros((0, 4 + len(log_names)))
    terminated, logs = table[:, 3], dict(zip(log_names, table[:, 4:].T))
    prefix = TERMINATION_PREFIX
    reasons = {name.removeprefix(prefix): ended for name, ended in logs.items() if name.startswith(prefix)}
    if not reasons:
        reasons = {"terminated": terminated, "time_out": 1 - terminated}
    return Evaluation(
        returns=table[:, 1],
        lengths=table[:, 2],
        terminations={name: round(float(column.sum())) for name, column in reasons.items()},
        log={
            name: float(column.mean()) if len(column) else math.nan
            for name, column in logs.items()
            if not name.startswith(prefix)
        },
        num_unfinished=int((counts < episodes_per_env).sum()),
    )


class Evaluator:
    """Rolls policies in a simulator process of its own.

    Args:
        create_env_fn: as for ``make_collector``.
        make_actor: called in the worker as ``make_actor(observation_spec=..., action_spec=...)``.
        num_envs: N.
        deterministic: the mean action instead of a sample.
        sizes: see ``make_evaluation_policy``.
        rollout_steps: steps between two looks at what has ended.
        num_frames: video frames to draw from the start of an evaluation on; needs a camera (``video.add_camera``).
        background: see ``make_evaluation_env``.
        device, seed: of the envs.
    """

    def __init__(
        self,
        *,
        create_env_fn: Callable[..., EnvBase],
        make_actor: Callable[..., TensorDictModuleBase],
        num_envs: int,
        deterministic: bool = True,
        sizes: dict[str, int] | None = None,
        rollout_steps: int = 32,
        num_frames: int = 0,
        background: bool = False,
        device: torch.device | str = "cpu",
        seed: int = 0,
    ):
        self.num_envs, self.rollout_steps, self.num_frames = num_envs, rollout_steps, num_frames
        self.stop = False
        self._collector = make_collector(
            create_env_fn=partial(make_evaluation_env, create_env_fn, num_frames, background),
            make_policy=partial(make_evaluation_policy, make_actor, deterministic, sizes),
            num_envs=num_envs,
            rollout_steps=rollout_steps,
            device=device,
            seed=seed,
        )
        self._log_names = self._collector.getattr_env("log_names")
        self._max_steps = self._collector.getattr_env("max_episode_length")
        self.step_dt = self._collector.getattr_env("step_dt")
        self._rollouts = iter(self._collector)

    def evaluate(
        self,
        weights: TensorDictBase,
        *,
        episodes_per_env: int = 1,
        on_frames: Callable[[np.ndarray], None] | None = None,
    ) -> Evaluation:
        """Reset every env, then step until each has finished ``episodes_per_env`` episodes.

        Args:
            weights: ``policy_weights`` of the actor.
            on_frames: called with new video frames [F, H, W, 3], until ``num_frames`` of them.
        """
        self._collector.update_policy_weights_(weights)
        self._collector.reset()
        self._collector.map_fn("env.recorder.start")
        if self.num_frames:
            self._collector.map_fn("env.start_frames")
        rows, counts, steps, num_frames = [], np.zeros(self.num_envs, int), 0, 0
        while not self.stop:
            next(self._rollouts)
            steps += self.rollout_steps
            (new,) = self._collector.map_fn("env.recorder.take")
            if len(new):
                rows.append(new)
                np.add.at(counts, new[:, 0].astype(int), 1)
            if num_frames < self.num_frames:
                assert on_frames is not None
                (frames,) = self._collector.map_fn("env.take_frames")
                num_frames += len(frames)
                on_frames(frames)
            enough = (counts >= episodes_per_env).all() or steps > episodes_per_env * self._max_steps
            if enough and num_frames >= self.num_frames:
                break
        table = np.concatenate(rows) if rows else np.zeros((0, 4 + len(self._log_names)))
        return count_episodes(table, self._log_names, num_envs=self.num_envs, episodes_per_env=episodes_per_env)

    def shutdown(self) -> None:
        self._collector.shutdown()


def policy_weights(actor: TensorDictModuleBase) -> TensorDictBase:
    """A copy of the actor's weights in host memory, in the form that ``Evaluator.evaluate`` takes."""
    return TensorDict.from_module(EvaluationPolicy(actor)).data.cpu().clone()


class PeriodicEvaluation:
    """Evaluates every ``interval`` iterations beside training, and keeps the best policy's checkpoint.

    Everything that waits for the simulator happens in a thread: training goes on with the next iteration. What
    comes due while an evaluation is still running is left out. The last iteration waits, so that a run's
    last row and its best checkpoint take in the final policy.

    Args:
        make_evaluator: starts the ``Evaluator``; called in the thread, which lives as long as this object,
            because the simulator's process dies with the thread that started it.
        interval: iterations.
        best_path: where the checkpoint with the highest mean return goes. One that is there already is the one to
            beat.
        video_dir: gets a video of each evaluation, if the evaluator draws frames.

    Attributes:
        video: of the evaluation that the last ``step`` returned; None if there is none.
    """

    COLUMNS = ("eval/return", "eval/return_std", "eval/length", "eval/iteration")

    def __init__(
        self,
        make_evaluator: Callable[[], Evaluator],
        *,
        interval: int,
        best_path: Path,
        video_dir: Path | None = None,
    ):
        self.interval, self.best_path, self.video_dir = interval, best_path, video_dir
        self.video: Path | None = None
        self.best_return = -math.inf
        if best_path.exists():
            try:
                self.best_return = load_checkpoint(best_path, entries=("eval_return",))["eval_return"]
            except ValueError as error:
                warnings.warn(f"{error} The next evaluation replaces it.", stacklevel=2)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evaluation")
        self._make_evaluator = make_evaluator
        self._evaluator: Future[Evaluator] = self._thread.submit(make_evaluator)
        self._running: tuple[Future[Evaluation], dict[str, Any]] | None = None

    def step(self, actor: TensorDictModuleBase, state: dict[str, Any], *, last: bool = False) -> dict[str, float]:
        """Call once an iteration, after its update.

        Args:
            state: the checkpoint of this iteration; copied where it is needed later.
            last: this is the run's last iteration.

        Returns:
            ``COLUMNS``: of an evaluation that has finished since the last call, else NaN.
        """
        metrics: dict[str, float] = dict.fromkeys(self.COLUMNS, math.nan)
        self.video = None
        if self._running is not None and (last or self._running[0].done()):
            metrics = self._finish()
        if self._running is None and (last or state["iteration"] % self.interval == 0):
            result = self._thread.submit(self._evaluate, policy_weights(actor), state["iteration"])
            self._running = result, tree_map(_to_host, state)
            if last:
                metrics = self._finish()
        return metrics

    def _video_path(self, iteration: int) -> Path:
        assert self.video_dir is not None
        return self.video_dir / f"iteration_{iteration:07d}.mp4"

    def _evaluate(self, weights: TensorDictBase, iteration: int) -> Evaluation:
        evaluator = self._evaluator.result()
        if self.video_dir is None:
            return evaluator.evaluate(weights)
        frames: list[np.ndarray] = []
        evaluation = evaluator.evaluate(weights, on_frames=frames.append)
        if frames:
            write_mp4(self._video_path(iteration), np.concatenate(frames), fps=1 / evaluator.step_dt)
        return evaluation

    def _finish(self) -> dict[str, float]:
        assert self._running is not None
        (result, state), self._running = self._running, None
        try:
            evaluation = result.result()
        except WorkerFault as fault:  # no reason to end a training that is well
            warnings.warn(f"evaluation of iteration {state['iteration']} lost: {fault}; it starts again", stacklevel=2)
            self._shutdown_later(self._evaluator)
            self._evaluator = self._thread.submit(self._make_evaluator)
            return dict.fromkeys(self.COLUMNS, math.nan)
        if not len(evaluation.returns):
            return dict.fromkeys(self.COLUMNS, math.nan)
        if self.video_dir is not None and self._video_path(state["iteration"]).exists():
            self.video = self._video_path(state["iteration"])
        mean = float(evaluation.returns.mean())
        if mean > self.best_return:
            self.best_return = mean
            try:
                save_checkpoint(self.best_path, state | {"eval_return": mean})
            except OSError as error:
                warnings.warn(f"{self.best_path} not written, training goes on: {error}", stacklevel=2)
        values = (mean, float(evaluation.returns.std()), float(evaluation.lengths.mean()), state["iteration"])
        return dict(zip(self.COLUMNS, values, strict=True))

    def close(self) -> None:
        """End a running evaluation and the simulator."""
        if self._evaluator.done() and self._evaluator.exception() is None:
            self._evaluator.result().stop = True
        self._shutdown_later(self._evaluator).result()
        self._thread.shutdown()

    def _shutdown_later(self, evaluator: Future[Evaluator]) -> Future[Any]:
        """In the thread, behind what it has been given."""
        return self._thread.submit(lambda: evaluator.exception() or evaluator.result().shutdown())


def make_evaluation(
    *,
    create_env_fn: Callable[..., EnvBase],
    make_actor: Callable[..., TensorDictModuleBase],
    interval: int | None,
    num_envs: int,
    run_dir: Path,
    device: torch.device | str,
    seed: int,
    num_frames: int | None = None,
) -> PeriodicEvaluation | NoEvaluation:
    """Evaluation beside training; with ``interval`` None there is none.

    Args:
        create_env_fn, make_actor, num_envs, device: see ``Evaluator``.
        run_dir: gets ``checkpoints/best.pt``, and ``videos``.
        seed: of training; the evaluation's is another.
        num_frames: of the video of each evaluation; None for no video.
    """
    if interval is None:
        return NoEvaluation()
    make_evaluator = partial(
        Evaluator,
        create_env_fn=create_env_fn,
        make_actor=make_actor,
        num_envs=num_envs,
        num_frames=num_frames or 0,
        background=True,
        device=device,
        seed=seed + SEED_OFFSET,
    )
    return PeriodicEvaluation(
        make_evaluator,
        interval=interval,
        best_path=run_dir / CHECKPOINT_DIR / BEST_NAME,
        video_dir=run_dir / "videos" if num_frames else None,
    )


def evaluation_overrides(trained: Sequence[str], given: Sequence[str] = ()) -> list[str]:
    """The task overrides of training, where ``given`` has no other; number of envs and seed are an evaluation's own."""
    keys = {"env.scene.num_envs", "env.seed"} | {token.partition("=")[0] for token in given}
    return [token for token in trained if token.partition("=")[0] not in keys] + list(given)


class NoEvaluation:
    """Training without evaluation."""

    video = None

    def step(self, actor: TensorDictModuleBase, state: dict[str, Any], *, last: bool = False) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def _to_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
