"""Recurrent actor-critic: one embedding, one recurrent core, two heads.

Shapes: N envs, T steps, L layers, H hidden, A actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import Composite, TensorSpec
from torchrl.modules import (
    ActorValueOperator,
    IndependentNormal,
    ProbabilisticActor,
    TanhNormal,
    ValueOperator,
)

from isaaclab_rnn_ppo.utils.rnn import GRU, LSTM

ACTIVATIONS = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU}
DISTRIBUTIONS = ("normal", "tanh_normal")


@dataclass(frozen=True)
class Models:
    """Views of one set of weights.

    Attributes:
        actor: observation -> action. What the workers run and the loss evaluates.
        value_operator: observation -> ``state_value`` [.., 1]; passes through the backbone.
        value_head: ``features`` -> ``state_value``; reads what ``actor`` has already computed, so
            that a loss runs the recurrent core once.
    """

    actor: ProbabilisticActor
    value_operator: TensorDictModuleBase
    value_head: TensorDictModuleBase


class GaussianHead(nn.Module):
    """Mean from the features, state-independent standard deviation.

    The standard deviation is ``exp(log_std)``: positive whatever the optimizer does to it.

    Args:
        in_features: H.
        num_actions: A.
        init_std: standard deviation before training, in units of the action.
    """

    def __init__(self, in_features: int, num_actions: int, *, hidden: Sequence[int], activation: str, init_std: float):
        super().__init__()
        self.mean = make_mlp(in_features, hidden, num_actions, activation)
        with torch.no_grad():  # near-zero first actions: Isaac Lab's action terms scale them up
            self.mean[-1].weight.mul_(0.01)
            self.mean[-1].bias.zero_()
        self.log_std = nn.Parameter(torch.full((num_actions,), float(init_std)).log())

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(features)
        return mean, self.log_std.exp().expand_as(mean)


def make_mlp(in_features: int, hidden: Sequence[int], out_features: int | None, activation: str) -> nn.Sequential:
    """Linear layers with ``activation`` between them; no activation after ``out_features``."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(in_features, width), ACTIVATIONS[activation]()]
        in_features = width
    if out_features is not None:
        layers.append(nn.Linear(in_features, out_features))
    return nn.Sequential(*layers)


def make_models(
    *,
    observation_spec: Composite,
    action_spec: TensorSpec,
    hidden_size: int = 256,
    num_layers: int = 1,
    rnn: str = "lstm",
    rnn_backend: str = "auto",
    embedding: Sequence[int] = (256,),
    head_hidden: Sequence[int] = (),
    activation: str = "elu",
    action_dist: str = "normal",
    init_std: float = 1.0,
    device: torch.device | str | None = None,
) -> Models:
    """Build actor and critic around one recurrent core.

    Args:
        observation_spec: the env's, with a ``policy`` entry [N, obs].
        action_spec: the env's, [N, A].
        hidden_size: H of the recurrent core.
        num_layers: L of the recurrent core.
        rnn: ``lstm``, ``gru`` or ``none`` (a feed-forward policy).
        rnn_backend: see :func:`isaaclab_rnn_ppo.utils.rnn.resolve_backend`.
        embedding: widths of the MLP before the core.
        head_hidden: widths of the MLP between the core and each head's output layer.
        activation: one of ``ACTIVATIONS``.
        action_dist: ``normal`` (unbounded, as Isaac Lab's other libraries use) or ``tanh_normal``.
        init_std: initial standard deviation of the policy.
        device: where the parameters live.

    Raises:
        ValueError: an unknown ``rnn``, ``activation`` or ``action_dist``.
    """
    cores = {"lstm": LSTM, "gru": GRU}
    if rnn not in (*cores, "none"):
        raise ValueError(f"--rnn {rnn}: valid are {', '.join(cores)}, none.")
    if activation not in ACTIVATIONS:
        raise ValueError(f"--activation {activation}: valid are {', '.join(ACTIVATIONS)}.")
    if action_dist not in DISTRIBUTIONS:
        raise ValueError(f"--action-dist {action_dist}: valid are {', '.join(DISTRIBUTIONS)}.")

    num_obs = observation_spec["policy"].shape[-1]
    num_actions = action_spec.shape[-1]
    embedding_net = make_mlp(num_obs, embedding, None, activation)
    num_embedded = embedding[-1] if embedding else num_obs
    if rnn == "none":
        backbone = TensorDictSequential(TensorDictModule(embedding_net, in_keys=["policy"], out_keys=["features"]))
        num_features = num_embedded
    else:
        core = cores[rnn](
            num_embedded, hidden_size, num_layers, in_key="embedded", out_key="features", backend=rnn_backend
        )
        backbone = TensorDictSequential(
            TensorDictModule(embedding_net, in_keys=["policy"], out_keys=["embedded"]), core
        )
        num_features = hidden_size

    actor_head = ProbabilisticActor(
        TensorDictModule(
            GaussianHead(num_features, num_actions, hidden=head_hidden, activation=activation, init_std=init_std),
            in_keys=["features"],
            out_keys=["loc", "scale"],
        ),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal if action_dist == "normal" else TanhNormal,
        return_log_prob=True,
    )
    value_head = ValueOperator(make_mlp(num_features, head_hidden, 1, activation), in_keys=["features"])
    actor_critic = ActorValueOperator(backbone, actor_head, value_head).to(device)
    return Models(
        actor=actor_critic.get_policy_operator(),
        value_operator=actor_critic.get_value_operator(),
        value_head=actor_critic.get_value_head(),
    )
