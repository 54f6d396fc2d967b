"""Three partially observed tasks, derived from Isaac Lab's own cartpole and ant.

============================  ====================================================================
Isaac-Cartpole-Recall         A cue, left or right, is shown for the first 10 steps of an episode,
                              while actions have no effect. Then cart and pole are redrawn, the cue
                              is gone, and the reward adds tracking of the cued side to balancing.
Isaac-Cartpole-NoVelocity     Velocities are hidden from ``policy`` and kept in ``critic``.
Isaac-Ant-NoVelocity          Velocities and the feet's contact wrench likewise.
============================  ====================================================================

Importing this module registers them with gymnasium. It imports Isaac Lab, so only a collector's
worker does so, through ``make_env``; it launches nothing.

Shapes: N envs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import gymnasium
import torch
from isaaclab.envs import mdp
from isaaclab.envs.mdp.actions.joint_actions import JointEffortAction
from isaaclab.managers import (
    CommandTerm,
    CommandTermCfg,
    ManagerTermBase,
    ObservationTermCfg,
    RewardTermCfg,
    SceneEntityCfg,
)
from isaaclab.utils import configclass
from isaaclab_tasks.core.cartpole import cartpole_manager_env_cfg as cartpole
from isaaclab_tasks.core.locomotion.ant import ant_manager_env_cfg as ant

if TYPE_CHECKING:
    from isaaclab.envs import ManagerBasedRLEnv

RECALL_TASK = "Isaac-Cartpole-Recall"
RECALL_WINDOW_S = 1.0
RECALL_TOLERANCE_M = 0.3
RECALL_NEAR_M = 0.6


class CueCommand(CommandTerm):
    """A side, -1 or +1, drawn at the start of an episode and shown for its first steps only.

    When the cue goes, the env's own reset events are applied again, so that nothing a policy did
    while it saw the cue is left in the physical state.
    """

    cfg: CueCommandCfg

    def __init__(self, cfg: CueCommandCfg, env: ManagerBasedRLEnv):
        super().__init__(cfg, env)
        self.side = torch.zeros(self.num_envs, device=self.device)

    @property
    def shown(self) -> torch.Tensor:
        """Whether the cue is visible, and actions therefore without effect, [N]."""
        return self._env.episode_length_buf < self.cfg.cue_steps

    @property
    def command(self) -> torch.Tensor:
        """What an observation holds, [N, 1]: the side while it is shown, then 0."""
        return torch.where(self.shown, self.side, 0.0).unsqueeze(1)

    def _resample_command(self, env_ids: Sequence[int] | slice) -> None:
        self.side[env_ids] = torch.randint_like(self.side[env_ids], 2) * 2 - 1

    def _update_command(self) -> None:
        env_ids = (self._env.episode_length_buf == self.cfg.cue_steps).nonzero().squeeze(1)
        if self.cfg.redraw and len(env_ids):
            for name in self._env.event_manager.active_terms["reset"]:
                term = self._env.event_manager.get_term_cfg(name)
                term.func(self._env, env_ids.int(), **term.params)

    def _update_metrics(self) -> None:
        pass


@configclass
class CueCommandCfg(CommandTermCfg):
    """The cue of the recall task."""

    class_type: type[CommandTerm] = CueCommand
    resampling_time_range: tuple[float, float] = (1.0e9, 1.0e9)  # once an episode
    cue_steps: int = 10
    redraw: bool = True
    """Off, what a policy did during the cue stays in the physical state: for the test of the test only."""


class InertDuringCue(JointEffortAction):
    """Joint efforts that are zero while the cue is shown."""

    def process_actions(self, actions: torch.Tensor) -> None:
        super().process_actions(actions)
        if self.cfg.inert:
            cue = self._env.command_manager.get_term("cue")
            self._processed_actions.masked_fill_(cue.shown.unsqueeze(1), 0.0)


@configclass
class InertDuringCueCfg(mdp.JointEffortActionCfg):
    class_type: type[JointEffortAction] = InertDuringCue
    inert: bool = True
    """Off, actions act during the cue: for the test of the test only."""


class CuedSide(ManagerTermBase):
    """Reward for standing at the cued side once the cue is gone: 2 there.

    One half falls linearly to 0 at the other side: at every place it says which way the cue was. The
    other is 1 at the cued side and 0 from ``RECALL_NEAR_M`` on, for a place that is kept exactly.

    At an episode's end it reports ``recall_rate``: the share of the episode's last second that the
    cart spent within 0.3 m of the target. What an episode lacks of a second counts as missed.
    """

    def __init__(self, cfg: RewardTermCfg, env: ManagerBasedRLEnv):
        super().__init__(cfg, env)
        self._near = torch.zeros(self.num_envs, round(RECALL_WINDOW_S / env.step_dt), device=self.device)

    def reset(self, env_ids: torch.Tensor | slice) -> None:
        self._env.extras["log"]["recall_rate"] = self._near[env_ids].mean()
        self._near[env_ids] = 0.0

    def __call__(self, env: ManagerBasedRLEnv, asset_cfg: SceneEntityCfg, distance_m: float) -> torch.Tensor:
        cue = env.command_manager.get_term("cue")
        x = env.scene[asset_cfg.name].data.joint_pos.torch[:, asset_cfg.joint_ids].squeeze(1)
        error = (x - distance_m * cue.side).abs()
        slot = ((env.episode_length_buf - 1) % self._near.shape[1]).unsqueeze(1)
        self._near.scatter_(1, slot, (error < RECALL_TOLERANCE_M).float().unsqueeze(1))
        gone = env.episode_length_buf > cue.cfg.cue_steps
        far, near = 1.0 - error / (2 * distance_m), (1.0 - error / RECALL_NEAR_M).clamp(min=0.0)
        return torch.where(gone, far + near, 0.0)


@configclass
class RecallCommandsCfg:
    cue = CueCommandCfg()


@configclass
class RecallActionsCfg(cartpole.ActionsCfg):
    joint_effort = InertDuringCueCfg(asset_name="robot", joint_names=["slider_to_cart"], scale=100.0)


@configclass
class RecallObservationsCfg(cartpole.ObservationsCfg):
    @configclass
    class PolicyCfg(cartpole.ObservationsCfg.PolicyCfg):
        cue = ObservationTermCfg(func=mdp.generated_commands, params={"command_name": "cue"})

    policy: PolicyCfg = PolicyCfg()


@configclass
class RecallRewardsCfg(cartpole.RewardsCfg):
    cued_side = RewardTermCfg(
        func=CuedSide,
        weight=2.0,
        params={
            "asset_cfg": SceneEntityCfg("robot", joint_names=["slider_to_cart"]),
            "distance_m": 1.0,
        },
    )


@configclass
class CartpoleRecallEnvCfg(cartpole.CartpoleEnvCfg):
    """Cartpole that must stand at the side that a cue named at the start of the episode."""

    commands: RecallCommandsCfg = RecallCommandsCfg()
    actions: RecallActionsCfg = RecallActionsCfg()
    observations: RecallObservationsCfg = RecallObservationsCfg()
    rewards: RecallRewardsCfg = RecallRewardsCfg()


@configclass
class CartpoleNoVelocityObservationsCfg(cartpole.ObservationsCfg):
    @configclass
    class PolicyCfg(cartpole.ObservationsCfg.PolicyCfg):
        joint_vel_rel = None

    @configclass
    class CriticCfg(cartpole.ObservationsCfg.PolicyCfg):
        pass

    policy: PolicyCfg = PolicyCfg()
    critic: CriticCfg = CriticCfg()


@configclass
class CartpoleNoVelocityEnvCfg(cartpole.CartpoleEnvCfg):
    """Cartpole whose policy sees positions only."""

    observations: CartpoleNoVelocityObservationsCfg = CartpoleNoVelocityObservationsCfg()


@configclass
class AntNoVelocityObservationsCfg(ant.ObservationsCfg):
    @configclass
    class PolicyCfg(ant.ObservationsCfg.PolicyCfg):
        base_lin_vel = None
        base_ang_vel = None
        joint_vel_rel = None
        feet_body_forces = None

    @configclass
    class CriticCfg(ant.ObservationsCfg.PolicyCfg):
        pass

    policy: PolicyCfg = PolicyCfg()
    critic: CriticCfg = CriticCfg()


@configclass
class AntNoVelocityEnvCfg(ant.AntEnvCfg):
    """Ant whose policy sees no velocities and no contact wrench."""

    observations: AntNoVelocityObservationsCfg = AntNoVelocityObservationsCfg()


for _task, _cfg in {
    RECALL_TASK: CartpoleRecallEnvCfg,
    "Isaac-Cartpole-NoVelocity": CartpoleNoVelocityEnvCfg,
    "Isaac-Ant-NoVelocity": AntNoVelocityEnvCfg,
}.items():
    gymnasium.register(
        id=_task,
        entry_point="isaaclab.envs:ManagerBasedRLEnv",
        disable_env_checker=True,
        kwargs={"env_cfg_entry_point": f"{__name__}:{_cfg.__name__}"},
    )
