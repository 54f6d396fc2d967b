"""The libraries that the benchmarks compare with, each driven through its own classes.

    uv sync --group peers

A contestant plays a `Window` (tables of observations, rewards and episode ends) with its own rollout code into its own
storage, and then learns from it with its own update. Each is built at its fastest settings for these sizes: one window
of T steps is one sequence, no value clipping, no adaptive learning rate, no normalisers, fused Adam where it lets
one choose, and one LSTM shared by actor and critic wherever the library can share it.

Shapes: N envs, T steps, O observation, A actions, H hidden.
"""

from __future__ import annotations

import contextlib
import copy
import io
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from isaaclab_rnn_ppo.utils import (
    Objective,
    make_advantage,
    make_critic_loss,
    make_loss,
    make_models,
    make_optimizer,
    make_update,
)
from isaaclab_rnn_ppo.utils.rnn import RecurrentCore
from tensor_env import TERMINATE, TRUNCATE, TableEnv, make_local_collector, with_transforms
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torchrl.data import Composite, Unbounded

GAMMA, LAMBDA, CLIP, ENTROPY, LR = 0.99, 0.95, 0.2, 0.005, 3e-4
EPOCHS, MINIBATCHES = 3, 4


@dataclass(frozen=True)
class Window:
    """What an env shows over T steps.

    Attributes:
        roots: observation that step t acts on, behind a reset the new episode's first, [T + 1, N, O].
        finals: true next observation of step t, [T, N, O].
        rewards: [T, N].
        ends: 0, TERMINATE or TRUNCATE, [T, N].
    """

    roots: Tensor
    finals: Tensor
    rewards: Tensor
    ends: Tensor

    @property
    def terminated(self) -> Tensor:
        return self.ends == TERMINATE

    @property
    def truncated(self) -> Tensor:
        return self.ends == TRUNCATE

    @property
    def done(self) -> Tensor:
        return self.ends > 0


def make_window(ends: Tensor, *, num_obs: int, seed: int = 0) -> Window:
    """Normal numbers around the given episode ends [T, N]."""
    generator = torch.Generator().manual_seed(seed)
    num_steps, num_envs = ends.shape
    roots = torch.randn(num_steps + 1, num_envs, num_obs, generator=generator)
    other = torch.randn(num_steps, num_envs, num_obs, generator=generator)
    finals = torch.where((ends > 0).unsqueeze(-1), other, roots[1:])
    return Window(roots, finals, torch.randn(num_steps, num_envs, generator=generator), ends)


def random_ends(num_envs: int, num_steps: int, rate: float = 0.03, seed: int = 0) -> Tensor:
    """Ends [T, N] at ``rate``, every other one a time-out."""
    draw = torch.rand(num_steps, num_envs, generator=torch.Generator().manual_seed(seed))
    return torch.where(draw < rate / 2, TERMINATE, torch.where(draw < rate, TRUNCATE, 0))


@dataclass(frozen=True)
class Critic:
    """A critic in three parts, to compute its values anew: embedding, nn.LSTM's weights, head."""

    embedding: nn.Module
    lstm: nn.LSTM
    head: nn.Module


class Contestant:
    """What every benchmark needs of a library.

    Attributes:
        num_lstms: 1 shared by actor and critic, or 2.
        bootstraps: what it uses where an episode was cut off inside the window.
    """

    num_lstms: int
    bootstraps: str

    def __init__(self, num_envs: int, num_steps: int, num_obs: int, num_actions: int, hidden: int):
        self.num_envs, self.num_steps, self.num_obs, self.num_actions = num_envs, num_steps, num_obs, num_actions
        self.hidden = hidden
        torch.manual_seed(0)

    def collect(self, window: Window) -> None:
        """Play the window from zero states into the storage, advantages included."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Called once before each phase, not timed: what a training run would not do."""

    def learn(self) -> None:
        """Advantages from what is stored, then epochs and minibatches."""
        raise NotImplementedError

    def advantages(self) -> Tensor:
        """Before normalisation, [T, N]."""
        raise NotImplementedError

    def storages(self) -> Iterable[Tensor | np.ndarray]:
        """Everything that holds a rollout between collection and update."""
        raise NotImplementedError

    def critic(self) -> Critic:
        raise NotImplementedError

    def modules(self) -> Iterable[nn.Module]:
        """Modules that contain the LSTMs."""
        raise NotImplementedError


def count_lstm_steps(contestant: Contestant) -> float:
    """Forward LSTM steps of one learning phase, padding included, in units of N x T."""
    steps = 0

    def count(module: nn.Module, args: tuple) -> None:
        nonlocal steps
        if isinstance(module, RecurrentCore):  # of a tensordict
            steps += args[0].numel()
        elif isinstance(args[0], PackedSequence):
            steps += len(args[0].data)
        else:
            steps += args[0].shape[0] * args[0].shape[1]

    cores = {
        core for root in contestant.modules() for core in root.modules() if isinstance(core, nn.LSTM | RecurrentCore)
    }
    handles = [core.register_forward_pre_hook(count) for core in cores]
    contestant.prepare()
    contestant.learn()
    for handle in handles:
        handle.remove()
    return steps / (contestant.num_envs * contestant.num_steps)


def sequential(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


# ------------------------------------------------------------------------------------------------------------- rsl_rl


class RslRl(Contestant):
    """rsl_rl's PPO with RNNModel; it has an MLP behind the LSTM and none before it."""

    num_lstms = 2
    bootstraps = "V(s_t), without the final observation"

    def __init__(self, *sizes: int):
        from rsl_rl.algorithms import PPO
        from rsl_rl.models import RNNModel
        from rsl_rl.storage import RolloutStorage

        super().__init__(*sizes)
        obs = TensorDict({"policy": torch.zeros(self.num_envs, self.num_obs)}, [self.num_envs])
        groups = {"actor": ["policy"], "critic": ["policy"]}
        options = {"hidden_dims": [self.hidden], "activation": "elu", "rnn_hidden_dim": self.hidden}
        gaussian = {"class_name": "GaussianDistribution", "init_std": 1.0}
        actor = RNNModel(obs, groups, "actor", self.num_actions, distribution_cfg=gaussian, **options)
        critic = RNNModel(obs, groups, "critic", 1, **options)
        storage = RolloutStorage("rl", self.num_envs, self.num_steps, obs, [self.num_actions])
        self.ppo = PPO(
            actor,
            critic,
            storage,
            num_learning_epochs=EPOCHS,
            num_mini_batches=MINIBATCHES,
            learning_rate=LR,
            clip_param=CLIP,
            entropy_coef=ENTROPY,
            gamma=GAMMA,
            lam=LAMBDA,
            use_clipped_value_loss=False,
            schedule="fixed",
            desired_kl=None,
        )

    def obs(self, observation: Tensor) -> TensorDict:
        return TensorDict({"policy": observation}, [self.num_envs])

    def collect(self, window: Window) -> None:
        self.ppo.storage.clear()
        self.ppo.actor.reset()
        self.ppo.critic.reset()
        with torch.inference_mode():
            for t in range(self.num_steps):
                self.ppo.act(self.obs(window.roots[t]))
                self.ppo.process_env_step(
                    self.obs(window.roots[t + 1]), window.rewards[t], window.done[t], {"time_outs": window.truncated[t]}
                )
            self.last = self.obs(window.roots[-1])
            self.ppo.compute_returns(self.last)

    def learn(self) -> None:
        with torch.inference_mode():
            self.ppo.compute_returns(self.last)
        self.ppo.update()

    def advantages(self) -> Tensor:
        return (self.ppo.storage.returns - self.ppo.storage.values).squeeze(-1)

    def storages(self) -> Iterable[Tensor]:
        store = self.ppo.storage
        yield from store.observations.values()
        yield from (store.actions, store.rewards, store.dones, store.values, store.returns, store.advantages)
        yield from (store.actions_log_prob, *store.distribution_params)
        yield from (*store.saved_hidden_state_a, *store.saved_hidden_state_c)

    def critic(self) -> Critic:
        return Critic(nn.Identity(), self.ppo.critic.rnn.rnn, self.ppo.critic.mlp)

    def modules(self) -> Iterable[nn.Module]:
        return self.ppo.actor, self.ppo.critic


# ------------------------------------------------------------------------------------------------------------ rl_games


class TableVecEnv:
    """rl_games' vectorised env."""

    window: Window

    def __init__(self):
        self.t = 0

    def reset(self) -> Tensor:
        self.t = 0
        return self.window.roots[0]

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        t, self.t = self.t, self.t + 1
        window = self.window
        return window.roots[t + 1], window.rewards[t], window.done[t].byte(), {"time_outs": window.truncated[t]}

    def set_train_info(self, frames: int, agent: Any) -> None:
        pass


class RlGames(Contestant):
    """rl_games' continuous A2CAgent with one LSTM behind the MLP."""

    num_lstms = 1
    bootstraps = "V(s_t), without the final observation"

    def __init__(self, *sizes: int):
        from rl_games.algos_torch.a2c_continuous import A2CAgent
        from rl_games.algos_torch.model_builder import ModelBuilder
        from rl_games.common.a2c_common import swap_and_flatten01
        from rl_games.common.algo_observer import DefaultAlgoObserver
        from rl_games.common.tr_helpers import DefaultRewardsShaper

        super().__init__(*sizes)

        class Agent(A2CAgent):
            def play_steps_rnn(self) -> dict[str, Any]:
                """The stock method behind its loop over the env."""
                last_values = self.get_values(self.obs)
                stored = self.experience_buffer.tensor_dict
                advantages = self.discount_values(
                    self.dones.float(), last_values, stored["dones"].float(), stored["values"], stored["rewards"]
                )
                batch = self.experience_buffer.get_transformed_list(swap_and_flatten01, self.tensor_list)
                batch["returns"] = swap_and_flatten01(advantages + stored["values"])
                batch["played_frames"] = self.batch_size
                batch["rnn_states"] = [
                    s.permute(1, 2, 0, 3).reshape(-1, s.shape[0] * s.shape[2], s.shape[3]) for s in self.mb_rnn_states
                ]
                batch["step_time"] = 0.0
                self.unnormalised = advantages
                return batch

        space = gymnasium.spaces.Box
        self.env = TableVecEnv()
        params = {
            "model": {"name": "continuous_a2c_logstd"},
            "network": {
                "name": "actor_critic",
                "separate": False,
                "space": {
                    "continuous": {
                        "mu_activation": "None",
                        "sigma_activation": "None",
                        "mu_init": {"name": "default"},
                        "sigma_init": {"name": "const_initializer", "val": 0},
                        "fixed_sigma": True,
                    }
                },
                "mlp": {
                    "units": [self.hidden],
                    "activation": "elu",
                    "d2rl": False,
                    "initializer": {"name": "default"},
                    "regularizer": {"name": "None"},
                },
                "rnn": {"name": "lstm", "units": self.hidden, "layers": 1, "before_mlp": False, "layer_norm": False},
            },
        }
        params["config"] = {
            "name": "benchmark",
            "env_name": "table",
            "env_info": {
                "observation_space": space(-np.inf, np.inf, (self.num_obs,)),
                "action_space": space(-1.0, 1.0, (self.num_actions,)),
            },
            "vec_env": self.env,
            "features": {"observer": DefaultAlgoObserver()},
            "reward_shaper": DefaultRewardsShaper(),
            "train_dir": tempfile.mkdtemp(),
            "device": "cpu",
            "num_actors": self.num_envs,
            "horizon_length": self.num_steps,
            "seq_length": self.num_steps,
            "minibatch_size": self.num_envs * self.num_steps // MINIBATCHES,
            "mini_epochs": EPOCHS,
            "learning_rate": LR,
            "lr_schedule": None,
            "schedule_type": "standard",
            "e_clip": CLIP,
            "clip_value": False,
            "entropy_coef": ENTROPY,
            "critic_coef": 2,
            "bounds_loss_coef": 0.0,
            "grad_norm": 1.0,
            "truncate_grads": True,
            "gamma": GAMMA,
            "tau": LAMBDA,
            "normalize_advantage": True,
            "normalize_input": False,
            "normalize_value": False,
            "value_bootstrap": True,
            "clip_actions": False,
            "print_stats": False,
        }
        with contextlib.redirect_stdout(io.StringIO()):
            params["config"]["network"] = ModelBuilder().load(params)
            self.agent = Agent("benchmark", params)
        self.agent.writer.close()
        self.stock = A2CAgent.play_steps_rnn
        self.agent.init_tensors()

    def collect(self, window: Window) -> None:
        self.env.window = window
        self.agent.init_tensors()
        self.agent.obs = self.agent.env_reset()
        self.agent.set_eval()
        with torch.no_grad():
            self.stock(self.agent)
            self.agent.play_steps_rnn()

    def learn(self) -> None:
        self.agent.train_epoch()

    def advantages(self) -> Tensor:
        return self.agent.unnormalised.squeeze(-1)

    def storages(self) -> Iterable[Tensor]:
        yield from self.agent.experience_buffer.tensor_dict.values()
        yield from self.agent.mb_rnn_states

    def critic(self) -> Critic:
        network = self.agent.model.a2c_network
        return Critic(network.actor_mlp, network.rnn.rnn, network.value)

    def modules(self) -> Iterable[nn.Module]:
        return (self.agent.model,)


# ---------------------------------------------------------------------------------------------------------------- skrl


class Skrl(Contestant):
    """skrl's PPO_RNN with a model after the LSTM example of its documentation, shared, its features computed once."""

    num_lstms = 1
    bootstraps = "V of the next episode's first observation, advantages carried across"
    time_limit_bootstrap = False

    def __init__(self, *sizes: int):
        from skrl.agents.torch.ppo import PPO_CFG, PPO_RNN
        from skrl.memories.torch import RandomMemory
        from skrl.models.torch import DeterministicMixin, GaussianMixin, Model

        super().__init__(*sizes)
        num_envs, num_steps, num_actions, hidden = self.num_envs, self.num_steps, self.num_actions, self.hidden
        num_obs = self.num_obs

        class Shared(GaussianMixin, DeterministicMixin, Model):
            def __init__(self, observation_space, action_space):
                Model.__init__(self, observation_space=observation_space, action_space=action_space, device="cpu")
                GaussianMixin.__init__(self, role="policy")
                DeterministicMixin.__init__(self, role="value")
                self.embedding = sequential(nn.Linear(num_obs, hidden), nn.ELU())
                self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
                self.mean, self.head = nn.Linear(hidden, num_actions), nn.Linear(hidden, 1)
                self.log_std = nn.Parameter(torch.zeros(num_actions))
                self.features = None

            def get_specification(self):
                return {"rnn": {"sequence_length": num_steps, "sizes": [(1, num_envs, hidden)] * 2}}

            def act(self, inputs, *, role=""):
                mixin = GaussianMixin if role == "policy" else DeterministicMixin
                return mixin.act(self, inputs, role=role)

            def compute(self, inputs, role=""):
                if role == "value" and self.features is not None:
                    features, self.features = self.features, None
                    return self.head(features[0]), {"rnn": features[1]}
                x = self.embedding(inputs["observations"])
                state = inputs["rnn"]
                if self.training:
                    x, done = x.view(-1, num_steps, hidden), inputs["terminated"] | inputs["truncated"]
                    state = [s.view(1, -1, num_steps, hidden)[:, :, 0].contiguous() for s in state]
                    done = done.view(-1, num_steps)
                    cuts = [0, *(done[:, :-1].any(0).nonzero().flatten() + 1).tolist(), num_steps]
                    outputs = []
                    for start, stop in pairwise(cuts):
                        out, state = self.lstm(x[:, start:stop], tuple(state))
                        keep = done[:, stop - 1].logical_not().view(1, -1, 1)
                        state = [s * keep for s in state]
                        outputs.append(out)
                    x = torch.cat(outputs, 1).flatten(0, 1)
                else:
                    x, state = self.lstm(x.unsqueeze(1), tuple(state))
                    x = x.squeeze(1)
                if role == "policy":
                    self.features = x, list(state)
                    return self.mean(x), {"log_std": self.log_std, "rnn": list(state)}
                return self.head(x), {"rnn": list(state)}

        obs_space = gymnasium.spaces.Box(-np.inf, np.inf, (num_obs,))
        act_space = gymnasium.spaces.Box(-np.inf, np.inf, (num_actions,))
        self.model = Shared(obs_space, act_space)
        config = PPO_CFG(
            rollouts=num_steps,
            learning_epochs=EPOCHS,
            mini_batches=MINIBATCHES,
            discount_factor=GAMMA,
            gae_lambda=LAMBDA,
            learning_rate=LR,
            ratio_clip=CLIP,
            value_clip=0,
            entropy_loss_scale=ENTROPY,
            value_loss_scale=1.0,
            grad_norm_clip=1.0,
            kl_threshold=0,
            time_limit_bootstrap=self.time_limit_bootstrap,
        )
        config.experiment.write_interval = config.experiment.checkpoint_interval = 0
        self.memory = RandomMemory(memory_size=num_steps, num_envs=num_envs, device="cpu")
        self.agent = PPO_RNN(
            models={"policy": self.model, "value": self.model},
            memory=self.memory,
            observation_space=obs_space,
            action_space=act_space,
            device="cpu",
            cfg=config,
        )
        self.agent.init()

    def collect(self, window: Window) -> None:
        self.agent.training = True
        self.agent.enable_models_training_mode(False)
        for states in self.agent._rnn_initial_states.values():
            for state in states:
                state.zero_()
        with torch.no_grad():
            for t in range(self.num_steps):
                actions, _ = self.agent.act(window.roots[t], None, timestep=t, timesteps=self.num_steps)
                self.agent.record_transition(
                    observations=window.roots[t],
                    states=None,
                    actions=actions,
                    rewards=window.rewards[t].unsqueeze(-1).clone(),
                    next_observations=window.roots[t + 1],
                    next_states=None,
                    terminated=window.terminated[t].unsqueeze(-1),
                    truncated=window.truncated[t].unsqueeze(-1),
                    infos={},
                    timestep=t,
                    timesteps=self.num_steps,
                )

    def learn(self) -> None:
        self.agent.enable_models_training_mode(True)
        self.agent.update(timestep=self.num_steps, timesteps=self.num_steps)
        self.agent.tracking_data.clear()

    def advantages(self) -> Tensor:
        """By the agent's own update, with the epochs left out."""
        self.agent.cfg.learning_epochs, epochs = 0, self.agent.cfg.learning_epochs
        with contextlib.suppress(ZeroDivisionError):  # it divides its statistics by the number of epochs
            self.learn()
        self.agent.cfg.learning_epochs = epochs
        get = self.memory.get_tensor_by_name
        return (get("returns") - get("values")).squeeze(-1)

    def storages(self) -> Iterable[Tensor]:
        return self.memory.tensors.values()

    def critic(self) -> Critic:
        return Critic(self.model.embedding, self.model.lstm, self.model.head)

    def modules(self) -> Iterable[nn.Module]:
        return (self.model,)


# --------------------------------------------------------------------------------------------------------- sb3-contrib


class Sb3(Contestant):
    """sb3-contrib's RecurrentPPO with one shared LSTM behind an embedding."""

    num_lstms = 1
    bootstraps = "V(final observation | state), env by env"

    def __init__(self, *sizes: int):
        from sb3_contrib import RecurrentPPO
        from stable_baselines3.common.logger import configure
        from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
        from stable_baselines3.common.vec_env import VecEnv

        super().__init__(*sizes)
        hidden, num_envs = self.hidden, self.num_envs

        class Embedding(BaseFeaturesExtractor):
            def __init__(self, observation_space):
                super().__init__(observation_space, hidden)
                self.net = sequential(nn.Linear(observation_space.shape[0], hidden), nn.ELU())

            def forward(self, observations):
                return self.net(observations)

        class Env(VecEnv):
            window: Window

            def reset(self):
                self.t = 0
                return self.window.roots[0].numpy()

            def step_async(self, actions):
                pass

            def step_wait(self):
                t, self.t = self.t, self.t + 1
                window = self.window
                infos = [{} for _ in range(num_envs)]
                for i in window.done[t].nonzero().flatten().tolist():
                    infos[i] = {
                        "terminal_observation": window.finals[t, i].numpy(),
                        "TimeLimit.truncated": bool(window.truncated[t, i]),
                    }
                return window.roots[t + 1].numpy(), window.rewards[t].numpy().copy(), window.done[t].numpy(), infos

            def close(self): ...

            def get_attr(self, name, indices=None):
                return [None] * num_envs

            def set_attr(self, name, value, indices=None): ...

            def env_method(self, name, *args, indices=None, **kwargs): ...

            def env_is_wrapped(self, wrapper_class, indices=None):
                return [False] * num_envs

        self.env = Env(
            num_envs,
            gymnasium.spaces.Box(-np.inf, np.inf, (self.num_obs,)),
            gymnasium.spaces.Box(-100.0, 100.0, (self.num_actions,)),  # it wants finite bounds
        )
        self.ppo = RecurrentPPO(
            "MlpLstmPolicy",
            self.env,
            n_steps=self.num_steps,
            batch_size=num_envs * self.num_steps // MINIBATCHES,
            n_epochs=EPOCHS,
            gamma=GAMMA,
            gae_lambda=LAMBDA,
            learning_rate=LR,
            clip_range=CLIP,
            ent_coef=ENTROPY,
            vf_coef=1.0,
            max_grad_norm=1.0,
            device="cpu",
            policy_kwargs={
                "features_extractor_class": Embedding,
                "lstm_hidden_size": hidden,
                "shared_lstm": True,
                "enable_critic_lstm": False,
                "net_arch": [],
                "optimizer_kwargs": {"fused": True},
            },
        )
        self.ppo.set_logger(configure(None, []))

    def collect(self, window: Window) -> None:
        from stable_baselines3.common.callbacks import CallbackList

        self.env.window = window
        self.ppo._last_obs, self.ppo._last_episode_starts = self.env.reset(), np.ones(self.num_envs, dtype=bool)
        callback = CallbackList([])
        callback.init_callback(self.ppo)
        self.ppo.ep_info_buffer, self.ppo.ep_success_buffer = [], []
        self.ppo.collect_rollouts(self.env, callback, self.ppo.rollout_buffer, self.num_steps)
        self.stored, self.copies = self.ppo.rollout_buffer, []

    def prepare(self) -> None:
        self.copies.append(copy.deepcopy(self.stored))  # training flattens a buffer in place

    def learn(self) -> None:
        self.ppo.rollout_buffer = self.copies.pop()
        dones = self.ppo._last_episode_starts
        with torch.no_grad():
            obs = torch.as_tensor(self.ppo._last_obs)
            starts = torch.as_tensor(dones, dtype=torch.float32)
            values = self.ppo.policy.predict_values(obs, self.ppo._last_lstm_states.vf, starts)
        self.ppo.rollout_buffer.compute_returns_and_advantage(last_values=values, dones=dones)
        self.ppo.train()

    def advantages(self) -> Tensor:
        return torch.as_tensor(self.stored.advantages)

    def storages(self) -> Iterable[np.ndarray]:
        return [value for value in vars(self.stored).values() if isinstance(value, np.ndarray)]

    def critic(self) -> Critic:
        policy = self.ppo.policy
        return Critic(policy.features_extractor, policy.lstm_actor, policy.value_net)

    def modules(self) -> Iterable[nn.Module]:
        return (self.ppo.policy,)


# ------------------------------------------------------------------------------------------------------ TorchRL, stock


def table_env(window: Window, num_actions: int) -> TableEnv:
    return TableEnv(window.roots, window.finals, window.ends, window.rewards, num_actions=num_actions)


class TorchRl(Contestant):
    """TorchRL's own LSTMModule, GAE and ClipPPOLoss; the value head reads the actor's features."""

    num_lstms = 1
    bootstraps = "V of the next episode's first observation (shifted GAE); exact without `shifted`, for one more pass"
    collector_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, *sizes: int):
        from torchrl.modules import (
            ActorValueOperator,
            IndependentNormal,
            LSTMModule,
            ProbabilisticActor,
            ValueOperator,
        )
        from torchrl.objectives import ClipPPOLoss
        from torchrl.objectives.value import GAE

        super().__init__(*sizes)
        hidden = self.hidden

        class Head(nn.Module):
            def __init__(self, num_actions: int):
                super().__init__()
                self.mean, self.log_std = nn.Linear(hidden, num_actions), nn.Parameter(torch.zeros(num_actions))

            def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
                mean = self.mean(features)
                return mean, self.log_std.exp().expand_as(mean)

        embedding = sequential(nn.Linear(self.num_obs, hidden), nn.ELU())
        self.lstm = LSTMModule(input_size=hidden, hidden_size=hidden, in_key="embedded", out_key="features")
        actor = ProbabilisticActor(
            TensorDictModule(Head(self.num_actions), in_keys=["features"], out_keys=["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=IndependentNormal,
            return_log_prob=True,
        )
        backbone = TensorDictSequential(
            TensorDictModule(embedding, in_keys=["policy"], out_keys=["embedded"]), self.lstm
        )
        self.model = ActorValueOperator(backbone, actor, ValueOperator(nn.Linear(hidden, 1), in_keys=["features"]))
        self.policy = self.model.get_policy_operator()
        self.gae = GAE(
            gamma=GAMMA, lmbda=LAMBDA, value_network=self.model.get_value_operator(), shifted=True, vectorized=True
        )
        self.raw_gae = GAE(
            gamma=GAMMA,
            lmbda=LAMBDA,
            value_network=self.model.get_value_operator(),
            deactivate_vmap=True,
            vectorized=True,
        )
        self.loss = ClipPPOLoss(
            self.policy,
            self.model.get_value_head(),
            clip_epsilon=CLIP,
            entropy_coeff=ENTROPY,
            critic_coeff=1.0,
            loss_critic_type="l2",
            normalize_advantage=True,
        )
        self.parameters = list(self.loss.parameters())
        self.optimizer = torch.optim.Adam(self.parameters, lr=LR, fused=True)

    def collect(self, window: Window) -> None:
        from torchrl.collectors import Collector

        collector = Collector(
            lambda: with_transforms(table_env(window, self.num_actions)),
            self.policy,
            frames_per_batch=self.num_envs * self.num_steps,
            auto_register_policy_transforms=True,
            **self.collector_options,
        )
        self.batch = next(iter(collector))
        self.batch.names = [None, "time"]
        collector.shutdown()

    def learn(self) -> None:
        from torchrl.modules import set_recurrent_mode

        with set_recurrent_mode(True):
            with torch.no_grad():
                batch = self.gae(self.batch.copy())
            for _ in range(EPOCHS):
                for ids in torch.randperm(self.num_envs).view(MINIBATCHES, -1):
                    losses = self.loss(batch[ids])
                    loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                    self.optimizer.zero_grad(set_to_none=True)
                    loss.backward()
                    nn.utils.clip_grad_norm_(self.parameters, 1.0)
                    self.optimizer.step()

    def advantages(self) -> Tensor:
        from torchrl.modules import set_recurrent_mode

        with set_recurrent_mode(True), torch.no_grad():
            return self.raw_gae(self.batch.copy())["advantage"].squeeze(-1).T

    def storages(self) -> Iterable[Tensor]:
        return self.batch.values(True, True)

    def critic(self) -> Critic:
        backbone, head = self.model[0], self.model.get_value_head()
        return Critic(backbone[0].module, self.lstm.lstm, head.module)

    def modules(self) -> Iterable[nn.Module]:
        return (self.model,)


# ---------------------------------------------------------------------------------------------------------------- ours


class Ours(Contestant):
    """This suite, with one LSTM."""

    num_lstms = 1
    bootstraps = "V(final observation | state), all in one pass"
    critic_obs = "shared"
    boundary_slots: int | None = None
    """None for as many as the window needs to be exact throughout; train.py's default is 2."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.models = make_models(
            observation_spec=Composite(policy=Unbounded((self.num_envs, self.num_obs)), shape=[self.num_envs]),
            action_spec=Unbounded((self.num_envs, self.num_actions)),
            hidden_size=self.hidden,
            critic_obs=self.critic_obs,
            **self.layout(),
        )
        self.advantage = self.make_advantage(normalize=True)
        losses = {"model": make_loss(actor=self.models.actor, value_head=self.models.value_head, entropy_coeff=ENTROPY)}
        if self.models.has_separate_critic:
            losses["critic"] = make_critic_loss(value_operator=self.models.value_operator)
        self.objectives = []
        for name, loss in losses.items():
            optimizer = make_optimizer(loss.parameters(), LR)
            update = make_update(loss_module=loss, optimizer=optimizer)
            self.objectives.append(Objective(name, loss, optimizer, update, EPOCHS, MINIBATCHES))

    def layout(self) -> dict[str, tuple[int, ...]]:
        return {"embedding": (self.hidden,)}

    def make_advantage(self, *, normalize: bool) -> Callable:
        return make_advantage(
            value_operator=self.models.value_operator,
            gamma=GAMMA,
            gae_lambda=LAMBDA,
            vectorized=True,
            normalize=normalize,
        )

    def collect(self, window: Window) -> None:
        slots = self.boundary_slots or int(window.truncated[:-1].sum(0).max()) + 1
        collector = make_local_collector(
            with_transforms(table_env(window, self.num_actions)),
            rollout_steps=self.num_steps,
            make_policy=lambda **specs: self.models.collector_policy,
            boundary_slots=slots,
        )
        self.batch = next(iter(collector))

    def learn(self) -> None:
        training = self.advantage(self.batch)
        for objective in self.objectives:
            objective.learn(training)

    def advantages(self) -> Tensor:
        training = self.make_advantage(normalize=False)(self.batch)
        assert not training["bootstrap_approximated"].any()
        return training["steps", "advantage"].squeeze(-1).T

    def storages(self) -> Iterable[Tensor]:
        return self.batch.values(True, True)

    def critic(self) -> Critic:
        backbone, head = self.models.value_operator[0], self.models.value_head
        core = next(module for module in backbone.modules() if isinstance(module, RecurrentCore))
        lstm = nn.LSTM(core.input_size, core.hidden_size)
        with torch.no_grad():
            for mine, theirs in zip(lstm.parameters(), core.flat_weights(), strict=True):
                mine.copy_(theirs)
        return Critic(backbone[0].module, lstm, head.module)

    def modules(self) -> Iterable[nn.Module]:
        return self.models.collector_policy, self.models.value_operator


class OursSeparate(Ours):
    """This suite, with an LSTM for the actor and one for the critic, and rsl_rl's layout: the layer behind each."""

    num_lstms = 2
    critic_obs = "policy"

    def layout(self) -> dict[str, tuple[int, ...]]:
        return {"embedding": (), "head_hidden": (self.hidden,)}


CONTESTANTS: dict[str, type[Contestant]] = {
    "ours": Ours,
    "ours, 2 LSTMs": OursSeparate,
    "rl_games": RlGames,
    "skrl": Skrl,
    "sb3-contrib": Sb3,
    "torchrl": TorchRl,
    "rsl_rl": RslRl,
}
PACKAGES = {"rsl-rl-lib", "rl-games", "skrl", "sb3-contrib", "torchrl"}
