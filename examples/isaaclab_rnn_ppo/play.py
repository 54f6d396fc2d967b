"""Roll a trained policy, report, record: ``python examples/isaaclab_rnn_ppo/play.py --help``."""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from isaaclab_rnn_ppo.train import make_actor, model_factory
from isaaclab_rnn_ppo.utils import (
    Interrupted,
    WorkerFault,
    interruptible,
    make_env,
    quiet_libraries,
    resolve_asset_root,
)
from isaaclab_rnn_ppo.utils.config import Parser, resolve_device, user_errors
from isaaclab_rnn_ppo.utils.evaluate import Evaluator, evaluation_overrides, policy_weights
from isaaclab_rnn_ppo.utils.restore import (
    add_checkpoint_flags,
    check_output,
    open_checkpoint,
    resolve_checkpoint,
    restore_actor,
)
from isaaclab_rnn_ppo.utils.video import add_camera, write_gif, write_mp4

NUM_ENVS = 64


def positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise ValueError
    return value


def size(text: str) -> tuple[int, int]:
    width, height = (positive(part) for part in text.split("x"))
    if width % 2 or height % 2:
        raise ValueError
    return width, height


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(prog="play.py", description=__doc__, allow_abbrev=False)
    add_checkpoint_flags(parser)
    parser.add_argument("--num-envs", type=positive, help=f"environments (default: {NUM_ENVS}, with a video 1)")
    parser.add_argument("--episodes", type=positive, default=1, help="episodes of every environment (default: 1)")
    parser.add_argument("--sampled", action="store_true", help="act as in training instead of with the mean action")
    parser.add_argument("--seed", type=int, default=1000, help="of the environments (default: %(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--asset-root", default="auto", help="auto, official, bundled or a folder with Isaac assets")
    parser.add_argument("--json", type=Path, help="file for the report")
    parser.add_argument("--video", type=Path, help=".mp4 file for a video of the first environment")
    parser.add_argument("--gif", type=Path, help=".gif file for the same")
    parser.add_argument("--video-length", type=positive, default=300, help="frames, one a step (default: %(default)s)")
    parser.add_argument(
        "--video-size", type=size, default=(320, 240), metavar="WIDTHxHEIGHT", help="pixels, even (default: 320x240)"
    )
    args, tokens = parser.parse_known_args(argv)
    for token in tokens:
        if not re.match(r"(env\.[\w.]+|physics|renderer)=", token):
            parser.error(f"{token}: neither a flag nor env.KEY=VALUE.")
    for flag, path, suffix in (("--video", args.video, ".mp4"), ("--gif", args.gif, ".gif"), ("--json", args.json, "")):
        if path is None:
            continue
        if suffix and path.suffix.lower() != suffix:
            parser.error(f"{flag} {path}: must end in {suffix}.")
        try:
            check_output(flag, path)
        except ValueError as error:
            parser.error(str(error))
    args.device = resolve_device(args.device, parser)
    args.record = args.video is not None or args.gif is not None
    args.num_envs = args.num_envs or (1 if args.record else NUM_ENVS)
    args.env_overrides = tokens
    return args


def print_report(report: dict[str, Any], console: Console) -> None:
    table = Table("", "mean", "std", "min", "max", title=f"{report['task']}, iteration {report['iteration']}")
    for name in ("return", "length_steps"):
        cells = (report[name][key] for key in ("mean", "std", "min", "max"))
        table.add_row(name, *("-" if cell is None else f"{cell:.3f}" for cell in cells))
    console.print(table)
    table = Table("ended by", "episodes", "share", title=f"{report['episodes']} episodes")
    for name, count in report["terminations"].items():
        table.add_row(name, str(count), f"{count / max(report['episodes'], 1):.1%}")
    console.print(table)
    for name, value in report["log"].items():
        if "success" in name.lower() and not name.startswith("Episode_Reward/") and value is not None:
            console.print(f"{name}: {value:.4g}")
    if report["unfinished_envs"]:
        console.print(f"{report['unfinished_envs']} environments did not finish their episodes in time.")


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    quiet_libraries()
    with user_errors("play.py"):
        path = resolve_checkpoint(args.checkpoint, log_dir=args.log_dir, task=args.task)
        checkpoint = open_checkpoint(path, task=args.task)
        actor = restore_actor(checkpoint, model_factory)
        settings = argparse.Namespace(**checkpoint["config"] | {"device": args.device, "rnn_backend": "auto"})
        asset_root, asset_line = resolve_asset_root(args.asset_root, task=settings.task)
    print(f"checkpoint: {path} ({settings.task}, iteration {checkpoint['iteration']})\n{asset_line}", flush=True)

    width, height = args.video_size
    info = checkpoint["task_info"]
    with user_errors("play.py"):
        evaluator = Evaluator(
            create_env_fn=partial(
                make_env,
                settings.task,
                device=args.device,
                overrides=evaluation_overrides(settings.env_overrides, args.env_overrides),
                asset_root=asset_root,
                configure=partial(add_camera, width=width, height=height) if args.record else None,
            ),
            make_actor=partial(make_actor, model_factory(settings)),
            num_envs=args.num_envs,
            deterministic=not args.sampled,
            sizes={"policy": info["observation_sizes"]["policy"], "action": info["num_actions"]},
            num_frames=args.video_length if args.record else 0,
            device=args.device,
            seed=args.seed,
        )
    frames: list[np.ndarray] = []
    try:
        result = evaluator.evaluate(policy_weights(actor), episodes_per_env=args.episodes, on_frames=frames.append)
    except WorkerFault as fault:
        print(f"play.py: error: {fault}", file=sys.stderr)
        raise SystemExit(1) from None
    finally:
        evaluator.shutdown()

    report = {
        "task": settings.task,
        "checkpoint": str(path),
        "iteration": checkpoint["iteration"],
        "deterministic": not args.sampled,
        "seed": args.seed,
        "num_envs": args.num_envs,
        **result.summary(),
    }
    print_report(report, Console())
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    if args.record:
        video = np.concatenate(frames)[: args.video_length]
        fps = 1 / evaluator.step_dt
        if args.video is not None:
            write_mp4(args.video, video, fps)
        if args.gif is not None:
            write_gif(args.gif, video, fps)


if __name__ == "__main__":
    try:
        with interruptible():
            main()
    except Interrupted as stop:
        sys.exit(stop.exit_code)
