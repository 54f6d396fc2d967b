"""What a policy must know of its task where there is no simulator: sizes, terms, joints, control period.

It is read once in a worker, from the running task, and travels in every checkpoint as plain numbers,
strings, lists and dictionaries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torchrl.data import Composite, TensorSpec, Unbounded


def describe_task(env: Any, group_sizes: Mapping[str, int]) -> dict[str, Any]:
    """Read the interface of a running Isaac Lab env.

    Manager-based tasks know their terms. A direct task computes its observation and its joint commands
    in code: it has one observation term, one action term with ``cfg.action_scale`` where it defines
    that, and no joints of the action.

    Args:
        env: the unwrapped Isaac Lab env.
        group_sizes: sizes of the observation groups in use, by name.

    Returns:
        - ``observation_sizes``: group -> size. ``num_actions``.
        - ``observation_terms``: of the group ``policy``, in order: ``name``, ``size``, and ``scale``,
          ``clip`` and ``history_length`` where the task sets them.
        - ``action_terms``: in order: ``name``, ``size``, ``joints`` (in the order of the action),
          ``scale``, ``offset`` and ``clip`` (a command is ``clip(offset + scale * action)``); None
          where Isaac Lab does not know.
        - ``robots``: articulation -> its joints, in Isaac Lab's order.
        - ``control_period_s``, ``max_episode_steps``.
    """
    return {
        "observation_sizes": {name: int(size) for name, size in group_sizes.items()},
        "num_actions": int(env.single_action_space.shape[-1]),
        "observation_terms": _observation_terms(env, int(group_sizes["policy"])),
        "action_terms": _action_terms(env),
        "robots": {name: list(robot.joint_names) for name, robot in env.scene.articulations.items()},
        "control_period_s": float(env.step_dt),
        "max_episode_steps": int(env.max_episode_length),
    }


def specs_of(task_info: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """``observation_spec`` and ``action_spec`` for ``make_models``, of one env."""
    groups = {name: Unbounded((1, size)) for name, size in task_info["observation_sizes"].items()}
    return {
        "observation_spec": Composite(groups, shape=[1]),
        "action_spec": Unbounded((1, task_info["num_actions"])),
    }


def _observation_terms(env: Any, size: int) -> list[dict[str, Any]]:
    manager = getattr(env, "observation_manager", None)
    if manager is None:
        return [{"name": "policy", "size": size}]
    terms = []
    for name, shape in zip(manager.active_terms["policy"], manager.group_obs_term_dim["policy"], strict=True):
        cfg = getattr(env.cfg.observations.policy, name)
        set_by_task = {key: _plain(getattr(cfg, key)) for key in ("scale", "clip", "history_length")}
        terms.append({"name": name, "size": int(shape[0])} | {k: v for k, v in set_by_task.items() if v})
    return terms


def _action_terms(env: Any) -> list[dict[str, Any]]:
    manager = getattr(env, "action_manager", None)
    if manager is None:
        size = int(env.single_action_space.shape[-1])
        scale = _plain(getattr(env.cfg, "action_scale", None))
        return [{"name": "action", "size": size, "joints": None, "scale": scale, "offset": None, "clip": None}]
    terms = []
    for name in manager.active_terms:
        term = manager.get_term(name)
        known = vars(term.IO_descriptor)  # Isaac Lab's own; terms that do not act on joints lack entries
        terms.append(
            {
                "name": name,
                "size": int(term.action_dim),
                "joints": _plain(known.get("joint_names")),
                "scale": _plain(_first_env(known.get("scale"))),
                "offset": _plain(known.get("offset")),
                "clip": _plain(known.get("clip")),
            }
        )
    return terms


def _first_env(value: Any) -> Any:
    """A scale given joint by joint is a tensor [N, A] with equal rows."""
    return value[0] if isinstance(value, torch.Tensor) and value.ndim == 2 else value


def _plain(value: Any) -> Any:
    """Numbers, strings and lists of them; anything else as its text, since a file must hold it."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
