"""rsl_rl's recurrent runner for Isaac-Cartpole and Isaac-Cartpole-Recall, as Isaac Lab's own entry point takes it.

    isaaclab train --rl_library rsl_rl --external_callback rsl_rl_lstm.register --agent rsl_rl_lstm_cfg_entry_point ...

Isaac Lab's settings for Isaac-Cartpole (5 epochs, 4 minibatches, adaptive learning rate from 1e-3, desired KL 0.01,
entropy 0.005), with an LSTM of 64 units each for actor and critic and a layer of 64 behind it.
"""

import gymnasium
from isaaclab.utils import configclass
from isaaclab_rl.rsl_rl import RslRlRNNModelCfg
from isaaclab_tasks.core.cartpole.agents.rsl_rl_ppo_cfg import CartpolePPORunnerCfg

HIDDEN = 64


def model(**options) -> RslRlRNNModelCfg:
    return RslRlRNNModelCfg(
        hidden_dims=[HIDDEN],
        activation="elu",
        obs_normalization=False,
        rnn_type="lstm",
        rnn_hidden_dim=HIDDEN,
        rnn_num_layers=1,
        **options,
    )


@configclass
class LstmRunnerCfg(CartpolePPORunnerCfg):
    experiment_name = "cartpole_lstm"
    actor = model(distribution_cfg=RslRlRNNModelCfg.GaussianDistributionCfg(init_std=1.0))
    critic = model()


@configclass
class RecallRunnerCfg(LstmRunnerCfg):
    """Windows as long as in this suite's preset."""

    num_steps_per_env = 64


def register() -> None:
    """Add the configuration to the tasks; Isaac Lab calls this with ``--external_callback``."""
    import isaaclab_tasks  # noqa: F401  registers Isaac Lab's tasks
    from isaaclab_rnn_ppo.utils import tasks  # noqa: F401  registers this suite's

    for task, cfg in {"Isaac-Cartpole": LstmRunnerCfg, "Isaac-Cartpole-Recall": RecallRunnerCfg}.items():
        gymnasium.spec(task).kwargs["rsl_rl_lstm_cfg_entry_point"] = f"{__name__}:{cfg.__name__}"
