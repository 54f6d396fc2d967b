"""Command line: argparse flags, preset files, Hydra overrides."""

from __future__ import annotations

import argparse
import difflib
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException, HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from isaaclab_rnn_ppo.utils.models import ACTIVATIONS, DISTRIBUTIONS
from isaaclab_rnn_ppo.utils.ranks import torchrun_variable
from isaaclab_rnn_ppo.utils.rnn import BACKENDS, resolve_backend
from isaaclab_rnn_ppo.utils.rnn_unroll import unrolling_pays
from isaaclab_rnn_ppo.utils.schedules import LR_SCHEDULES
from isaaclab_rnn_ppo.utils.update import COMPILE_MODES

CONFIG_DIR = Path(__file__).resolve().parent.parent / "configs"
_TOKEN = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@-]*=")
_NUMBER = {int: "a whole number", float: "a number"}
_ENV_PREFIXES = ("env.", "physics=", "renderer=")  # Isaac Lab's own Hydra tokens


def int_list(text: str) -> list[int]:
    """``256,128`` -> [256, 128]; an empty text is an empty list."""
    return [int(part) for part in text.split(",") if part]


def name_list(text: str) -> list[str]:
    """``a,b`` -> ["a", "b"]."""
    return [part.strip() for part in text.split(",") if part.strip()]


@dataclass(frozen=True)
class Flag:
    """One setting: its type, help, and what values are valid."""

    kind: Callable[[str], Any]
    help: str
    valid: str = ""
    check: Callable[[Any], bool] = lambda value: True
    choices: tuple[str, ...] = ()


def _positive(kind: type, help: str) -> Flag:
    return Flag(kind, help, f"{_NUMBER[kind]} above 0", lambda value: value > 0)


def _at_least(minimum: float, kind: type, help: str) -> Flag:
    return Flag(kind, help, f"{_NUMBER[kind]} of at least {minimum}", lambda value: value >= minimum)


def _unit(help: str) -> Flag:
    return Flag(float, help, "a number from 0 to 1", lambda value: 0 <= value <= 1)


def _widths(help: str) -> Flag:
    return Flag(int_list, help, "widths above 0, like 256,128", lambda widths: all(width > 0 for width in widths))


FLAGS: dict[str, dict[str, Flag]] = {
    "task": {
        "task": Flag(str, "Isaac Lab task id"),
        "num_envs": _positive(int, "environments over all collectors; of each rank under torchrun"),
        "device": Flag(
            str, "auto, cpu, cuda or cuda:N, for simulation and learning; under torchrun auto and cuda are a GPU a rank"
        ),
        "num_threads": _positive(
            int, "CPU threads of torch in the learner and in each collector (null: OMP_NUM_THREADS, or all cores)"
        ),
        "seed": Flag(
            int,
            "seed of torch, numpy, python and the environments",
            "a whole number from 0 to 2147483647",
            lambda value: 0 <= value < 2**31,
        ),
        "iterations": _positive(int, "training iterations (a rollout and its updates)"),
        "asset_root": Flag(str, "auto, official, bundled or a folder with Isaac assets"),
    },
    "collection": {
        "rollout_steps": _positive(int, "steps an environment makes in an iteration"),
        "num_collectors": _positive(int, "simulator processes"),
        "collector_devices": Flag(
            name_list,
            "one collector on each of these devices, like cuda:1,cuda:2; the ranks of a node share them out "
            "(null: all on --device)",
            "one or more of cpu and cuda:N",
            bool,
        ),
        "collector_backend": Flag(
            str,
            "where collectors run: processes of this machine, or workers that Ray places (on the cluster that "
            "RAY_ADDRESS names, else one that is started and ended with the run)",
            choices=("multiprocess", "ray"),
        ),
        "async_collection": Flag(
            bool,
            "collect the next batch while learning from this one: a batch is one collector's, and its policy "
            "is one update older for each collector",
        ),
        "max_worker_restarts": _at_least(0, int, "times that a collector which died or hangs is started again"),
        "worker_timeout": _positive(float, "seconds without an answer after which a collector counts as dead"),
        "stagger_episodes": Flag(
            bool,
            "start the first episodes at random points of their time limit, so that time-outs do not fall together",
        ),
        "boundary_slots": _positive(
            int, "final observations kept for an environment in a rollout: its end, and truncations inside"
        ),
    },
    "model": {
        "rnn": Flag(str, "recurrent core", choices=("lstm", "gru", "none")),
        "rnn_backend": Flag(
            str,
            "how the core runs over a window when learning; collecting always takes one fused step",
            choices=BACKENDS,
        ),
        "rnn_recompute": Flag(bool, "recompute the gates in the backward pass: less memory, more time"),
        "hidden_size": _positive(int, "hidden units of the core"),
        "num_layers": _positive(int, "layers of the core"),
        "actor_hidden": _widths("widths of the MLP before the core, comma-separated"),
        "head_hidden": _widths("widths of the MLP between the core and each head"),
        "activation": Flag(str, "activation of the MLPs", choices=tuple(ACTIVATIONS)),
        "action_dist": Flag(str, "action distribution", choices=DISTRIBUTIONS),
        "init_std": _positive(float, "initial standard deviation of the policy, in action units"),
        "memory_horizon": _at_least(
            2, float, "longest time constant that the core starts with, in steps (chrono initialisation)"
        ),
        "normalize_obs": Flag(bool, "standardise observations by running statistics inside the model"),
        "normalize_value": Flag(bool, "standardise the value targets by running statistics"),
        "freeze_normalizer_after": _positive(int, "iterations after which the running statistics stay as they are"),
        "amp": Flag(
            str, "autocast of embedding and core; weights and recurrent state stay float32", choices=("none", "bf16")
        ),
    },
    "critic": {
        "critic_obs": Flag(
            str,
            "observation group of a critic with its own core and optimizer; auto: `critic` where the task has it; "
            "shared: actor and value share one core",
        ),
        "critic_hidden_size": _positive(int, "hidden units of the critic's core (null: the actor's)"),
        "critic_num_layers": _positive(int, "layers of the critic's core (null: the actor's)"),
        "critic_hidden": _widths("widths of the MLP before the critic's core (null: the actor's)"),
        "critic_head_hidden": _widths("widths of the MLP behind the critic's core (null: the actor's)"),
        "critic_learning_rate": _positive(
            float, "the critic's learning rate; constant or linear (null: the actor's of the iteration)"
        ),
        "critic_num_epochs": _positive(int, "the critic's passes over a batch (null: the actor's)"),
        "critic_num_minibatches": _positive(int, "the critic's minibatches an epoch (null: the actor's)"),
        "critic_clip_grad_norm": _positive(float, "maximum norm of the critic's gradient (null: the actor's)"),
        "compile_critic": Flag(
            str, "mode of torch.compile for the critic's update (null: --compile)", choices=COMPILE_MODES
        ),
    },
    "advantages": {
        "gamma": _unit("discount a step"),
        "gae_lambda": _unit("lambda of generalised advantage estimation"),
        "vectorized_gae": Flag(bool, "TorchRL's vectorised GAE instead of its loop over time"),
    },
    "update": {
        "learning_rate": _positive(float, "Adam's learning rate"),
        "lr_schedule": Flag(
            str,
            "constant; linear to 0 over the run; adaptive: before each step / 1.5 above twice --desired-kl and x 1.5 "
            "below half of it, within 1e-5 and --max-learning-rate",
            choices=LR_SCHEDULES,
        ),
        "max_learning_rate": _positive(float, "highest rate of the adaptive schedule"),
        "max_learning_rate_final": _at_least(
            0, float, "rate that this bound moves to linearly over the run (null: constant)"
        ),
        "desired_kl": _positive(float, "KL that the adaptive schedule keeps, by Schulman's k3 estimator"),
        "target_kl": _positive(float, "mean KL of an epoch above which an iteration's remaining epochs are left out"),
        "num_epochs": _positive(int, "passes over a batch"),
        "num_minibatches": _positive(int, "minibatches an epoch; must divide the environments of a batch"),
        "clip_epsilon": _positive(float, "PPO clip range of the probability ratio"),
        "entropy_coeff": _at_least(0, float, "weight of the entropy bonus"),
        "entropy_coeff_final": _at_least(0, float, "weight that it moves to linearly over the run (null: constant)"),
        "value_coeff": _positive(float, "weight of the value loss"),
        "value_clip": _positive(
            float, "clip range of the value, in units of the return, or of its deviation with --normalize-value"
        ),
        "bounds_coeff": _at_least(0, float, "weight of the squared excess of the policy's mean over --action-bound"),
        "action_bound": _positive(float, "bound of that loss, in action units"),
        "reward_scale": _positive(float, "factor on the rewards that the update sees"),
        "clip_grad_norm": _positive(float, "maximum global norm of the gradient"),
        "max_skipped_updates": _at_least(
            0, int, "updates in a row that are skipped for values that are not finite before the run ends"
        ),
        "compile": Flag(str, "torch.compile the advantages and the update", choices=COMPILE_MODES),
        "compile_policy": Flag(bool, "torch.compile the workers' policy step, and on CUDA replay it as one CUDA graph"),
        "cudagraphs": Flag(bool, "replay the update as one CUDA graph"),
        "cudagraph_warmup": _positive(int, "updates that run eagerly before the capture"),
        "cudagraph_trees": Flag(bool, "let reduce-overhead and max-autotune capture CUDA graphs of their own"),
    },
    "run": {
        "log_dir": Flag(str, "folder that holds the runs"),
        "logger": Flag(
            str, "besides metrics.csv, which is always written", choices=("csv", "tensorboard", "wandb", "none")
        ),
        "checkpoint_interval": _positive(int, "iterations between checkpoints"),
        "keep_checkpoints": _positive(int, "number of checkpoints that are kept"),
        "eval_interval": _positive(
            int, "iterations between evaluations, beside training in a process of their own (null: none)"
        ),
        "eval_num_envs": _positive(int, "environments of an evaluation; each plays one episode"),
        "eval_video": _positive(
            int,
            "frames of a video of each evaluation's first environment, in the run's folder and in wandb (null: none); "
            "all its environments are drawn, so keep --eval-num-envs small",
        ),
        "resume": Flag(str, "checkpoint file or run folder to continue, or auto: the task's latest run, if any"),
    },
}
ALL_FLAGS = {name: flag for group in FLAGS.values() for name, flag in group.items()}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        message = "".join(char if char.isprintable() else repr(char)[1:-1] for char in message)  # one line
        self.exit(2, f"{self.prog}: error: {message}\n")


def _dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


def make_parser() -> Parser:
    """One flag a setting, in the groups of ``FLAGS``."""
    defaults = yaml.safe_load((CONFIG_DIR / "ppo.yaml").read_text())
    parser = Parser(
        prog="train.py",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Recurrent PPO for Isaac Lab. key=value tokens are Hydra overrides: env.* goes to the task's "
        "configuration, anything else names a setting of this suite.",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="Hydra overrides", default=[])
    for title, flags in FLAGS.items():
        group = parser.add_argument_group(title)
        for name, flag in flags.items():
            options: dict[str, Any] = {"help": f"{flag.help} (default: {defaults[name]})".replace("%", "%%")}
            if flag.kind is bool:
                options["action"] = argparse.BooleanOptionalAction
            else:
                options |= {"type": flag.kind, "metavar": name.upper()}
            if flag.choices:
                options["choices"] = flag.choices
                options["metavar"] = "{" + ",".join(flag.choices) + "}"
            if name == "compile":
                options |= {"nargs": "?", "const": "default"}
            group.add_argument(_dashed(name), **options)
    return parser


def _split_tokens(argv: Sequence[str], parser: Parser) -> tuple[list[str], list[str]]:
    """Separate Hydra tokens from flags (dashed), also behind a flag whose value may be missing."""
    argv = [re.sub(r"^--[\w-]+", lambda name: name[0].replace("_", "-"), token) for token in argv]
    takes_value = {
        option for action in parser._actions for option in action.option_strings if action.nargs in (None, 1)
    }
    flags, tokens = [], []
    for previous, token in zip(["", *argv], argv):
        hydra = _TOKEN.match(token) and previous not in takes_value
        (tokens if hydra else flags).append(token)
    return flags, tokens


def _nearest(name: str, names: Sequence[str]) -> str:
    found = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    return f"Nearest: {', '.join(found)}." if found else "--help lists them."


def _compose(task: str, overrides: list[str]) -> DictConfig:
    name = task if (CONFIG_DIR / f"{task}.yaml").is_file() else "ppo"
    with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"):
        return compose(name, overrides=overrides)


def _own_overrides(tokens: Sequence[str], given: dict[str, Any], parser: Parser) -> dict[str, str]:
    """The suite's own overrides, checked against the flags."""
    own: dict[str, str] = {}
    for token in tokens:
        key, value = token.split("=", 1)
        if key not in ALL_FLAGS:
            parser.error(f"override {token}: there is no setting {key}. {_nearest(key, list(ALL_FLAGS))}")
        if key in given:
            parser.error(f"override {token} contradicts {_dashed(key)} {given[key]}: give one of them.")
        own[key] = value
    return own


def _checked(name: str, value: Any, parser: Parser) -> Any:
    flag = ALL_FLAGS[name]
    if value is None:
        return None
    shown = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        if flag.kind is bool:
            if not isinstance(value, bool):
                raise ValueError
        elif flag.kind is int:
            if isinstance(value, bool | list) or int(value) != value:
                raise ValueError
        elif flag.kind is float:
            value = float(shown)
            if not math.isfinite(value):
                raise ValueError
        elif flag.kind in (int_list, name_list):
            value = flag.kind(str(shown))
        else:
            value = str(value)
    except (TypeError, ValueError, OverflowError):
        kind = "widths like 256,128" if flag.kind is int_list else f"a value of type {flag.kind.__name__}"
        parser.error(f"{_dashed(name)} {shown}: must be {flag.valid or kind}.")
    if flag.choices and value not in flag.choices:
        parser.error(f"{_dashed(name)} {shown}: valid are {', '.join(flag.choices)}.")
    if not flag.check(value):
        parser.error(f"{_dashed(name)} {shown}: must be {flag.valid}.")
    return value


def resolve_device(name: str, parser: Parser, flag: str = "--device") -> str:
    """``cpu`` or ``cuda:N``; a mistake ends the process with code 2 and one line."""
    local_rank = torchrun_variable("LOCAL_RANK")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        parser.error(f"{flag} {name}: valid are auto, cpu, cuda and cuda:N.")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"{flag} {name}: valid are auto, cpu, cuda and cuda:N.")
    if device.type == "cuda":
        index = local_rank if device.index is None else device.index
        if index >= torch.cuda.device_count():
            shown = name if local_rank == 0 else f"{name} of local rank {local_rank}"
            parser.error(f"{flag} {shown}: this machine has {torch.cuda.device_count()} CUDA devices.")
        return f"cuda:{index}"
    return "cpu"


def _resolve_devices(args: argparse.Namespace, parser: Parser, typed: set[str]) -> None:
    """Of the learner, and of the collectors that are this rank's."""
    ranks = torchrun_variable("LOCAL_WORLD_SIZE")
    if ranks > 1 and args.device.startswith("cuda:"):
        parser.error(f"--device {args.device}: {ranks} ranks need a GPU each; cuda gives every rank its own.")
    args.device = resolve_device(args.device, parser)
    if args.collector_devices is None:
        return
    if args.collector_backend == "ray":
        parser.error(f"--collector-devices {','.join(args.collector_devices)}: Ray gives each collector its device.")
    devices = [resolve_device(name, parser, "--collector-devices") for name in args.collector_devices]
    shown = f"--collector-devices {','.join(args.collector_devices)}"
    if len(devices) % ranks:
        parser.error(f"{shown}: {len(devices)} collectors cannot be shared out evenly among {ranks} ranks.")
    share = len(devices) // ranks
    args.collector_devices = devices[torchrun_variable("LOCAL_RANK") * share :][:share]
    if "num_collectors" in typed and args.num_collectors != share:
        parser.error(f"{shown} contradicts --num-collectors {args.num_collectors}: give one of them.")
    args.num_collectors = share


def _resolve_num_envs(args: argparse.Namespace, parser: Parser, *, typed: bool) -> int:
    """The total; its token does not go on to the task, since each of several workers has a share only."""
    tokens = [token for token in args.env_overrides if token.startswith("env.scene.num_envs=")]
    args.env_overrides = [token for token in args.env_overrides if token not in tokens]
    if not tokens:
        return args.num_envs or (4096 if args.device.startswith("cuda") else 256)
    try:
        from_token = int(tokens[-1].split("=", 1)[1])
    except ValueError:
        parser.error(f"override {tokens[-1]}: must be a whole number above 0.")
    if from_token <= 0:
        parser.error(f"override {tokens[-1]}: must be a whole number above 0.")
    if typed and args.num_envs != from_token:
        parser.error(f"--num-envs {args.num_envs} contradicts {tokens[-1]}: give one of them.")
    return from_token


def critic_flags(args: argparse.Namespace) -> list[str]:
    """The flags that were set and mean something to a separate critic only."""
    return [_dashed(name) for name in FLAGS["critic"] if name != "critic_obs" and getattr(args, name) is not None]


def _check_combinations(args: argparse.Namespace, parser: Parser, typed: set[str]) -> None:
    if args.num_envs % args.num_collectors:
        parser.error(f"--num-envs {args.num_envs}: must be a multiple of --num-collectors {args.num_collectors}.")
    batch_envs = args.num_envs // (args.num_collectors if args.async_collection else 1)
    if batch_envs % args.num_minibatches:
        parser.error(
            f"--num-minibatches {args.num_minibatches}: must divide the {batch_envs} environments of a batch "
            f"(--num-envs {args.num_envs})."
        )
    if args.critic_num_minibatches is not None and batch_envs % args.critic_num_minibatches:
        parser.error(
            f"--critic-num-minibatches {args.critic_num_minibatches}: must divide the {batch_envs} environments of a "
            f"batch (--num-envs {args.num_envs})."
        )
    if args.critic_obs == "shared" and (given := critic_flags(args)):
        parser.error(f"{given[0]}: with --critic-obs shared the critic has nothing of its own.")
    if args.rnn == "none":  # what a preset says of the core it replaces does not count
        for name in ("num_layers", "memory_horizon", "critic_num_layers"):
            if name in typed:
                parser.error(f"{_dashed(name)} {getattr(args, name)}: --rnn none has no recurrent core.")
    if args.eval_video is not None and args.eval_interval is None:
        parser.error(f"--eval-video {args.eval_video}: nothing is evaluated; add --eval-interval.")
    if args.action_dist == "tanh_normal" and args.bounds_coeff > 0:
        parser.error(f"--bounds-coeff {args.bounds_coeff}: --action-dist tanh_normal is bounded already.")
    if args.freeze_normalizer_after is not None and not (args.normalize_obs or args.normalize_value):
        parser.error(
            f"--freeze-normalizer-after {args.freeze_normalizer_after}: nothing is normalised; add --normalize-obs "
            "or --normalize-value."
        )
    if args.lr_schedule == "adaptive" and args.max_learning_rate < args.learning_rate:
        parser.error(
            f"--max-learning-rate {args.max_learning_rate}: must be at least the rate that the adaptive schedule "
            f"starts with (--learning-rate {args.learning_rate})."
        )
    for name in ("max_learning_rate", "max_learning_rate_final"):
        if name in typed and args.lr_schedule != "adaptive":
            parser.error(f"{_dashed(name)} {getattr(args, name)}: bounds --lr-schedule adaptive only.")
    if args.rnn_backend == "pad" and args.rnn_recompute:
        parser.error("--rnn-recompute: --rnn-backend pad keeps what torch's own kernels keep; use scan.")
    if args.rnn_backend in ("blank", "unroll") and (args.rnn != "lstm" or args.rnn_recompute or args.amp == "bf16"):
        parser.error(
            f"--rnn-backend {args.rnn_backend}: is for --rnn lstm in float32, without --rnn-recompute; use scan."
        )
    if args.rnn_backend == "auto" and unrolling_pays(
        compile_mode=args.compile,
        device=args.device,
        cell=args.rnn,
        num_steps=args.rollout_steps,
        recompute=args.rnn_recompute,
        amp=args.amp == "bf16",
    ):
        args.rnn_backend = "unroll"
    try:
        resolve_backend(args.rnn_backend, torch.device(args.device))
    except ValueError as error:
        parser.error(str(error))
    if args.resume not in (None, "auto") and not Path(args.resume).exists():
        parser.error(f"--resume {args.resume}: no such file or folder.")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and resolve the command line; a mistake ends the process with code 2 and one line.

    What the user typed wins over the task's preset, and that over ``ppo.yaml``.

    Returns:
        one attribute a setting of ``FLAGS``, and ``env_overrides``, the tokens for the task's
        configuration.
    """
    parser = make_parser()
    flags, tokens = _split_tokens(sys.argv[1:] if argv is None else argv, parser)
    given = vars(parser.parse_args(flags))
    stray = given.pop("overrides")
    if stray:
        parser.error(f"{stray[0]}: neither a flag nor key=value.")
    given = {name: _checked(name, value, parser) for name, value in given.items()}
    env_overrides = [token for token in tokens if token.lstrip("+~").startswith(_ENV_PREFIXES)]
    own = _own_overrides([token for token in tokens if token not in env_overrides], given, parser)

    task = given.get("task", own.get("task", yaml.safe_load((CONFIG_DIR / "ppo.yaml").read_text())["task"]))
    try:
        config = _compose(task, [f"{key}={value}" for key, value in own.items()])
    except (HydraException, ConfigCompositionException, OmegaConfBaseException) as error:
        parser.error(f"override: {str(error).splitlines()[0]}")
    settings: Any = OmegaConf.to_container(config, resolve=True)
    settings |= given
    settings = {name: _checked(name, settings[name], parser) for name in ALL_FLAGS}

    args = argparse.Namespace(**settings, env_overrides=env_overrides)
    _resolve_devices(args, parser, typed=given.keys() | own.keys())
    args.num_envs = _resolve_num_envs(args, parser, typed="num_envs" in given or "num_envs" in own)
    _check_combinations(args, parser, typed=given.keys() | own.keys())
    return args


@contextmanager
def user_errors(prog: str = "train.py") -> Iterator[None]:
    """Turn a ``ValueError`` about the user's input into one line on stderr and exit code 2.

    For the set-up of a run only: behind it a ``ValueError`` is a bug and keeps its traceback.
    """
    try:
        yield
    except ValueError as error:
        # TorchRL appends the worker's traceback to what the environment raised there.
        print(f"{prog}: error: {str(error).split('\n\nWorker traceback:')[0]}", file=sys.stderr)
        raise SystemExit(2) from None
