"""What an iteration does with a rollout: objectives, each a loss with an optimizer and epochs of its own.

Shapes: N envs, T steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from isaaclab_rnn_ppo.utils.checkpoint import load_model
from isaaclab_rnn_ppo.utils.schedules import AdaptiveLR, linear, set_learning_rate
from isaaclab_rnn_ppo.utils.update import minibatches


@dataclass
class Objective:
    """A loss, its optimizer, and how a batch is used.

    Attributes:
        name: of its entries in a checkpoint: ``model`` for the policy's, ``critic`` for a separate critic's.
        loss: see ``make_loss`` and ``make_critic_loss``.
        optimizer: over the loss's parameters.
        update: of one minibatch, from ``make_update``.
        num_epochs: passes over a batch.
        num_minibatches: of an epoch.
        target_kl: the epoch whose mean KL is above it is the last; None for all epochs.
        adapt_lr: what ``update`` adapts the learning rate with, if anything.
        skipped_in_a_row: updates that were skipped since the last one that was not.
    """

    name: str
    loss: nn.Module
    optimizer: torch.optim.Optimizer
    update: Callable[[TensorDictBase], dict[str, Tensor]]
    num_epochs: int
    num_minibatches: int
    target_kl: float | None = None
    adapt_lr: AdaptiveLR | None = None
    skipped_in_a_row: Tensor | int = 0

    def learn(self, training: TensorDictBase) -> dict[str, Tensor]:
        """Epochs x minibatches over the training part [N] of a rollout; means of the metrics, on the device.

        Of ``skipped_updates`` it is the sum; the others are means over the updates that were not skipped.
        With ``target_kl`` the device is read once an epoch.
        """
        sums: dict[str, Tensor] = {}
        epochs_done = 0
        while epochs_done < self.num_epochs:
            before = sums.get("kl", 0)
            for env_ids in minibatches(len(training), self.num_minibatches, training.device):
                metrics = self.update(training[env_ids])
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0) + value
                self.skipped_in_a_row = (self.skipped_in_a_row + 1) * metrics["skipped_updates"]
            epochs_done += 1
            if self.target_kl is not None and sums["kl"] - before > self.target_kl * self.num_minibatches:
                break
        skipped = sums.pop("skipped_updates")
        taken = epochs_done * self.num_minibatches - skipped
        means = {name: value / taken for name, value in sums.items()} | {"skipped_updates": skipped}
        return means if self.target_kl is None else means | {"epochs_done": torch.tensor(epochs_done)}

    def state_dict(self) -> dict[str, Any]:
        """Parameters, statistics and optimizer, as they are: the tensors are not copied."""
        return {self.name: self.loss.state_dict(), f"{self.name}_optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave.

        Raises:
            ValueError: it is of another model.
        """
        if self.name not in state:
            raise ValueError("--resume: the checkpoint is of a model without a separate critic.")
        load_model(self.loss, state[self.name])
        self.optimizer.load_state_dict(state[f"{self.name}_optimizer"])


def apply_schedules(
    objectives: list[Objective],
    iteration: int,
    num_iterations: int,
    *,
    learning_rate: float,
    lr_schedule: str = "constant",
    max_learning_rate: float = 1e-2,
    max_learning_rate_final: float | None = None,
    entropy_coeff: float,
    entropy_coeff_final: float | None = None,
    critic_learning_rate: float | None = None,
) -> None:
    """Coefficients and learning rates of this iteration; the adaptive one moves inside the update.

    Args:
        max_learning_rate_final: what the adaptive rate's bound moves to linearly; None keeps it.
        critic_learning_rate: None follows the policy's, the adaptive one as well.
    """
    policy, *critics = objectives
    if entropy_coeff_final is not None:
        entropy_coeff = linear(entropy_coeff, entropy_coeff_final, iteration, num_iterations)
    policy.loss.get_buffer("entropy_coeff").fill_(entropy_coeff)
    if lr_schedule == "linear":
        set_learning_rate(policy.optimizer, linear(learning_rate, 0.0, iteration, num_iterations))
    elif policy.adapt_lr is not None and max_learning_rate_final is not None:
        policy.adapt_lr.highest.fill_(linear(max_learning_rate, max_learning_rate_final, iteration, num_iterations))
    for critic in critics:
        if critic_learning_rate is None:
            set_learning_rate(critic.optimizer, policy.optimizer.param_groups[0]["lr"])
        elif lr_schedule == "linear":
            set_learning_rate(critic.optimizer, linear(critic_learning_rate, 0.0, iteration, num_iterations))
