"""Recurrent PPO on an Isaac Lab task: ``python examples/isaaclab_rnn_ppo/train.py --help``."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
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

from isaaclab_rnn_ppo.utils import (
    AdaptiveLR,
    EpisodeStatistics,
    Models,
    RunLogger,
    bytes_of,
    check_settings,
    checkpoint_path,
    critic_flags,
    find_checkpoint,
    linear,
    load_checkpoint,
    load_model,
    make_advantage,
    make_collector,
    make_critic_loss,
    make_env,
    make_loss,
    make_models,
    make_optimizer,
    make_update,
    minibatches,
    parse_args,
    quiet_libraries,
    resolve_asset_root,
    save_checkpoint,
    set_learning_rate,
    user_errors,
)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_run_dir(args: argparse.Namespace, resumed: Path | None) -> Path:
    """The resumed run's folder or ``log_dir/task/timestamp-seed``; saves and prints the settings."""
    if resumed is not None:
        run_dir = resumed.parent.parent
    else:
        run_dir = Path(args.log_dir) / args.task / f"{datetime.now():%Y%m%d-%H%M%S}-{args.seed}"
    run_dir.mkdir(parents=True, exist_ok=True)
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


def learn(
    training: TensorDictBase,
    update: Callable[[TensorDictBase], dict[str, torch.Tensor]],
    num_epochs: int,
    num_minibatches: int,
    target_kl: float | None = None,
) -> dict[str, torch.Tensor]:
    """Epochs x minibatches of ``update``; means of its metrics, on the device.

    With ``target_kl`` the device is read once an epoch, and the epoch whose mean KL is above it is the last.
    """
    sums: dict[str, torch.Tensor] = {}
    epochs_done = 0
    while epochs_done < num_epochs:
        before = sums.get("kl", 0)
        for env_ids in minibatches(len(training), num_minibatches, training.device):
            for name, value in update(training[env_ids]).items():
                sums[name] = sums.get(name, 0) + value
        epochs_done += 1
        if target_kl is not None and sums["kl"] - before > target_kl * num_minibatches:
            break
    means = {name: value / (epochs_done * num_minibatches) for name, value in sums.items()}
    return means if target_kl is None else means | {"epochs_done": torch.tensor(epochs_done)}


def apply_schedules(
    iteration: int,
    loss_module: nn.Module,
    optimizer: torch.optim.Optimizer,
    critic_optimizer: torch.optim.Optimizer | None,
    args: argparse.Namespace,
) -> None:
    """Coefficients and learning rates of this iteration; the adaptive one moves inside the update."""
    entropy_coeff = args.entropy_coeff
    if args.entropy_coeff_final is not None:
        entropy_coeff = linear(entropy_coeff, args.entropy_coeff_final, iteration, args.iterations)
    loss_module.entropy_coeff.fill_(entropy_coeff)
    if args.lr_schedule == "linear":
        set_learning_rate(optimizer, linear(args.learning_rate, 0.0, iteration, args.iterations))
    if critic_optimizer is None:
        return
    if args.critic_learning_rate is None:
        set_learning_rate(critic_optimizer, optimizer.param_groups[0]["lr"])
    elif args.lr_schedule == "linear":
        set_learning_rate(critic_optimizer, linear(args.critic_learning_rate, 0.0, iteration, args.iterations))


def summarize(
    iteration: int,
    frames: int,
    batch: TensorDictBase,
    training: TensorDictBase,
    losses: dict[str, torch.Tensor],
    episodes: dict[str, float],
    version: int,
    learning_rate: float,
) -> dict[str, float]:
    """One row of ``metrics.csv``. Reads the device once for each entry."""
    seconds = timeit.todict(percall=False)
    timeit.erase()
    num_frames = batch["steps"].numel()
    oldest = int(batch["steps", "policy_version"].min())
    return {
        "iteration": iteration,
        "frames": frames + num_frames,
        "episode_return": episodes.pop("episode_return"),
        "episode_length": episodes.pop("episode_length"),
        "fps": num_frames / (seconds["collect"] + seconds["learn"]),
        "collect_s": seconds["collect"],
        "learn_s": seconds["learn"],
        **{name: float(value) for name, value in losses.items()},
        "lr": learning_rate,
        "policy_version": oldest,
        "staleness": version - oldest,
        "bootstrap_approximated": int(training["bootstrap_approximated"].sum()),
        "bytes_per_transition": bytes_of(batch) / num_frames,
        **episodes,
    }


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    quiet_libraries()
    seed_everything(args.seed)
    with user_errors():
        resumed = find_checkpoint(args.resume) if args.resume else None
        checkpoint: dict[str, Any] | None = load_checkpoint(resumed) if resumed else None
        if checkpoint:
            check_settings(checkpoint, vars(args))
        asset_root, asset_line = resolve_asset_root(args.asset_root, task=args.task)
        print(asset_line, flush=True)
    first = checkpoint["iteration"] if checkpoint else 0
    frames = checkpoint["frames"] if checkpoint else 0
    if args.cudagraphs and not args.device.startswith("cuda"):
        print("--cudagraphs: CUDA graphs need a CUDA device; the update runs without.", flush=True)
    if args.compile:
        print(f"--compile {args.compile}: the first iterations pay for the compilation.", flush=True)

    # The simulator lives in the collector's subprocesses; its specs come back from there.
    with user_errors():
        collector = make_collector(
            create_env_fn=partial(
                make_env, args.task, device=args.device, overrides=args.env_overrides, asset_root=asset_root
            ),
            make_policy=partial(make_worker_policy, model_factory(args)),
            num_envs=args.num_envs,
            rollout_steps=args.rollout_steps,
            num_collectors=args.num_collectors,
            boundary_slots=args.boundary_slots,
            async_collection=args.async_collection,
            device=args.device,
            seed=args.seed,
            first_version=checkpoint["policy_version"] if checkpoint else 0,
        )
    logger = None
    try:
        models = model_factory(args)(
            observation_spec=collector.getattr_env("observation_spec"),
            action_spec=collector.getattr_env("action_spec"),
        )
        if not models.has_separate_critic and (given := critic_flags(args)):
            with user_errors():
                raise ValueError(
                    f"{given[0]}: {args.task} has no `critic` observation group, so actor and value share one "
                    "backbone; --critic-obs policy gives the critic its own."
                )
        episodes = EpisodeStatistics(collector.getattr_env("log_names"))
        task_info = collector.getattr_env("task_info")

        advantage = make_advantage(
            value_operator=models.value_operator,
            gamma=args.gamma,
            gae_lambda=args.gae_lambda,
            vectorized=args.vectorized_gae,
            reward_scale=args.reward_scale,
        )
        value_options = {
            "value_coeff": args.value_coeff,
            "value_clip": args.value_clip,
            "value_normalizer": models.value_normalizer,
        }
        loss_module = make_loss(
            actor=models.actor,
            value_head=models.value_head,
            clip_epsilon=args.clip_epsilon,
            entropy_coeff=args.entropy_coeff,
            bounds_coeff=args.bounds_coeff,
            action_bound=args.action_bound,
            **value_options,
        )
        optimizer = make_optimizer(loss_module.parameters(), args.learning_rate)
        critic_loss = critic_optimizer = None
        if models.has_separate_critic:
            critic_loss = make_critic_loss(value_operator=models.value_operator, **value_options)
            critic_optimizer = make_optimizer(critic_loss.parameters(), args.critic_learning_rate or args.learning_rate)

        if checkpoint:
            with user_errors():
                load_model(loss_module, checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            if critic_loss is not None:
                with user_errors():
                    load_model(critic_loss, checkpoint["critic"])
                critic_optimizer.load_state_dict(checkpoint["critic_optimizer"])

        cudagraphs = args.cudagraphs and args.device.startswith("cuda")
        update = make_update(
            loss_module=loss_module,
            optimizer=optimizer,
            clip_grad_norm=args.clip_grad_norm,
            adapt_lr=AdaptiveLR(optimizer, desired_kl=args.desired_kl) if args.lr_schedule == "adaptive" else None,
            compile_mode=args.compile,
            cudagraphs=cudagraphs,
            cudagraph_warmup=args.cudagraph_warmup,
        )
        if models.has_separate_critic:
            critic_update = make_update(
                loss_module=critic_loss,
                optimizer=critic_optimizer,
                clip_grad_norm=args.critic_clip_grad_norm or args.clip_grad_norm,
                compile_mode=args.compile_critic or args.compile,
                cudagraphs=cudagraphs,
                cudagraph_warmup=args.cudagraph_warmup,
            )

        run_dir = make_run_dir(args, resumed)
        logger = RunLogger(run_dir, kind=args.logger, num_iterations=args.iterations, first_iteration=first)
        rollouts = iter(collector)
        for iteration in range(first + 1, args.iterations + 1):
            apply_schedules(iteration, loss_module, optimizer, critic_optimizer, args)
            with timeit("collect"):
                collector.update_policy_weights_(models.collector_policy)
                batch = next(rollouts).to(args.device)
            with timeit("learn"):
                training = advantage(batch)
                losses = learn(training, update, args.num_epochs, args.num_minibatches, args.target_kl)
                if models.has_separate_critic:
                    critic_losses = learn(
                        training,
                        critic_update,
                        args.critic_num_epochs or args.num_epochs,
                        args.critic_num_minibatches or args.num_minibatches,
                    )
                    losses["loss_value"], losses["critic_grad_norm"] = critic_losses.values()
                if args.freeze_normalizer_after is None or iteration <= args.freeze_normalizer_after:
                    models.update_normalizers(training["steps"])
            metrics = summarize(
                iteration,
                frames,
                batch,
                training,
                losses,
                episodes.update(batch["episodes"]),
                collector.policy_version,
                float(optimizer.param_groups[0]["lr"]),
            )
            frames = metrics["frames"]
            logger.log(metrics, step=frames)
            if iteration % args.checkpoint_interval == 0 or iteration == args.iterations:
                state = {
                    "model": loss_module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iteration": iteration,
                    "frames": frames,
                    "policy_version": collector.policy_version,
                    "config": vars(args),
                    "task_info": task_info,
                }
                if critic_loss is not None:
                    state |= {"critic": critic_loss.state_dict(), "critic_optimizer": critic_optimizer.state_dict()}
                save_checkpoint(checkpoint_path(run_dir, iteration), state)
    finally:
        collector.shutdown()
        if logger is not None:
            logger.close()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
