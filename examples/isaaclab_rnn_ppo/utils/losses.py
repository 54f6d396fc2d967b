"""Losses over a window of a compact rollout.

Shapes: N envs, T steps.
"""

from __future__ import annotations

from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torchrl.objectives import ClipPPOLoss

# TorchRL's names of what the loss reports, and ours (the columns of metrics.csv).
_METRICS = {
    "loss_objective": "loss_policy",
    "loss_critic": "loss_value",
    "loss_entropy": "loss_entropy",
    "entropy": "entropy",
    "kl_approx": "kl",
    "clip_fraction": "clip_fraction",
}


class RecurrentPPOLoss(ClipPPOLoss):
    """``ClipPPOLoss`` with the exact entropy, and no read-back of the device inside the loss.

    TorchRL 0.14.1 checks every entropy with ``isfinite().all()``, which waits for the device, and
    under ``torch.compile`` replaces it by a sampled one.
    """

    def _get_entropy(self, dist, adv_shape):
        return dist.entropy().unsqueeze(-1)

    def forward(self, tensordict: TensorDictBase) -> dict:
        """Scalars of a window [N, T]: the entries that start with ``loss_`` add up to the loss."""
        losses = super().forward(tensordict)
        return {ours: losses[theirs] for theirs, ours in _METRICS.items()}


def make_loss(
    *,
    actor: TensorDictModuleBase,
    value_head: TensorDictModuleBase,
    clip_epsilon: float = 0.2,
    entropy_coeff: float = 0.005,
    value_coeff: float = 1.0,
) -> RecurrentPPOLoss:
    """Clipped surrogate, squared value error and entropy bonus (Schulman et al., 2017, arXiv:1707.06347).

    ``actor`` writes ``features`` on its way to the distribution and ``value_head`` reads them, so the
    recurrent core runs once.
    """
    return RecurrentPPOLoss(
        actor,
        value_head,
        clip_epsilon=clip_epsilon,
        entropy_coeff=entropy_coeff,
        critic_coeff=value_coeff,
        loss_critic_type="l2",
        normalize_advantage=False,
        functional=False,
        log_explained_variance=False,
    )
