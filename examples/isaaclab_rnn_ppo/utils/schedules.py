"""Learning rate and coefficients over a run.

Every learning rate is a tensor on the parameters' device that is changed in place, so that a compiled
or captured update sees the new value without a wait for the device and without a new graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

LR_SCHEDULES = ("constant", "linear", "adaptive")


def make_optimizer(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Adam:
    """Adam whose learning rate is a tensor (see the module's docstring)."""
    parameters = list(parameters)
    device = parameters[0].device
    # Off CUDA `capturable` is refused; there the step counters are host tensors and cost nothing.
    return torch.optim.Adam(parameters, lr=torch.tensor(learning_rate, device=device), capturable=device.type == "cuda")


def linear(start: float, end: float, iteration: int, num_iterations: int) -> float:
    """From ``start`` in iteration 1 towards ``end``, which the iteration after the last would have."""
    return start + (end - start) * (iteration - 1) / num_iterations


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float | Tensor) -> None:
    """Change the learning rate of every parameter group in place."""
    for group in optimizer.param_groups:
        if isinstance(value, Tensor):
            group["lr"].copy_(value)
        else:
            group["lr"].fill_(value)


class AdaptiveLR:
    """Keeps the KL between the collecting and the current policy near ``desired_kl``, on the device.

    Before each step of the optimizer: above twice the desired KL the learning rate is divided by
    1.5, below half of it multiplied by 1.5, within 1e-5 and ``highest`` (the rule of rsl_rl's PPO,
    Schwarke et al., 2025, arXiv:2509.10771, after the adaptive penalty of Schulman et al., 2017,
    arXiv:1707.06347). A KL of exactly 0 changes nothing.

    Args:
        optimizer: its learning rates are tensors (``make_optimizer``). They are looked up at every
            call, because ``load_state_dict`` replaces them.

    Attributes:
        highest: a tensor, which a schedule may lower in place; it wins over 1e-5.
    """

    lowest = 1e-5

    def __init__(self, optimizer: torch.optim.Optimizer, *, desired_kl: float, highest: float = 1e-2):
        self.optimizer, self.desired_kl = optimizer, desired_kl
        self.highest = torch.tensor(highest, device=optimizer.param_groups[0]["lr"].device)

    @torch.no_grad()
    def __call__(self, kl: Tensor) -> None:
        for group in self.optimizer.param_groups:
            lr = group["lr"]
            slower = (lr / 1.5).clamp(min=self.lowest)
            adapted = torch.where(kl > 2 * self.desired_kl, slower, lr)
            adapted = torch.where((kl < self.desired_kl / 2) & (kl > 0), lr * 1.5, adapted)
            lr.copy_(torch.minimum(adapted, self.highest))
