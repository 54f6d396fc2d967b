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
    EpisodeStatistics,
    Models,
    RunLogger,
    bytes_of,
    checkpoint_path,
    load_checkpoint,
    load_model,
    make_advantage,
    make_collector,
    make_env,
    make_loss,
    make_models,
    make_update,
    minibatches,
    parse_args,
    quiet_libraries,
    resolve_asset_root,
    save_checkpoint,
    user_errors,
)


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def make_run_dir(args: argparse.Namespace) -> Path:
    """``log_dir/task/timestamp-seed``, holding the resolved settings, which are printed once."""
    run_dir = Path(args.log_dir) / args.task / f"{datetime.now():%Y%m%d-%H%M%S}-{args.seed}"
    run_dir.mkdir(parents=True)
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
        device=args.device,
    )


def make_actor(factory: Callable[..., Models], **specs) -> nn.Module:
    """What a worker runs."""
    return factory(**specs).actor


def learn(
    training: TensorDictBase, update: Callable[[TensorDictBase], dict[str, torch.Tensor]], args: argparse.Namespace
) -> dict[str, torch.Tensor]:
    """Epochs x minibatches of ``update``; means of its metrics, on the device."""
    sums: dict[str, torch.Tensor] = {}
    for _ in range(args.num_epochs):
        for env_ids in minibatches(len(training), args.num_minibatches, training.device):
            for name, value in update(training[env_ids]).items():
                sums[name] = sums.get(name, 0) + value
    return {name: value / (args.num_epochs * args.num_minibatches) for name, value in sums.items()}


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
        checkpoint: dict[str, Any] | None = load_checkpoint(args.resume) if args.resume else None
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
            make_policy=partial(make_actor, model_factory(args)),
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
        episodes = EpisodeStatistics(collector.getattr_env("log_names"))

        advantage = make_advantage(
            value_operator=models.value_operator,
            gamma=args.gamma,
            gae_lambda=args.gae_lambda,
            vectorized=args.vectorized_gae,
        )
        loss_module = make_loss(
            actor=models.actor,
            value_head=models.value_head,
            clip_epsilon=args.clip_epsilon,
            entropy_coeff=args.entropy_coeff,
            value_coeff=args.value_coeff,
        )
        optimizer = torch.optim.Adam(loss_module.parameters(), lr=args.learning_rate)

        if checkpoint:
            with user_errors():
                load_model(loss_module, checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])

        update = make_update(
            loss_module=loss_module,
            optimizer=optimizer,
            clip_grad_norm=args.clip_grad_norm,
            compile_mode=args.compile,
            cudagraphs=args.cudagraphs and args.device.startswith("cuda"),
            cudagraph_warmup=args.cudagraph_warmup,
        )

        run_dir = make_run_dir(args)
        logger = RunLogger(run_dir, kind=args.logger, num_iterations=args.iterations, first_iteration=first)
        rollouts = iter(collector)
        for iteration in range(first + 1, args.iterations + 1):
            with timeit("collect"):
                collector.update_policy_weights_(models.actor)
                batch = next(rollouts).to(args.device)
            with timeit("learn"):
                training = advantage(batch)
                losses = learn(training, update, args)
            metrics = summarize(
                iteration,
                frames,
                batch,
                training,
                losses,
                episodes.update(batch["episodes"]),
                collector.policy_version,
                args.learning_rate,
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
                }
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
