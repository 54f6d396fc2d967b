"""Isaac Lab tasks as TorchRL environments.

Isaac Lab, Newton, Warp and USD are imported inside the functions that run in a collector's worker
process, and nowhere else: the learner imports this module too, and a simulator in its process would
cost it seconds, memory and threads, and break machines where Isaac Lab isn't installed.

Shapes: N envs, K names in Isaac Lab's episode log.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import EnvBase
from torchrl.envs.libs.isaac_lab import IsaacLabWrapper
from torchrl.envs.transforms import InitTracker, RewardSum, Transform, TransformedEnv

from .assets import ASSET_ROOT_ENV
from .task_info import describe_task

VERBOSE_ENV = "ISAACLAB_RNN_PPO_VERBOSE"
"""Set to 1, the simulator's own output is shown instead of kept for the error message."""

OBSERVATION_GROUPS = ("policy", "critic")
"""What the actor sees, and what only the critic sees where a task has it. Other groups stay in the simulator."""

# No window, no visualizer and no livestream, whatever LIVESTREAM and the task's own config say.
_HEADLESS = {"headless": True, "visualizer": "none", "livestream": 0}
_PRESET_SELECTORS = ("physics", "renderer", "presets")


def make_env(
    task: str,
    *,
    num_envs: int | None = None,
    device: str = "cpu",
    seed: int = 0,
    overrides: Sequence[str] = (),
    asset_root: str | None = None,
    configure: Callable[[Any], None] | None = None,
    stagger_episodes: bool = False,
) -> EnvBase:
    """Launch Isaac Lab in this process, headless, and wrap `task` for a recurrent PPO.

    Call it once in a process, in a collector's worker. ``env.close()`` ends the simulation too.

    Root keys: ``policy`` [N, obs], ``critic`` [N, priv] where the task has that group (both float32),
    ``is_init`` [N, 1]. Next keys: the observations, ``reward`` and ``episode_reward`` [N, 1], ``done``,
    ``terminated`` and ``truncated`` [N, 1], ``log`` [N, K]. The action spec is the task's own (unbounded
    in most).

    The next observation is the true one everywhere. Where an episode ended it is what Isaac Lab
    computed before the reset (``extras["final_obs"]``), while the root of the following step holds the
    first observation of the next episode. Transforms that change an observation are not supported on
    top: they belong into the model.

    Attributes, also through ``collector.getattr_env``: ``has_final_obs``, ``log_names``, ``step_dt``,
    ``max_episode_length``, ``task_info`` (:class:`IsaacEnv`).

    Args:
        task: id of a registered task, direct or manager-based; ``package:id`` imports the package first.
        num_envs: number of envs, or None for what ``env.scene.num_envs=`` or else the task says.
        device: where the simulation runs and the tensors live.
        seed: seeds Python, NumPy, torch, Warp and the env; ``env.seed=`` wins over it.
        overrides: ``env.KEY=VALUE`` tokens, and ``physics=``, ``renderer=``, ``presets=``, as Isaac Lab reads them.
        asset_root: folder or URL from :func:`~isaaclab_rnn_ppo.utils.assets.resolve_asset_root`, or None to
            leave the choice to Isaac Lab. It must be set before the first import of Isaac Lab.
        configure: called with the task's configuration before the launch, to add a sensor for example.
        stagger_episodes: let every ``reset`` of all envs start each episode at a random point of its time limit, so
            that time-outs do not fall together.

    Raises:
        ValueError: the user's input is wrong; before the simulator is launched (:func:`resolve_task`).
        RuntimeError: the simulator did not start; the message ends with the last lines of its output.
    """
    # TorchRL sets this logger to DEBUG on import: hundreds of lines a compilation.
    logging.getLogger("torch._higher_order_ops.partitioner").setLevel(logging.WARNING)
    if asset_root is not None:
        loaded = sys.modules.get("isaaclab.utils.assets")
        if loaded is not None and asset_root != loaded.NUCLEUS_ASSET_ROOT_DIR:
            raise RuntimeError(f"Isaac Lab was imported before make_env, with {loaded.NUCLEUS_ASSET_ROOT_DIR}")
        os.environ[ASSET_ROOT_ENV] = asset_root
    with _captured_output() as output:
        cfg = resolve_task(task, num_envs=num_envs, device=device, seed=seed, overrides=overrides)
        if configure is not None:
            configure(cfg)
        try:
            env = _launch(task, cfg)
            env.base_env.stagger_episodes = stagger_episodes
            return env
        except Exception as error:
            hint = ""
            if isinstance(error, FileNotFoundError):
                hint = f"\nThe asset root is {os.environ.get(ASSET_ROOT_ENV, 'the official server')} (--asset-root)."
            raise RuntimeError(
                f"Isaac Lab could not start {task}: {type(error).__name__}: {error}{hint}\n"
                f"Its last output (all of it with {VERBOSE_ENV}=1):\n{output()}"
            ) from error


def resolve_task(
    task: str, *, num_envs: int | None = None, device: str = "cpu", seed: int = 0, overrides: Sequence[str] = ()
) -> Any:
    """The task's configuration with everything the user asked for, checked; launches nothing.

    Isaac Lab itself accepts unknown keys and values of any type, which would leave a typing mistake
    without effect, so they are compared with the task's own configuration here.

    Args:
        task, num_envs, device, seed, overrides: as for :func:`make_env`.

    Returns:
        The configuration object that ``gym.make(task, cfg=...)`` takes.

    Raises:
        ValueError: unknown task, unknown key, value of another type, contradicting settings, or a task that
            cannot run here (multi-agent, or made for Isaac Sim where that isn't installed).
    """
    # Lazy, see the head of this file. Importing isaaclab_tasks registers Isaac Lab's tasks.
    import isaaclab_tasks  # noqa: F401
    from isaaclab.app.sim_launcher import validate_launch
    from isaaclab.envs import DirectMARLEnvCfg
    from isaaclab_tasks.utils import resolve_task_config

    from . import tasks  # noqa: F401  registers this suite's own

    _check_task(task)
    values = _check_overrides(task, overrides)
    cfg, _ = resolve_task_config(task, None, overrides=list(overrides))
    if isinstance(cfg, DirectMARLEnvCfg):
        raise ValueError(f"--task {task}: multi-agent tasks are not supported; take a single-agent one")

    asked = values.get("env.scene.num_envs")
    if num_envs is not None:
        if asked is not None and asked != num_envs:
            raise ValueError(f"--num-envs {num_envs} contradicts env.scene.num_envs={asked}: give one of them")
        cfg.scene.num_envs = num_envs
    if cfg.scene.num_envs < 1:
        name = "env.scene.num_envs" if num_envs is None else "--num-envs"
        raise ValueError(f"{name}: {cfg.scene.num_envs} is not a number of envs; give 1 or more")
    if values.get("env.sim.device", device) != device:
        raise ValueError(f"--device {device} contradicts env.sim.device={values['env.sim.device']}: give one of them")
    cfg.sim.device = device
    if "env.seed" not in values:
        cfg.seed = seed
    if "env.compute_final_obs" not in values:
        cfg.compute_final_obs = True

    _, needs_isaac_sim = validate_launch(cfg, dict(_HEADLESS))
    if needs_isaac_sim and find_spec("isaacsim") is None:
        raise ValueError(
            f"--task {task} needs Isaac Sim, which is not installed, for {', '.join(needs_isaac_sim)}; "
            "physics=newton_mjwarp replaces the physics where the task offers it"
        )
    return cfg


def _launch(task: str, cfg: Any) -> TransformedEnv:
    import gymnasium
    from isaaclab.app.sim_launcher import launch_simulation

    with contextlib.ExitStack() as stack:
        stack.enter_context(launch_simulation(cfg, dict(_HEADLESS)))
        raw = stack.enter_context(contextlib.closing(gymnasium.make(task, cfg=cfg)))
        # TorchRL returns the wrapper inside a TransformedEnv that knows of the native auto-reset.
        env = IsaacEnv(raw, device=torch.device(cfg.sim.device), native_autoreset=True)
        env.reset()
        wrapper = env.base_env
        wrapper.log_names = list(wrapper.read_log())
        for transform in (RewardSum(in_keys=["reward"], reward_spec=True), InitTracker(), EpisodeLog(wrapper)):
            env.append_transform(transform)
        wrapper.simulation = stack.pop_all()
    return env


class IsaacEnv(IsaacLabWrapper):
    """TorchRL's wrapper of an Isaac Lab env, with true next observations and Isaac Lab's episode statistics.

    TorchRL marks the next observation of a finished env as NaN. Here the step returns the true one, and
    puts back what TorchRL overwrites: the next observation after the step, and the root of the following
    step, which is the first observation after Isaac Lab's own reset.

    Attributes:
        has_final_obs: whether the task provides the observation before a reset. If not, the last one
            before it stands in its place: a bootstrap there is an approximation.
        log_names: names of the columns of ``("next", "log")``: Isaac Lab's own, as of the first reset.
        simulation: what ``close`` closes: the env and the simulator.
        stagger_episodes: see :func:`make_env`.
    """

    stagger_episodes = False
    log_names: list[str]
    simulation: contextlib.ExitStack

    def __init__(self, env: Any, **kwargs: Any):
        import gymnasium  # lazy: a dependency of Isaac Lab

        unwrapped = env.unwrapped
        # Direct tasks declare only the policy's space, under no name, and TorchRL then fails on a critic group.
        spaces = {g: s for g, s in unwrapped.single_observation_space.items() if g in OBSERVATION_GROUPS}
        if "policy" not in spaces:
            raise ValueError(
                f"the task has no observation group `policy`, only {list(unwrapped.single_observation_space)}"
            )
        flat = {g: gymnasium.spaces.Box(-float("inf"), float("inf"), (_width(g, s),)) for g, s in spaces.items()}
        unwrapped.observation_space = gymnasium.vector.utils.batch_space(
            gymnasium.spaces.Dict({**flat}), unwrapped.num_envs
        )
        self._groups = tuple(flat)
        self._log_values: dict[str, torch.Tensor] = {}
        self._warned_of_new_names = False
        self.has_final_obs = bool(unwrapped.cfg.compute_final_obs)
        super().__init__(env, **kwargs)

    @property
    def step_dt(self) -> float:
        """Control period in seconds."""
        return float(self._env.unwrapped.step_dt)

    @property
    def max_episode_length(self) -> int:
        """Time limit of an episode in steps."""
        return int(self._env.unwrapped.max_episode_length)

    @property
    def task_info(self) -> dict[str, Any]:
        """What a policy must know of the task where there is no simulator: :func:`describe_task`."""
        sizes = {group: self.observation_spec[group].shape[-1] for group in self._groups}
        return describe_task(self._env.unwrapped, sizes)

    def read_obs(self, observations: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """The groups that are used, float32 and flat: a group of terms is concatenated in the task's order."""
        return super().read_obs({group: _flat(observations[group]) for group in self._groups})

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        out = super()._reset(tensordict, **kwargs)
        if self.stagger_episodes:
            isaac = self._env.unwrapped
            isaac.episode_length_buf = torch.randint_like(isaac.episode_length_buf, self.max_episode_length)
        return out

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        out = super()._step(tensordict)
        done = out.get("done").unsqueeze(-1)  # TorchRL gives flags their last dimension after this call
        # Isaac Lab may write its next observation into the same buffers, hence the copies.
        self._reset_obs = {group: out.get(group).clone() for group in self._groups}
        if self.has_final_obs:
            final = self._final_obs(done)
        else:
            final = {group: tensordict.get(group) for group in self._groups}
        # extras keep the final observations of earlier steps: only this step's done rows are this step's.
        self._true_obs = {g: torch.where(done, final[g], obs) if final else obs for g, obs in self._reset_obs.items()}
        return out.update(self._true_obs)

    def _final_obs(self, done: torch.Tensor) -> dict[str, torch.Tensor]:
        final = self._env.unwrapped.extras.get("final_obs")
        if final is not None:
            return {group: _flat(final[group]).to(self.device) for group in self._groups}
        if done.any():  # no wait for the device in the long run: after the first episode's end extras have it
            raise RuntimeError(
                f"{type(self._env.unwrapped).__name__} ended an episode without extras['final_obs'] although "
                "compute_final_obs is on; run it with env.compute_final_obs=false"
            )
        return {}

    def _post_step_mdp_hooks(self, tensordict: TensorDictBase, tensordict_: TensorDictBase):
        tensordict.get("next").update(self._true_obs)
        # TorchRL 0.14.1 sets the next root's `is_init` from each of these flags in turn and the last one,
        # `truncated`, wins: after a termination the recurrent state would not reset. It zeroes them right after.
        done = tensordict_.get("done")
        return tensordict, tensordict_.update({"terminated": done, "truncated": done})

    def _reset_on_native_autoreset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase):
        return tensordict_reset.update(self._reset_obs)

    def read_log(self) -> dict[str, Any]:
        """Isaac Lab's statistics of the episodes that ended last, by its own names."""
        return self._env.unwrapped.extras.get("log", {})

    def episode_log(self, done: torch.Tensor) -> torch.Tensor:
        """Isaac Lab's episode statistics for the envs that are `done`, such that a mean over episodes is right.

        ``Episode_Reward/*`` and ``Metrics/*`` are means over the envs that ended in this step, so each of these
        rows holds that mean. ``Episode_Termination/*`` of manager-based tasks is a share of *all* envs, by each
        one's last episode; these rows hold 0 or 1 instead, whether the term ended this episode, so that their
        mean is the share of the finished episodes. Direct tasks may give it as an integer, the count of the envs
        that ended so in this step; it is divided by the number that ended. A name that is missing at a step
        keeps its last value.

        Args:
            done: [N, 1], this step's.

        Returns:
            [N, K] float32, zeros where not done.
        """
        log = self.read_log()
        terms = getattr(self._env.unwrapped, "termination_manager", None)
        if not self._warned_of_new_names and (new := [name for name in log if name not in self.log_names]):
            self._warned_of_new_names = True
            warnings.warn(f"not logged, because Isaac Lab did not report it at the first reset: {new}", stacklevel=2)
        columns = []
        for name in self.log_names:
            group, _, term = name.partition("/")
            if group == "Episode_Termination" and terms is not None and term in terms.active_terms:
                columns.append(terms.get_term(term).to(self.device, torch.float32))
                continue
            if name in log:
                value = torch.as_tensor(log[name], device=self.device)
                if group == "Episode_Termination" and not value.dtype.is_floating_point:
                    value = value / done.sum().clamp(min=1)
                self._log_values[name] = value.to(torch.float32).mean()
            columns.append(self._log_values.get(name, done.new_zeros((), dtype=torch.float32)).expand(done.shape[0]))
        if not columns:
            return done.new_zeros((done.shape[0], 0), dtype=torch.float32)
        return torch.where(done, torch.stack(columns, dim=-1), 0.0)

    def close(self, *, raise_if_closed: bool = True) -> None:
        """Close the env and the simulator."""
        if self.is_closed:
            return
        self.is_closed = True
        with _captured_output():
            self.simulation.close()


class EpisodeLog(Transform):
    """Writes Isaac Lab's episode statistics as ``("next", "log")`` [N, K], beside the reward."""

    def __init__(self, env: IsaacEnv):
        super().__init__()
        self._isaac = [env]  # in a list: nn.Module would register the env as a submodule

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("log", self._isaac[0].episode_log(next_tensordict.get("done")))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        # Among the rewards, so that it is neither carried to the next root nor marked as NaN at resets.
        env = self._isaac[0]
        reward_spec["log"] = Unbounded(shape=(*env.batch_size, len(env.log_names)), device=env.device)
        return reward_spec


def _width(group: str, space: Any) -> int:
    """Size of an observation group, summed over its terms.

    Raises:
        ValueError: an image, or another observation that is not a vector.
    """
    terms = space.spaces if hasattr(space, "spaces") else {group: space}
    for name, term in terms.items():
        if term.shape is None or len(term.shape) != 1:
            raise ValueError(f"observation group `{group}`: {name} is {term}, and only vectors are supported")
    return sum(term.shape[0] for term in terms.values())


def _flat(group: torch.Tensor | Mapping[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(group, Mapping):
        group = torch.cat(list(group.values()), dim=-1)
    return group.float()


def _check_task(task: str) -> None:
    import gymnasium

    module, _, name = task.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module.partition(".")[0]:
                raise
            raise ValueError(f"--task {task}: there is no package {module!r}") from error
    names = [spec.id for spec in gymnasium.registry.values() if "env_cfg_entry_point" in (spec.kwargs or {})]
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
        told = f"the nearest are {', '.join(nearest)}" if nearest else f"none of the {len(names)} names is near"
        raise ValueError(f"--task {name}: Isaac Lab has no task of this name; {told}")


def _check_overrides(task: str, overrides: Sequence[str]) -> dict[str, Any]:
    """Compare the tokens with the task's default configuration; return the values by key."""
    from isaaclab_tasks.utils import load_cfg_from_registry, resolve_task_config
    from isaaclab_tasks.utils.hydra import collect_presets

    pairs = []
    for token in overrides:
        key, equals, value = token.partition("=")
        if not equals or not (key.startswith("env.") or key in _PRESET_SELECTORS):
            raise ValueError(f"override {token!r}: give env.KEY=VALUE or one of {', '.join(_PRESET_SELECTORS)}=NAME")
        pairs.append((token, key, _literal(value)))
    # `env.sim.physics=newton_mjwarp` chooses among named alternatives: their keys are those of the choice.
    choices = collect_presets(load_cfg_from_registry(task.split(":")[-1], "env_cfg_entry_point"), "env")
    chosen = [t for t, key, value in pairs if key in _PRESET_SELECTORS or (key in choices and isinstance(value, str))]
    default, _ = resolve_task_config(task, None, overrides=chosen)
    for token, key, value in pairs:
        if token not in chosen:
            _check_value(default, token, key, value)
    return {key: value for _, key, value in pairs}


def _check_value(cfg: Any, token: str, key: str, value: Any) -> None:
    *parents, leaf = key.split(".")[1:]
    known, owner = "env", cfg
    for part in [*parents, leaf]:
        children = dict(cfg) if isinstance(cfg, Mapping) else {k: v for k, v in getattr(cfg, "__dict__", {}).items()}
        if part not in children:
            nearest = difflib.get_close_matches(part, [str(c) for c in children], n=3, cutoff=0.5)
            nearest = nearest or sorted(str(c) for c in children)[:12]
            valid = ", ".join(f"{known}.{name}" for name in nearest) or "no keys"
            raise ValueError(f"override {token!r}: {known} has no `{part}`; nearest: {valid}")
        owner, cfg = cfg, children[part]
        known = f"{known}.{part}"
    if not _fits(value, cfg, _annotation(owner, leaf)):
        raise ValueError(
            f"override {token!r}: {value!r} is {_kind(value)}, and the default of {key} is {_kind(cfg)}"
            + (f" ({cfg!r})" if isinstance(cfg, bool | int | float | str | tuple | list) else "")
        )


def _fits(value: Any, default: Any, annotation: str) -> bool:
    """Whether `value` may replace `default`: of its kind, or of a kind that the field's annotation names."""
    if default is None or "Any" in annotation:
        return True
    if value is None:  # null removes a term of a manager
        return "None" in annotation or not isinstance(default, bool | int | float | str)
    kinds = _kind(value), _kind(default)
    if kinds[0] == kinds[1] or kinds == ("a whole number", "a number"):
        return True
    if kinds == ("a number", "a whole number") and not annotation:  # an entry of a dict
        return True
    names = "list|tuple|Sequence" if isinstance(value, list | tuple) else type(value).__name__
    return bool(re.search(rf"\b({names})\b", annotation))


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "a truth value"
    if isinstance(value, int):
        return "a whole number"
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list | tuple):
        return "a list"
    return "null" if value is None else f"a {type(value).__name__}"


def _annotation(owner: Any, name: str) -> str:
    """Annotations of a field in its class and all bases: subclasses often narrow a float to the int they assign."""
    return " ".join(str(vars(c).get("__annotations__", {}).get(name, "")) for c in type(owner).__mro__)


def _literal(text: str) -> Any:
    """A value as Isaac Lab reads it: a Python literal, true, false, null, or else a string."""
    words = {"true": True, "false": False, "none": None, "null": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


@contextlib.contextmanager
def _captured_output() -> Iterator[Callable[[], str]]:
    """Keep what this process prints, C++ libraries included, off the console; yields a way to read its end.

    Lines that speak of an error are passed on to stderr afterwards.
    """
    if os.environ.get(VERBOSE_ENV) == "1":
        yield lambda: ""
        return
    _flush()
    saved = os.dup(1), os.dup(2)
    with tempfile.TemporaryFile() as file:

        def lines() -> list[str]:
            _flush()
            file.seek(0)
            return file.read().decode(errors="replace").splitlines()

        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        failed = True
        try:
            yield lambda: "\n".join(lines()[-40:])
            failed = False
        finally:
            errors = [] if failed else [line for line in lines() if re.search(r"\berror\b|could not open", line, re.I)]
            for stream, copy in zip((1, 2), saved, strict=True):
                os.dup2(copy, stream)
                os.close(copy)
            if errors:
                print("\n".join(errors), file=sys.stderr)
