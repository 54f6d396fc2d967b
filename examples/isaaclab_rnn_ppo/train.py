"""Recurrent PPO on an Isaac Lab task: ``python examples/isaaclab_rnn_ppo/train.py --help``."""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from tensordict import TensorDictBase
from torch import nn
from torchrl._utils import timeit
from torchrl.checkpoint import GlobalRNGState

from isaaclab_rnn_ppo.utils import (
    AdaptiveLR,
    AgreedStop,
    EpisodeStatistics,
    Interrupted,
    Models,
    NoEvaluation,
    NoLogger,
    NonFiniteRun,
    Objective,
    RestartingCollector,
    RunLogger,
    WorkerFault,
    accelerate,
    apply_schedules,
    bytes_of,
    check_output,
    check_settings,
    check_skipped,
    checkpoint_path,
    compile_seconds,
    critic_flags,
    data_parallel,
    evaluation_overrides,
    from_first_rank,
    gather_on_first_rank,
    interruptible,
    lost_contact,
    make_advantage,
    make_collector,
    make_critic_loss,
    make_env,
    make_evaluation,
    make_loss,
    make_models,
    make_optimizer,
    make_update,
    mark_run,
    num_ranks,
    parse_args,
    quiet_libraries,
    rank,
    require_agreement,
    resolve_asset_root,
    restarted_run,
    restore_rng,
    resume_from,
    save_checkpoint,
    seed_of_rank,
    torchrun_variable,
    user_errors,
    versions,
)
from isaaclab_rnn_ppo.utils.rnn import EAGER_BACKENDS
from isaaclab_rnn_ppo.utils.video import add_camera

# What a rank waits for another beyond the time in which a collector must answer: the start of a simulator.
RANK_TIMEOUT_S = 300.0


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def find_resume(args: argparse.Namespace, *, restarted: bool) -> tuple[Path, dict[str, Any]] | None:
    """Checkpoint to go on from, path and content: ``--resume``'s, or this job's own after a restart of its ranks."""
    own = restarted_run(args.resume, log_dir=args.log_dir, task=args.task) if restarted else None
    resume = own or args.resume
    return resume_from(resume, log_dir=args.log_dir, task=args.task) if resume else None


def make_run_dir(args: argparse.Namespace, resumed: Path | None) -> Path:
    """The resumed run's folder or ``log_dir/task/timestamp-seed``; saves and prints the settings. On rank 0."""
    if resumed is not None:
        run_dir = resumed.parent.parent
    else:
        run_dir = Path(args.log_dir) / args.task / f"{datetime.now():%Y%m%d-%H%M%S}-{args.seed}"
    run_dir.mkdir(parents=True, exist_ok=True)
    mark_run(run_dir)
    settings = yaml.safe_dump(vars(args), sort_keys=False)
    (run_dir / "config.yaml").write_text(settings)
    print(f"{settings}run folder: {run_dir}", flush=True)
    return run_dir


def model_factory(args: argparse.Namespace) -> Callable[..., Models]:
    """``make_models`` with the settings of this run; the specs are still to come."""
    return partial(
        make_models,
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        rnn=args.rnn,
        rnn_backend=args.rnn_backend,
        rnn_recompute=args.rnn_recompute,
        embedding=args.actor_hidden,
        head_hidden=args.head_hidden,
        activation=args.activation,
        action_dist=args.action_dist,
        init_std=args.init_std,
        normalize_obs=args.normalize_obs,
        normalize_value=args.normalize_value,
        memory_horizon=args.memory_horizon,
        amp=args.amp,
        critic_obs=args.critic_obs,
        critic_hidden_size=args.critic_hidden_size,
        critic_num_layers=args.critic_num_layers,
        critic_embedding=args.critic_hidden,
        critic_head_hidden=args.critic_head_hidden,
        device=args.device,
    )


def make_worker_policy(factory: Callable[..., Models], **specs) -> nn.Module:
    """What a worker runs."""
    return factory(**specs).collector_policy


def make_actor(factory: Callable[..., Models], **specs) -> nn.Module:
    """What an evaluation runs."""
    return factory(**specs).actor


def make_objectives(models: Models, args: argparse.Namespace) -> list[Objective]:
    """The policy's, and a separate critic's; compiled and captured here."""
    value_options = {
        "value_coeff": args.value_coeff,
        "value_clip": args.value_clip,
        "value_normalizer": models.value_normalizer,
    }
    update_options = {
        "cudagraphs": args.cudagraphs and args.device.startswith("cuda"),
        "cudagraph_warmup": args.cudagraph_warmup,
        "cudagraph_trees": args.cudagraph_trees,
        "fullgraph": args.rnn_backend not in EAGER_BACKENDS,
    }
    loss = make_loss(
        actor=models.actor,
        value_head=models.value_head,
        clip_epsilon=args.clip_epsilon,
        entropy_coeff=args.entropy_coeff,
        bounds_coeff=args.bounds_coeff,
        action_bound=args.action_bound,
        **value_options,
    )
    optimizer = make_optimizer(loss.parameters(), args.learning_rate)
    adapt_lr = None
    if args.lr_schedule == "adaptive":
        adapt_lr = AdaptiveLR(optimizer, desired_kl=args.desired_kl, highest=args.max_learning_rate)
    update = make_update(
        loss_module=loss,
        optimizer=optimizer,
        clip_grad_norm=args.clip_grad_norm,
        adapt_lr=adapt_lr,
        compile_mode=args.compile,
        **update_options,
    )
    policy = Objective(
        "model", loss, optimizer, update, args.num_epochs, args.num_minibatches, args.target_kl, adapt_lr
    )
    if not models.has_separate_critic:
        return [policy]

    loss = make_critic_loss(value_operator=models.value_operator, **value_options)
    optimizer = make_optimizer(loss.parameters(), args.critic_learning_rate or args.learning_rate)
    update = make_update(
        loss_module=loss,
        optimizer=optimizer,
        clip_grad_norm=args.critic_clip_grad_norm or args.clip_grad_norm,
        compile_mode=args.compile_critic or args.compile,
        **update_options,
    )
    num_epochs = args.critic_num_epochs or args.num_epochs
    num_minibatches = args.critic_num_minibatches or args.num_minibatches
    return [policy, Objective("critic", loss, optimizer, update, num_epochs, num_minibatches)]


def summarize(
    iteration: int,
    frames: int,
    batch: TensorDictBase,
    training: TensorDictBase,
    losses: list[dict[str, torch.Tensor]],
    episodes: EpisodeStatistics,
    objectives: list[Objective],
    collector: RestartingCollector,
) -> dict[str, float]:
    """One row of ``metrics.csv``. Reads the device once for each entry."""
    seconds = timeit.todict(percall=False)
    timeit.erase()
    num_frames = batch["steps"].numel()  # of this rank, as the times are
    oldest = int(batch["steps", "policy_version"].min())
    ended = episodes.update(batch["episodes"])
    policy_losses, *critic_losses = losses
    skipped = sum(int(means.pop("skipped_updates")) for means in losses)
    for extra in critic_losses:
        policy_losses |= {name if name == "loss_value" else f"critic_{name}": value for name, value in extra.items()}
    return {
        "iteration": iteration,
        "frames": frames,
        "episode_return": ended.pop("episode_return"),
        "episode_length": ended.pop("episode_length"),
        "fps": num_ranks() * num_frames / (seconds["collect"] + seconds["learn"]),
        "collect_s": seconds["collect"],
        "learn_s": seconds["learn"],
        "compile_s": compile_seconds(),
        **{name: float(value) for name, value in policy_losses.items()},
        "lr": float(objectives[0].optimizer.param_groups[0]["lr"]),
        "policy_version": oldest,
        "staleness": collector.policy_version - oldest,
        "worker_restarts": collector.num_restarts,
        "skipped_updates": skipped,
        "bootstrap_approximated": int(training["bootstrap_approximated"].sum()),
        "bytes_per_transition": bytes_of(batch) / num_frames,
        **ended,
    }


def schedule(objectives: list[Objective], iteration: int, args: argparse.Namespace) -> None:
    """Learning rates and coefficients of this iteration."""
    apply_schedules(
        objectives,
        iteration,
        args.iterations,
        learning_rate=args.learning_rate,
        lr_schedule=args.lr_schedule,
        max_learning_rate=args.max_learning_rate,
        max_learning_rate_final=args.max_learning_rate_final,
        entropy_coeff=args.entropy_coeff,
        entropy_coeff_final=args.entropy_coeff_final,
        critic_learning_rate=args.critic_learning_rate,
    )


def check_critic(models: Models, args: argparse.Namespace) -> None:
    """Refuse flags of a separate critic where there is none: what groups a task has, only its env knows."""
    if not models.has_separate_critic and (given := critic_flags(args)):
        raise ValueError(
            f"{given[0]}: {args.task} has no `critic` observation group, so actor and value share one "
            "backbone; --critic-obs policy gives the critic its own."
        )


def print_notes(args: argparse.Namespace) -> None:
    """What the user asked for and cannot have, or has to wait for."""
    if args.cudagraphs and not args.device.startswith("cuda"):
        print("--cudagraphs: CUDA graphs need a CUDA device; the update runs without.", flush=True)
    if args.compile:
        print(f"--compile {args.compile}: the first iterations pay for the compilation.", flush=True)
        if args.rnn_backend in EAGER_BACKENDS:
            print(f"--rnn-backend {args.rnn_backend}: its recurrent part stays eager under --compile.", flush=True)


def training_state(
    iteration: int,
    frames: int,
    collector: RestartingCollector,
    episodes: EpisodeStatistics,
    objectives: list[Objective],
    task_info: dict[str, Any],
    args: argparse.Namespace,
) -> dict[str, Any]:
    """A copy of everything that a checkpoint holds: the next iteration may be interrupted anywhere."""
    state = {
        "iteration": iteration,
        "frames": frames,
        "policy_version": collector.policy_version,
        "episodes": episodes.state_dict(),
        "rng": GlobalRNGState().state_dict(),
        "workers": [],
        "rank_rng": [],
        "config": vars(args),
        "task_info": task_info,
        "versions": versions(),
    }
    for objective in objectives:
        state |= objective.state_dict()
    return deepcopy(state)


def state_of_ranks(collector: RestartingCollector) -> dict[str, Any]:
    """What a checkpoint holds of all ranks, on rank 0: workers in their order, random numbers of ranks 1 and up."""
    gathered = gather_on_first_rank((collector.save_workers(), GlobalRNGState().state_dict()))
    return {
        "workers": [worker for workers, _ in gathered for worker in workers],
        "rank_rng": [rng for _, rng in gathered[1:]],
    }


def restore_rank(collector: RestartingCollector, checkpoint: dict[str, Any], seed: int) -> None:
    """Workers and random numbers of this rank, as ``state_of_ranks`` saved them, else new ones."""
    share = len(checkpoint["workers"]) // num_ranks()
    workers = checkpoint["workers"][rank() * share :][:share]
    rng = [checkpoint["rng"], *checkpoint["rank_rng"]]
    if lost := collector.restore_workers(workers):
        print(f"--resume: new episodes: {lost}.", flush=True)
    if rank() >= len(rng):
        seed_everything(seed + checkpoint["iteration"])
    elif not restore_rng(rng[rank()]):
        print("--resume: new random numbers on CUDA: the checkpoint is of other devices.", flush=True)


def farewell(stop: Interrupted | RuntimeError, run_dir: Path | None) -> str:
    """Why the run ends early, and how to go on."""
    reason = f"stopped by {stop}" if isinstance(stop, Interrupted) else f"train.py: error: {stop}"
    if lost_contact(stop):
        reason = "train.py: error: another rank is gone (torchrun names it below)"
    if num_ranks() > 1:
        reason = f"rank {rank()}: {reason}"
    return f"{reason}; nothing to resume." if run_dir is None else f"{reason}; --resume {run_dir} continues the run."


def save_or_warn(run_dir: Path, state: dict[str, Any], keep: int) -> None:
    """Training goes on when the disk is full; the checkpoint before is still there. Rank 0 writes it."""
    if rank() > 0:
        return
    try:
        save_checkpoint(checkpoint_path(run_dir, state["iteration"]), state, keep=keep)
    except OSError as error:
        warnings.warn(f"no checkpoint written, training goes on: {error}", stacklevel=2)


def train(args: argparse.Namespace) -> None:
    quiet_libraries()
    if args.num_threads is not None:
        torch.set_num_threads(args.num_threads)
    seed_everything(args.seed)
    rank_seed = seed_of_rank(args.seed)
    with user_errors():
        # A node's torchrun counts only the restarts that its own ranks caused, so rank 0's may know of none.
        restarted = any(gather_on_first_rank(torchrun_variable("TORCHELASTIC_RESTART_COUNT")))
        resumed = from_first_rank(partial(find_resume, args, restarted=restarted))
        path, checkpoint = resumed or (None, None)
        if checkpoint:
            check_settings(checkpoint, vars(args))
        run_folder = path.parent.parent if path else Path(args.log_dir) / args.task
        from_first_rank(partial(check_output, "--log-dir", run_folder / "config.yaml"))
        asset_root, asset_line = resolve_asset_root(args.asset_root, task=args.task)
    if rank() == 0:
        print(asset_line, flush=True)
        print_notes(args)

    # The simulator lives in the collector's subprocesses; the specs come back from there.
    collector = logger = state = run_dir = None
    evaluation: Any = NoEvaluation()
    create_env_fn = partial(make_env, args.task, device=args.device, asset_root=asset_root)
    try:
        with user_errors():
            collector = RestartingCollector(
                partial(
                    make_collector,
                    create_env_fn=partial(
                        create_env_fn,
                        overrides=args.env_overrides,
                        # Not after a resume: their short episodes would show as a dip of the returns.
                        stagger_episodes=args.stagger_episodes and checkpoint is None,
                    ),
                    make_policy=partial(make_worker_policy, model_factory(args)),
                    num_envs=args.num_envs,
                    rollout_steps=args.rollout_steps,
                    num_collectors=args.num_collectors,
                    collector_devices=args.collector_devices,
                    boundary_slots=args.boundary_slots,
                    async_collection=args.async_collection,
                    backend=args.collector_backend,
                    device=args.device,
                    worker_timeout_s=args.worker_timeout,
                    accelerate_policy=args.compile_policy,
                ),
                seed=rank_seed,
                max_restarts=args.max_worker_restarts,
                first_version=checkpoint["policy_version"] if checkpoint else 0,
            )
            models = model_factory(args)(
                observation_spec=collector.getattr_env("observation_spec"),
                action_spec=collector.getattr_env("action_spec"),
            )
            check_critic(models, args)
        advantage = accelerate(
            make_advantage(
                value_operator=models.value_operator,
                gamma=args.gamma,
                gae_lambda=args.gae_lambda,
                vectorized=args.vectorized_gae,
                reward_scale=args.reward_scale,
            ),
            compile_mode=args.compile,
            fullgraph=args.rnn_backend not in EAGER_BACKENDS,
        )
        objectives = make_objectives(models, args)
        episodes = EpisodeStatistics(collector.getattr_env("log_names"))
        task_info = collector.getattr_env("task_info")
        if checkpoint:
            with user_errors():
                for objective in objectives:
                    objective.load_state_dict(checkpoint)
            episodes.load_state_dict(checkpoint["episodes"])
            restore_rank(collector, checkpoint, rank_seed)
        elif rank() > 0:
            seed_everything(rank_seed)  # parameters were drawn alike, what follows differs

        run_dir = from_first_rank(partial(make_run_dir, args, path))
        iteration, frames = (checkpoint["iteration"], checkpoint["frames"]) if checkpoint else (0, 0)
        make_logger = RunLogger if rank() == 0 else NoLogger
        logger = make_logger(run_dir, kind=args.logger, num_iterations=args.iterations, first_iteration=iteration)
        evaluation = make_evaluation(
            create_env_fn=partial(
                create_env_fn,
                overrides=evaluation_overrides(args.env_overrides),
                configure=partial(add_camera, width=320, height=240) if args.eval_video else None,
            ),
            make_actor=partial(make_actor, model_factory(args)),
            interval=args.eval_interval if rank() == 0 else None,
            num_envs=args.eval_num_envs,
            num_frames=args.eval_video,
            run_dir=run_dir,
            device=args.device,
            seed=args.seed,
        )
        agreed_stop = AgreedStop()
        while iteration < args.iterations:
            iteration += 1
            schedule(objectives, iteration, args)
            with timeit("collect"):
                batch = collector.collect(models.collector_policy).to(args.device)
            with timeit("learn"):
                training = advantage(batch)
                losses = [objective.learn(training) for objective in objectives]
                if args.freeze_normalizer_after is None or iteration <= args.freeze_normalizer_after:
                    models.update_normalizers(training["steps"])
            for objective in objectives:
                require_agreement(objective.loss.state_dict().values(), f"parameters of iteration {iteration}")
            frames += batch["steps"].numel() * num_ranks()
            metrics = summarize(iteration, frames, batch, training, losses, episodes, objectives, collector)
            state = training_state(iteration, frames, collector, episodes, objectives, task_info, args)
            metrics |= evaluation.step(models.actor, state, last=iteration == args.iterations)
            logger.log(metrics, step=frames)
            if evaluation.video is not None:
                logger.log_video(evaluation.video, step=frames)
            check_skipped(
                batch,
                iteration=iteration,
                skipped=metrics["skipped_updates"],
                in_a_row=max(int(objective.skipped_in_a_row) for objective in objectives),
                max_in_a_row=args.max_skipped_updates,
                run_dir=run_dir,
            )
            if iteration % args.checkpoint_interval == 0 or iteration == args.iterations:
                save_or_warn(run_dir, state | state_of_ranks(collector), args.keep_checkpoints)
            agreed_stop.check()
    except (Interrupted, RuntimeError) as stop:
        if not isinstance(stop, Interrupted | WorkerFault | NonFiniteRun) and not lost_contact(stop):
            raise
        if run_dir is not None and state is not None:  # the last whole iteration: what was in flight is abandoned
            save_or_warn(run_dir, state, args.keep_checkpoints)
        resumable = run_dir if state else path and path.parent.parent
        print(farewell(stop, resumable), file=sys.stderr, flush=True)
        raise SystemExit(stop.exit_code if isinstance(stop, Interrupted) else 1) from None
    finally:
        if collector is not None:
            collector.shutdown()
        if logger is not None:
            logger.close()
        evaluation.close()


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    with data_parallel(args.device, timeout_s=args.worker_timeout + RANK_TIMEOUT_S):
        train(args)


if __name__ == "__main__":
    try:
        with interruptible():
            main()
    except Interrupted as stop:  # before the run began
        sys.exit(stop.exit_code)
