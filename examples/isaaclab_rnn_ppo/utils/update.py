"""One PPO update: loss, gradient clipping, optimizer.

Shapes: N envs, T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule, TensorDictModuleBase
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode
from torchrl.objectives import ClipPPOLoss

from isaaclab_rnn_ppo.utils.advantages import with_initial_state

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")


class RecurrentPPOLoss(ClipPPOLoss):
    """``ClipPPOLoss`` with the exact entropy, and no read-back of the device inside the loss.

    TorchRL 0.14.1 checks every entropy with ``isfinite().all()``, which waits for the device, and
    under ``torch.compile`` replaces it by a sampled one.
    """

    def _get_entropy(self, dist, adv_shape):
        return dist.entropy().unsqueeze(-1)


def make_loss(
    *,
    actor: TensorDictModuleBase,
    value_head: TensorDictModuleBase,
    clip_epsilon: float = 0.2,
    entropy_coeff: float = 0.005,
    value_coeff: float = 1.0,
) -> RecurrentPPOLoss:
    """Clipped surrogate, squared value error and entropy bonus (Schulman et al., 2017, arXiv:1707.06347).

    ``actor`` writes ``features`` on its way to the distribution and ``value_head`` reads them, so the
    recurrent core runs once.
    """
    return RecurrentPPOLoss(
        actor,
        value_head,
        clip_epsilon=clip_epsilon,
        entropy_coeff=entropy_coeff,
        critic_coeff=value_coeff,
        loss_critic_type="l2",
        normalize_advantage=False,
        functional=False,
        log_explained_variance=False,
    )


def make_update(
    *,
    loss_module: RecurrentPPOLoss,
    optimizer: torch.optim.Optimizer,
    clip_grad_norm: float = 1.0,
    compile_mode: str | None = None,
    cudagraphs: bool = False,
    cudagraph_warmup: int = 5,
) -> Callable[[TensorDictBase], dict[str, Tensor]]:
    """The update of one minibatch, optionally compiled and captured in a CUDA graph.

    Args:
        loss_module: from :func:`make_loss`.
        optimizer: over ``loss_module.parameters()``.
        clip_grad_norm: the gradient's global norm is scaled down to this.
        compile_mode: one of ``COMPILE_MODES``, or None for eager.
        cudagraphs: replay the whole update as one CUDA graph; needs a CUDA device.
        cudagraph_warmup: eager updates before the capture.

    Returns:
        a function of a minibatch (``steps`` [n, T], ``initial`` [n]) that returns scalars on the
        device: ``loss_policy``, ``loss_value``, ``entropy``, ``kl``, ``grad_norm``, ``clip_fraction``.

    Raises:
        ValueError: ``cudagraphs`` without parameters on a CUDA device.
    """
    parameters = list(loss_module.parameters())
    if cudagraphs and parameters[0].device.type != "cuda":
        raise ValueError("cudagraphs need the parameters on a CUDA device.")

    def update(minibatch: TensorDictBase) -> dict[str, Tensor]:
        with set_recurrent_mode(True):
            losses = loss_module(with_initial_state(minibatch["steps"], minibatch["initial"]))
        total = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
        total.backward()
        grad_norm = nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        metrics = {
            "loss_policy": losses["loss_objective"],
            "loss_value": losses["loss_critic"],
            "entropy": losses["entropy"],
            "kl": losses["kl_approx"],
            "clip_fraction": losses["clip_fraction"],
            "grad_norm": grad_norm,
        }
        return {name: value.detach() for name, value in metrics.items()}

    if compile_mode is not None:
        update = torch.compile(update, mode=compile_mode)
    if cudagraphs:
        update = CudaGraphModule(update, warmup=cudagraph_warmup)
    return update


def minibatches(num_envs: int, num_minibatches: int, device: torch.device | str) -> Iterator[Tensor]:
    """Env indices [num_envs / num_minibatches] that use every env once, in a new order each call."""
    yield from torch.randperm(num_envs, device=device).view(num_minibatches, -1)
