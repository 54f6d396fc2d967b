"""A task of one's own: balance the pole near the track's middle, seeing positions only. For the worker alone."""

import gymnasium
import torch
from isaaclab.envs import ManagerBasedRLEnv, mdp
from isaaclab.managers import ObservationGroupCfg, ObservationTermCfg, RewardTermCfg, SceneEntityCfg
from isaaclab.utils import configclass
from isaaclab_tasks.core.cartpole.cartpole_manager_env_cfg import CartpoleEnvCfg


def near_zero(env: ManagerBasedRLEnv, joint: SceneEntityCfg, scale: float) -> torch.Tensor:
    """1 where a joint [N] is at zero, falling to 0.37 at ``scale`` (m or rad)."""
    position = env.scene[joint.name].data.joint_pos.torch[:, joint.joint_ids].squeeze(1)
    return (-(position / scale).square()).exp()


@configclass
class ObservationsCfg:
    @configclass
    class PolicyCfg(ObservationGroupCfg):
        joint_pos = ObservationTermCfg(func=mdp.joint_pos_rel)

    policy: PolicyCfg = PolicyCfg()


@configclass
class RewardsCfg:
    pole = RewardTermCfg(near_zero, {"joint": SceneEntityCfg("robot", ["cart_to_pole"]), "scale": 0.5}, weight=1.0)
    cart = RewardTermCfg(near_zero, {"joint": SceneEntityCfg("robot", ["slider_to_cart"]), "scale": 1.0}, weight=0.5)


@configclass
class BlindBalanceEnvCfg(CartpoleEnvCfg):
    observations: ObservationsCfg = ObservationsCfg()
    rewards: RewardsCfg = RewardsCfg()


gymnasium.register(
    id="Blind-Balance",
    entry_point="isaaclab.envs:ManagerBasedRLEnv",
    kwargs={"env_cfg_entry_point": f"{__name__}:BlindBalanceEnvCfg"},
)
