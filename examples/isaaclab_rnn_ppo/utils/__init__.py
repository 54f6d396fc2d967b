"""The reusable pieces of the recurrent PPO suite."""

from isaaclab_rnn_ppo.utils.advantages import boundary_values, interleave, make_advantage, with_initial_state
from isaaclab_rnn_ppo.utils.assets import resolve_asset_root
from isaaclab_rnn_ppo.utils.checkpoint import (
    check_settings,
    checkpoint_path,
    find_checkpoint,
    load_checkpoint,
    load_model,
    mark_run,
    restarted_run,
    restore_rng,
    resume_from,
    save_checkpoint,
    versions,
)
from isaaclab_rnn_ppo.utils.collectors import (
    AsyncCollector,
    RestartingCollector,
    RolloutCollector,
    SyncCollector,
    WorkerFault,
    bytes_of,
    make_collector,
    quiet_libraries,
)
from isaaclab_rnn_ppo.utils.config import critic_flags, parse_args, user_errors
from isaaclab_rnn_ppo.utils.envs import make_env
from isaaclab_rnn_ppo.utils.evaluate import NoEvaluation, evaluation_overrides, make_evaluation
from isaaclab_rnn_ppo.utils.learner import Objective, apply_schedules
from isaaclab_rnn_ppo.utils.logging import EpisodeStatistics, NoLogger, RunLogger
from isaaclab_rnn_ppo.utils.losses import RecurrentPPOLoss, kl_estimate, make_critic_loss, make_loss, value_loss
from isaaclab_rnn_ppo.utils.models import Models, make_models
from isaaclab_rnn_ppo.utils.nonfinite import NonFiniteRun, check_skipped
from isaaclab_rnn_ppo.utils.normalize import NormalizedValue, RunningNormalizer
from isaaclab_rnn_ppo.utils.ranks import (
    AgreedStop,
    average_over_ranks,
    data_parallel,
    from_first_rank,
    gather_on_first_rank,
    lost_contact,
    num_ranks,
    rank,
    require_agreement,
    seed_of_rank,
    sum_over_ranks,
    torchrun_variable,
)
from isaaclab_rnn_ppo.utils.restore import check_output
from isaaclab_rnn_ppo.utils.rnn import GRU, LSTM, resolve_backend, rnn_forward
from isaaclab_rnn_ppo.utils.schedules import AdaptiveLR, linear, make_optimizer, set_learning_rate
from isaaclab_rnn_ppo.utils.signals import Interrupted, interruptible
from isaaclab_rnn_ppo.utils.update import accelerate, compile_seconds, make_update, minibatches

__all__ = [
    "GRU",
    "LSTM",
    "AdaptiveLR",
    "AgreedStop",
    "AsyncCollector",
    "EpisodeStatistics",
    "Interrupted",
    "Models",
    "NoEvaluation",
    "NoLogger",
    "NonFiniteRun",
    "NormalizedValue",
    "Objective",
    "RecurrentPPOLoss",
    "RestartingCollector",
    "RolloutCollector",
    "RunLogger",
    "RunningNormalizer",
    "SyncCollector",
    "WorkerFault",
    "accelerate",
    "apply_schedules",
    "average_over_ranks",
    "boundary_values",
    "bytes_of",
    "check_output",
    "check_settings",
    "check_skipped",
    "checkpoint_path",
    "compile_seconds",
    "critic_flags",
    "data_parallel",
    "evaluation_overrides",
    "find_checkpoint",
    "from_first_rank",
    "gather_on_first_rank",
    "interleave",
    "interruptible",
    "kl_estimate",
    "linear",
    "load_checkpoint",
    "load_model",
    "lost_contact",
    "make_advantage",
    "make_collector",
    "make_critic_loss",
    "make_env",
    "make_evaluation",
    "make_loss",
    "make_models",
    "make_optimizer",
    "make_update",
    "mark_run",
    "minibatches",
    "num_ranks",
    "parse_args",
    "quiet_libraries",
    "rank",
    "require_agreement",
    "resolve_asset_root",
    "resolve_backend",
    "restarted_run",
    "restore_rng",
    "resume_from",
    "rnn_forward",
    "save_checkpoint",
    "seed_of_rank",
    "set_learning_rate",
    "sum_over_ranks",
    "torchrun_variable",
    "user_errors",
    "value_loss",
    "versions",
    "with_initial_state",
]
