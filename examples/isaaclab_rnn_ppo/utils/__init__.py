"""The reusable pieces of the recurrent PPO suite."""

from isaaclab_rnn_ppo.utils.advantages import boundary_values, interleave, make_advantage, with_initial_state
from isaaclab_rnn_ppo.utils.assets import resolve_asset_root
from isaaclab_rnn_ppo.utils.checkpoint import checkpoint_path, load_checkpoint, load_model, save_checkpoint
from isaaclab_rnn_ppo.utils.collectors import RolloutCollector, bytes_of, make_collector, quiet_libraries
from isaaclab_rnn_ppo.utils.config import parse_args, user_errors
from isaaclab_rnn_ppo.utils.envs import make_env
from isaaclab_rnn_ppo.utils.logging import EpisodeStatistics, RunLogger
from isaaclab_rnn_ppo.utils.losses import RecurrentPPOLoss, make_loss
from isaaclab_rnn_ppo.utils.models import Models, make_models
from isaaclab_rnn_ppo.utils.rnn import GRU, LSTM, resolve_backend, rnn_forward
from isaaclab_rnn_ppo.utils.update import make_update, minibatches

__all__ = [
    "GRU",
    "LSTM",
    "EpisodeStatistics",
    "Models",
    "RecurrentPPOLoss",
    "RolloutCollector",
    "RunLogger",
    "boundary_values",
    "bytes_of",
    "checkpoint_path",
    "interleave",
    "load_checkpoint",
    "load_model",
    "make_advantage",
    "make_collector",
    "make_env",
    "make_loss",
    "make_models",
    "make_update",
    "minibatches",
    "parse_args",
    "quiet_libraries",
    "resolve_asset_root",
    "resolve_backend",
    "rnn_forward",
    "save_checkpoint",
    "user_errors",
    "with_initial_state",
]
