"""A recipe of one's own: another task, another loss, another logger."""

import argparse
from functools import partial

import torch
from isaaclab_rnn_ppo import utils
from tensordict import TensorDictBase
from torch import nn
from torchrl.record.loggers.tensorboard import TensorboardLogger

TASK = "blind_balance:Blind-Balance"  # the module that the worker imports, and the id that it registers


def make_models(**specs) -> utils.Models:
    return utils.make_models(**specs, hidden_size=64, embedding=(64,))


def make_policy(**specs) -> nn.Module:  # what the worker runs; it imports this by name
    return make_models(**specs).collector_policy


class PenaltyLoss(nn.Module):
    """A KL penalty instead of PPO's clip (Schulman et al., 2017, arXiv:1707.06347, eq. 8), and Huber's value error."""

    def __init__(self, models: utils.Models, *, kl_coeff: float):
        super().__init__()
        assert models.value_head is not None  # it shares the actor's backbone
        self.actor, self.value_head, self.kl_coeff = models.actor, models.value_head, kl_coeff

    def forward(self, window: TensorDictBase) -> dict[str, torch.Tensor]:
        """Scalars of a window [N, T]; what begins with ``loss_`` is added up."""
        dist = self.actor.get_dist(window)  # leaves `features` in the window for the value head
        log_ratio = dist.log_prob(window["action"]) - window["action_log_prob"]
        kl = utils.kl_estimate(log_ratio)
        return {
            "loss_policy": -(log_ratio.exp() * window["advantage"].squeeze(-1)).mean(),
            "loss_kl": self.kl_coeff * kl,
            "loss_value": nn.functional.huber_loss(self.value_head(window)["state_value"], window["value_target"]),
            "kl": kl.detach(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--num-envs", type=int, default=256, help="a multiple of the 4 minibatches")
    parser.add_argument("--log-dir", default="runs/custom_recipe", help="TensorBoard's folder")
    args = parser.parse_args()
    torch.manual_seed(0)
    env = partial(utils.make_env, TASK, asset_root=utils.resolve_asset_root("bundled")[0])
    collector = utils.make_collector(
        create_env_fn=env, make_policy=make_policy, num_envs=args.num_envs, rollout_steps=16
    )
    try:
        models = make_models(**{name: collector.getattr_env(name) for name in ("observation_spec", "action_spec")})
        advantage = utils.make_advantage(value_operator=models.value_operator)
        loss = PenaltyLoss(models, kl_coeff=1.0)
        optimizer = utils.make_optimizer(loss.parameters(), 1e-3)
        update = utils.make_update(loss_module=loss, optimizer=optimizer)
        objective = utils.Objective("model", loss, optimizer, update, num_epochs=5, num_minibatches=4)
        episodes = utils.EpisodeStatistics(collector.getattr_env("log_names"))
        logger = TensorboardLogger("blind_balance", log_dir=args.log_dir)
        rollouts = iter(collector)
        for iteration in range(1, args.iterations + 1):
            collector.update_policy_weights_(models.collector_policy)
            batch = next(rollouts)
            metrics = episodes.update(batch["episodes"]) | objective.learn(advantage(batch))
            logger.log_metrics({name: float(value) for name, value in metrics.items()}, step=iteration)
            print(f"iteration {iteration}  return {metrics['episode_return']:.2f}  kl {metrics['kl']:.4f}", flush=True)
    finally:
        collector.shutdown()


if __name__ == "__main__":  # the worker imports this file too
    main()
