"""Running statistics that live in the model, so that they are pushed, saved and exported with its weights.

They change once an iteration, after the update: every log-probability of a batch, stored or
recomputed, is then computed with the same statistics.

Shapes: * any batch, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from isaaclab_rnn_ppo.utils.ranks import sum_over_ranks


class RunningNormalizer(nn.Module):
    """Standardises its input with the mean and variance of everything it was updated with.

    Statistics are float64 buffers, merged batch by batch (Chan, Golub and LeVeque, 1979, "Updating
    formulae and a pairwise algorithm for computing sample variances"). Before the first update the
    input passes unchanged, up to ``clip``.

    Args:
        num_features: F.
        clip: standardised values are clamped to [-clip, clip], so that one wild sensor reading
            cannot throw the policy off.
        epsilon: smallest standard deviation. A feature that never varies becomes 0.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, num_features: int, *, clip: float = 10.0, epsilon: float = 1e-2):
        super().__init__()
        self.clip, self.epsilon = clip, epsilon
        self.register_buffer("mean", torch.zeros(num_features, dtype=torch.float64))
        self.register_buffer("var", torch.ones(num_features, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    @property
    def std(self) -> Tensor:
        """Standard deviation [F], at least ``epsilon``; 1 before the first update."""
        return self.var.sqrt().clamp(min=self.epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """[*, F] -> [*, F] of the same dtype."""
        return ((x - self.mean.to(x.dtype)) / self.std.to(x.dtype)).clamp(-self.clip, self.clip)

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Merge the statistics of every rank's ``x`` [*, F]; rows with a non-finite entry are left out."""
        x = x.reshape(-1, x.shape[-1]).double()
        keep = x.isfinite().all(1, keepdim=True)
        x = torch.where(keep, x, 0.0)
        count = sum_over_ranks(keep.sum())
        mean = sum_over_ranks(x.sum(0)) / count.clamp(min=1)
        squares = sum_over_ranks(torch.where(keep, (x - mean).square(), 0.0).sum(0))
        total = self.count + count
        weight = count / total.clamp(min=1)
        delta = mean - self.mean
        merged = (self.var * self.count + squares + delta.square() * self.count * weight) / total.clamp(min=1)
        self.var.copy_(torch.where(total > 0, merged, self.var))
        self.mean.add_(delta * weight)
        self.count.copy_(total)


class NormalizedValue(nn.Module):
    """A value net that predicts standardised returns and gives out returns.

    ``update`` changes the statistics and rescales the output layer such that every prediction stays
    what it was (PopArt: van Hasselt et al., 2016, arXiv:1602.07714), so a batch's values, bootstraps
    and clip ranges never mix two scales.

    Args:
        net: features [*, H] -> [*, 1]; its last layer is linear.
    """

    def __init__(self, net: nn.Sequential):
        super().__init__()
        self.net = net
        self.returns = RunningNormalizer(1, epsilon=1e-4)

    def forward(self, features: Tensor) -> Tensor:
        value = self.net(features)
        return value * self.returns.std.to(value.dtype) + self.returns.mean.to(value.dtype)

    @torch.no_grad()
    def update(self, targets: Tensor) -> None:
        """Merge the statistics of the value targets [*, 1]."""
        mean, std = self.returns.mean.clone(), self.returns.std
        self.returns.update(targets)
        layer = self.net[-1]
        assert isinstance(layer, nn.Linear)
        scale = std / self.returns.std
        layer.weight.mul_(scale)
        layer.bias.copy_(layer.bias * scale + (mean - self.returns.mean) / self.returns.std)
