"""Recurrent actor and critic, sharing one backbone or each with its own.

Shapes: N envs, T steps, L layers, H hidden, A actions, * any batch.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn
from torchrl.data import Composite, TensorSpec
from torchrl.modules import (
    ActorValueOperator,
    IndependentNormal,
    ProbabilisticActor,
    SafeProbabilisticTensorDictSequential,
    TanhNormal,
    ValueOperator,
)

from isaaclab_rnn_ppo.utils.normalize import NormalizedValue, RunningNormalizer
from isaaclab_rnn_ppo.utils.rnn import GRU, LSTM, RecurrentCore

ACTIVATIONS = {"elu": nn.ELU, "relu": nn.ReLU, "tanh": nn.Tanh, "silu": nn.SiLU}
DISTRIBUTIONS = ("normal", "tanh_normal")
CORES = {"lstm": LSTM, "gru": GRU}
CRITIC_GROUP = "critic"


def _note_that_pandas_is_missing() -> None:
    """Tensordict 0.14.3 looks for it on the disk at every output of a module: 0.2 ms of a step that takes a few."""
    if "pandas" not in sys.modules and find_spec("pandas") is None:
        sys.modules["pandas"] = None  # type: ignore[assignment]  # how Python marks what cannot be imported


@dataclass(frozen=True)
class Models:
    """Views of one set of weights.

    Attributes:
        actor: observation -> action. What the loss evaluates and what acts at test time.
        collector_policy: what the workers run and are pushed: ``actor``, and beside it the separate
            critic's recurrent core, so that its state is collected too.
        value_operator: observation -> ``state_value`` [*, 1]; passes through the backbone.
        value_head: ``features`` -> ``state_value``; reads what ``actor`` has already computed, so
            that a loss runs the recurrent core once. None where the critic is separate.
        normalizers: (observation group, its normaliser) for each backbone that has one.
        value_normalizer: standardises the value targets, or None.
    """

    actor: ProbabilisticActor
    collector_policy: TensorDictModuleBase
    value_operator: TensorDictModuleBase
    value_head: TensorDictModuleBase | None
    normalizers: tuple[tuple[str, RunningNormalizer], ...] = ()
    value_normalizer: NormalizedValue | None = None

    @property
    def has_separate_critic(self) -> bool:
        return self.value_head is None

    def update_normalizers(self, steps: TensorDictBase) -> None:
        """Take in a batch [N, T] after the last update with it: not before, see ``normalize``.

        The window of an env that is not usable has value targets of NaN, and is left out.
        """
        for group, normalizer in self.normalizers:
            normalizer.update(torch.where(steps["value_target"].isnan(), torch.nan, steps[group]))
        if self.value_normalizer is not None:
            self.value_normalizer.update(steps["value_target"])


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
            output = self.mean[-1]
            assert isinstance(output, nn.Linear)
            output.weight.mul_(0.01)
            output.bias.zero_()
        self.log_std = nn.Parameter(torch.full((num_actions,), float(init_std)).log())

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        mean = self.mean(features)
        return mean, self.log_std.exp().expand_as(mean)


class Bfloat16(TensorDictModuleBase):
    """Runs a backbone under bf16 autocast; its features come out, and its state stays, in float32.

    It belongs to the model and not to the update, so that a worker's log-probabilities have the
    numerics that training recomputes them with.
    """

    def __init__(self, backbone: TensorDictModuleBase):
        super().__init__()
        self.backbone = backbone
        self.in_keys, self.out_keys = backbone.in_keys, backbone.out_keys

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        device = next(self.parameters()).device.type
        with torch.autocast(device, dtype=torch.bfloat16):
            tensordict = self.backbone(tensordict)
        key = next(key for key in self.out_keys if isinstance(key, str) and key.endswith("features"))
        return tensordict.set(key, tensordict.get(key).float())


def make_mlp(in_features: int, hidden: Sequence[int], out_features: int | None, activation: str) -> nn.Sequential:
    """Linear layers with ``activation`` between them; no activation after ``out_features``."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Linear(in_features, width), ACTIVATIONS[activation]()]
        in_features = width
    if out_features is not None:
        layers.append(nn.Linear(in_features, out_features))
    return nn.Sequential(*layers)


def init_memory(core: RecurrentCore, horizon_steps: float) -> None:
    """Start the units of a core with time constants spread over 1..``horizon_steps``.

    Chrono initialisation (Tallec and Ollivier, 2018, arXiv:1804.11188): with PyTorch's own biases a
    unit forgets half of its state at every step, and no gradient reaches a cue 20 steps back.
    """
    for layer in range(core.num_layers):
        bias_ih, bias_hh = getattr(core, f"bias_ih_l{layer}"), getattr(core, f"bias_hh_l{layer}")
        spread = torch.empty(core.hidden_size).uniform_(1.0, max(1.0, horizon_steps - 1.0)).log()
        # Gates in order: LSTM input, forget, cell, output; GRU reset, update, new. GRU's update gate keeps.
        with torch.no_grad():
            keep = slice(core.hidden_size, 2 * core.hidden_size)
            bias_hh[keep] = 0.0
            bias_ih[keep] = spread
            if core.cell == "lstm":
                bias_hh[: core.hidden_size] = 0.0
                bias_ih[: core.hidden_size] = -spread


def _make_backbone(
    group: str,
    num_obs: int,
    *,
    prefix: str,
    state_key: str,
    rnn: str,
    rnn_backend: str,
    rnn_recompute: bool,
    embedding: Sequence[int],
    hidden_size: int,
    num_layers: int,
    activation: str,
    normalize: bool,
    memory_horizon: float | None,
    amp: bool,
) -> tuple[TensorDictModuleBase, int, tuple[tuple[str, RunningNormalizer], ...]]:
    """Observation group -> ``prefix + "features"``; with the width of the features and the normaliser."""
    embedding_net = make_mlp(num_obs, embedding, None, activation)
    normalizers: tuple[tuple[str, RunningNormalizer], ...] = ()
    if normalize:
        normalizers = ((group, RunningNormalizer(num_obs)),)
        embedding_net = nn.Sequential(normalizers[0][1], *embedding_net)
    num_features = embedding[-1] if embedding else num_obs
    features = prefix + "features"
    if rnn == "none":
        backbone = TensorDictSequential(TensorDictModule(embedding_net, in_keys=[group], out_keys=[features]))
    else:
        core = CORES[rnn](
            num_features,
            hidden_size,
            num_layers,
            in_key=prefix + "embedded",
            out_key=features,
            state_key=state_key,
            backend=rnn_backend,
            recompute=rnn_recompute,
        )
        if memory_horizon is not None:
            init_memory(core, memory_horizon)
        embed = TensorDictModule(embedding_net, in_keys=[group], out_keys=[prefix + "embedded"])
        backbone, num_features = TensorDictSequential(embed, core), hidden_size
    return (Bfloat16(backbone) if amp else backbone), num_features, normalizers


def resolve_critic_group(observation_spec: Composite, critic_obs: str) -> str | None:
    """The observation group of a critic with a backbone of its own, or None where it shares the actor's.

    Args:
        critic_obs: ``auto`` (the group ``critic`` where the task has one), ``shared``, or a group.

    Raises:
        ValueError: the task has no such group.
    """
    groups = [key for key, spec in observation_spec.items() if spec.dtype.is_floating_point]
    if critic_obs == "auto":
        return CRITIC_GROUP if CRITIC_GROUP in groups else None
    if critic_obs == "shared":
        return None
    if critic_obs not in groups:
        raise ValueError(
            f"--critic-obs {critic_obs}: the task has no such observation group; valid are auto, shared, "
            f"{', '.join(sorted(groups))}."
        )
    return critic_obs


def make_models(
    *,
    observation_spec: Composite,
    action_spec: TensorSpec,
    hidden_size: int = 256,
    num_layers: int = 1,
    rnn: str = "lstm",
    rnn_backend: str = "auto",
    rnn_recompute: bool = False,
    embedding: Sequence[int] = (256,),
    head_hidden: Sequence[int] = (),
    activation: str = "elu",
    action_dist: str = "normal",
    init_std: float = 1.0,
    normalize_obs: bool = False,
    normalize_value: bool = False,
    memory_horizon: float | None = None,
    amp: str | None = None,
    critic_obs: str = "auto",
    critic_hidden_size: int | None = None,
    critic_num_layers: int | None = None,
    critic_embedding: Sequence[int] | None = None,
    critic_head_hidden: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> Models:
    """Build actor and critic around one recurrent core, or around one each.

    Args:
        observation_spec: the env's, with a ``policy`` entry [N, obs] and possibly a critic's.
        action_spec: the env's, [N, A].
        hidden_size: H of the recurrent core.
        num_layers: L of the recurrent core.
        rnn: ``lstm``, ``gru`` or ``none`` (feed-forward).
        rnn_backend: see :func:`isaaclab_rnn_ppo.utils.rnn.resolve_backend`.
        rnn_recompute: see :class:`isaaclab_rnn_ppo.utils.rnn.LSTM`.
        embedding: widths of the MLP before the core.
        head_hidden: widths of the MLP between the core and each head's output layer.
        activation: one of ``ACTIVATIONS``.
        action_dist: ``normal`` (unbounded, as Isaac Lab's other libraries use) or ``tanh_normal``.
        init_std: initial standard deviation of the policy.
        normalize_obs: a :class:`RunningNormalizer` before each embedding.
        normalize_value: a :class:`NormalizedValue` as value net.
        memory_horizon: longest time constant, in steps, that the core starts with (``init_memory``);
            None for PyTorch's initialisation.
        amp: ``bf16`` runs embedding and core in bfloat16, None or ``none`` in float32.
        critic_obs: see ``resolve_critic_group``.
        critic_hidden_size, critic_num_layers, critic_embedding, critic_head_hidden: of a separate
            critic; None takes the actor's. Its recurrent state is ``critic_state*``.
        device: where the parameters live.

    Raises:
        ValueError: an unknown ``rnn``, ``activation``, ``action_dist``, ``amp`` or ``critic_obs``.
    """
    for flag, value, valid in (
        ("--rnn", rnn, (*CORES, "none")),
        ("--activation", activation, tuple(ACTIVATIONS)),
        ("--action-dist", action_dist, DISTRIBUTIONS),
        ("--amp", amp or "none", ("none", "bf16")),
    ):
        if value not in valid:
            raise ValueError(f"{flag} {value}: valid are {', '.join(valid)}.")
    _note_that_pandas_is_missing()

    def or_actors(value, actors):
        return actors if value is None else value

    shared = {
        "rnn": rnn,
        "rnn_backend": rnn_backend,
        "rnn_recompute": rnn_recompute,
        "activation": activation,
        "normalize": normalize_obs,
        "memory_horizon": memory_horizon,
        "amp": amp == "bf16",
    }
    backbone, num_features, normalizers = _make_backbone(
        "policy",
        observation_spec["policy"].shape[-1],
        prefix="",
        state_key="recurrent_state",
        embedding=embedding,
        hidden_size=hidden_size,
        num_layers=num_layers,
        **shared,
    )
    actor_head = ProbabilisticActor(
        TensorDictModule(
            GaussianHead(
                num_features, action_spec.shape[-1], hidden=head_hidden, activation=activation, init_std=init_std
            ),
            in_keys=["features"],
            out_keys=["loc", "scale"],
        ),
        in_keys=["loc", "scale"],
        distribution_class=IndependentNormal if action_dist == "normal" else TanhNormal,
        return_log_prob=True,
    )

    group = resolve_critic_group(observation_spec, critic_obs)
    if group is None:
        value_net = make_mlp(num_features, head_hidden, 1, activation)
        value_net = NormalizedValue(value_net) if normalize_value else value_net
        actor_critic = ActorValueOperator(backbone, actor_head, ValueOperator(value_net, in_keys=["features"]))
        actor_critic = actor_critic.to(device)
        actor = actor_critic.get_policy_operator()
        return Models(
            actor=actor,
            collector_policy=actor,
            value_operator=actor_critic.get_value_operator(),
            value_head=actor_critic.get_value_head(),
            normalizers=normalizers,
            value_normalizer=value_net if isinstance(value_net, NormalizedValue) else None,
        )

    critic_backbone, num_critic_features, critic_normalizers = _make_backbone(
        group,
        observation_spec[group].shape[-1],
        prefix="critic_",
        state_key="critic_state",
        embedding=or_actors(critic_embedding, embedding),
        hidden_size=or_actors(critic_hidden_size, hidden_size),
        num_layers=or_actors(critic_num_layers, num_layers),
        **shared,
    )
    value_net = make_mlp(num_critic_features, or_actors(critic_head_hidden, head_hidden), 1, activation)
    value_net = NormalizedValue(value_net) if normalize_value else value_net
    critic = TensorDictSequential(critic_backbone, ValueOperator(value_net, in_keys=["critic_features"])).to(device)
    actor = SafeProbabilisticTensorDictSequential(backbone, *actor_head.module).to(device)
    return Models(
        actor=actor,
        collector_policy=TensorDictSequential(actor, critic_backbone),
        value_operator=critic,
        value_head=None,
        normalizers=normalizers + critic_normalizers,
        value_normalizer=value_net if isinstance(value_net, NormalizedValue) else None,
    )
