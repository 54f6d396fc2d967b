"""Losses over a window of a compact rollout.

Shapes: N envs, T steps, A actions.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn
from torch.distributions import Distribution
from torchrl.modules import TanhNormal
from torchrl.objectives import ClipPPOLoss

from isaaclab_rnn_ppo.utils.normalize import NormalizedValue


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """KL(old || new) from log-ratios new - old of actions that the old policy drew.

    Schulman's k3, ``mean(r - 1 - log r)`` (2020, "Approximating KL divergence"): unbiased, never
    negative, the same for every action distribution, and it needs nothing but the stored
    log-probabilities, where the exact KL of two Gaussians needs the old ones in the batch or a pass
    of the old policy. ``expm1`` keeps it exact to rounding where the policies nearly agree.
    """
    return (torch.expm1(log_ratio) - log_ratio).mean()


def entropy_of(dist: Distribution) -> Tensor:
    """Entropy [N, T], exact for a Gaussian; a squashed one has no closed form, and one sample stands in."""
    if isinstance(dist, TanhNormal):
        return -dist.log_prob(dist.rsample())
    return dist.entropy()


def value_loss(
    value: Tensor,
    old_value: Tensor,
    target: Tensor,
    *,
    scale: Tensor | float = 1.0,
    clip: float | None = None,
) -> Tensor:
    """Mean squared error of [N, T, 1], in units of ``scale``.

    Args:
        scale: standard deviation of the returns where the value net is a ``NormalizedValue``: the
            error is then that of the standardised prediction against the standardised target.
        clip: the prediction may gain nothing by moving further than this, in units of ``scale``,
            from the one that the advantages used (Schulman et al.'s code of arXiv:1707.06347).
    """
    error = ((value - target) / scale).square()
    if clip is not None:
        clipped = old_value + torch.clamp((value - old_value) / scale, -clip, clip) * scale
        error = torch.maximum(error, ((clipped - target) / scale).square())
    return error.mean()


class RecurrentPPOLoss(ClipPPOLoss):
    """TorchRL's ``ClipPPOLoss`` with the terms that Isaac Lab's users know, without a read-back of the device.

    Its modules and buffers are kept and the objective is written out, because TorchRL 0.14.1 waits
    for the device at every entropy (``isfinite().all()``), replaces it by a sampled one under
    ``torch.compile``, and clips values in units of the return alone. See ``make_loss``.
    """

    entropy_coeff: Tensor

    def __init__(
        self,
        actor: TensorDictModuleBase,
        value_head: TensorDictModuleBase | None,
        *,
        value_coeff: float,
        value_clip: float | None,
        value_normalizer: NormalizedValue | None,
        bounds_coeff: float,
        action_bound: float,
        **kwargs,
    ):
        super().__init__(
            actor,
            value_head,
            normalize_advantage=False,
            functional=False,
            log_explained_variance=False,
            **kwargs,
        )
        # Settings come from the command line, also of a resumed run: a checkpoint holds what was learned.
        for name, buffer in list(self.named_buffers(recurse=False)):
            self.register_buffer(name, buffer, persistent=False)
        self.value_coeff, self.value_clip = value_coeff, value_clip
        self.bounds_coeff, self.action_bound = bounds_coeff, action_bound
        self._value_normalizer = [value_normalizer]  # in a list: it is registered inside the value head

    def forward(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """Scalars of a window [N, T]: the entries that start with ``loss_`` add up to the loss."""
        window = tensordict.copy()
        dist = self.actor_network.get_dist(window)
        advantage = window["advantage"].squeeze(-1)
        log_ratio = dist.log_prob(window["action"]) - window["action_log_prob"]
        ratio = log_ratio.exp()
        clipped = log_ratio.clamp(*self._clip_bounds).exp()
        entropy = entropy_of(dist).mean()
        metrics = {
            "loss_policy": -torch.minimum(ratio * advantage, clipped * advantage).mean(),
            "loss_entropy": -self.entropy_coeff * entropy,
            "entropy": entropy.detach(),
            "kl": kl_estimate(log_ratio.detach()),
            "clip_fraction": (ratio != clipped).to(ratio.dtype).mean(),
        }
        if self.bounds_coeff > 0:
            excess = (window["loc"].abs() - self.action_bound).clamp(min=0.0)
            metrics["loss_bounds"] = self.bounds_coeff * excess.square().sum(-1).mean()
        if self.critic_network is not None:
            # The actor has left `features` in the window: the recurrent core runs once.
            value = self.critic_network(window)["state_value"]
            metrics["loss_value"] = self.value_coeff * value_loss(
                value,
                tensordict["state_value"],
                tensordict["value_target"],
                scale=_scale(self._value_normalizer[0], value),
                clip=self.value_clip,
            )
        return metrics


class CriticLoss(nn.Module):
    """Value loss of a critic with a backbone of its own. See ``make_critic_loss``."""

    def __init__(
        self,
        value_operator: TensorDictModuleBase,
        *,
        value_coeff: float,
        value_clip: float | None,
        value_normalizer: NormalizedValue | None,
    ):
        super().__init__()
        self.critic_network = value_operator
        self.value_coeff, self.value_clip = value_coeff, value_clip
        self._value_normalizer = [value_normalizer]

    def forward(self, tensordict: TensorDictBase) -> dict[str, Tensor]:
        """``loss_value`` of a window [N, T]."""
        value = self.critic_network(tensordict.copy())["state_value"]
        loss = value_loss(
            value,
            tensordict["state_value"],
            tensordict["value_target"],
            scale=_scale(self._value_normalizer[0], value),
            clip=self.value_clip,
        )
        return {"loss_value": self.value_coeff * loss}


def _scale(normalizer: NormalizedValue | None, value: Tensor) -> Tensor | float:
    return 1.0 if normalizer is None else normalizer.returns.std.to(value.dtype)


def make_loss(
    *,
    actor: TensorDictModuleBase,
    value_head: TensorDictModuleBase | None,
    clip_epsilon: float = 0.2,
    entropy_coeff: float = 0.005,
    value_coeff: float = 1.0,
    value_clip: float | None = None,
    value_normalizer: NormalizedValue | None = None,
    bounds_coeff: float = 0.0,
    action_bound: float = 1.1,
) -> RecurrentPPOLoss:
    """Clipped surrogate, squared value error and entropy bonus (Schulman et al., 2017, arXiv:1707.06347).

    ``actor`` writes ``features`` on its way to the distribution and ``value_head`` reads them, so the
    recurrent core runs once.

    Args:
        value_head: None where the critic is separate (``make_critic_loss``).
        entropy_coeff: a buffer of the module, for a schedule to change.
        value_clip: see ``value_loss``; None for none.
        value_normalizer: the value net where it is a ``NormalizedValue``.
        bounds_coeff: weight of the squared distance of the policy's mean from
            [-action_bound, action_bound], summed over the actions; 0 for none. Without it nothing
            pulls back the mean of an unbounded policy whose actions the task clips.
    """
    return RecurrentPPOLoss(
        actor,
        value_head,
        clip_epsilon=clip_epsilon,
        entropy_coeff=entropy_coeff,
        value_coeff=value_coeff,
        value_clip=value_clip,
        value_normalizer=value_normalizer,
        bounds_coeff=bounds_coeff,
        action_bound=action_bound,
    )


def make_critic_loss(
    *,
    value_operator: TensorDictModuleBase,
    value_coeff: float = 1.0,
    value_clip: float | None = None,
    value_normalizer: NormalizedValue | None = None,
) -> CriticLoss:
    """Squared value error of a separate critic; it shares no parameter with the actor. See ``make_loss``."""
    return CriticLoss(value_operator, value_coeff=value_coeff, value_clip=value_clip, value_normalizer=value_normalizer)
