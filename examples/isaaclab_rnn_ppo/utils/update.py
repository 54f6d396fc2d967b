"""One PPO update: loss, gradient clipping, optimizer.

Shapes: N envs, T steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from tensordict import TensorDictBase
from tensordict.nn import CudaGraphModule
from torch import Tensor, nn
from torchrl.modules import set_recurrent_mode

from isaaclab_rnn_ppo.utils.advantages import with_initial_state

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")


def make_update(
    *,
    loss_module: nn.Module,
    optimizer: torch.optim.Optimizer,
    clip_grad_norm: float = 1.0,
    adapt_lr: Callable[[Tensor], None] | None = None,
    compile_mode: str | None = None,
    cudagraphs: bool = False,
    cudagraph_warmup: int = 5,
) -> Callable[[TensorDictBase], dict[str, Tensor]]:
    """The update of one minibatch, optionally compiled and captured in a CUDA graph.

    Args:
        loss_module: of a window [n, T] returns scalars; those named ``loss_*`` add up to the loss.
        optimizer: over ``loss_module.parameters()``.
        clip_grad_norm: the gradient's global norm is scaled down to this.
        adapt_lr: given the minibatch's ``kl`` before each step; see ``schedules.AdaptiveLR``.
        compile_mode: one of ``COMPILE_MODES``, or None for eager.
        cudagraphs: replay the whole update as one CUDA graph; needs a CUDA device.
        cudagraph_warmup: eager updates before the capture.

    Returns:
        a function of a minibatch (``steps`` [n, T], ``initial`` [n]) that returns the loss module's
        scalars and ``grad_norm`` (before clipping), on the device.

    Raises:
        ValueError: ``cudagraphs`` without parameters on a CUDA device.
    """
    parameters = list(loss_module.parameters())
    if cudagraphs and parameters[0].device.type != "cuda":
        raise ValueError("cudagraphs need the parameters on a CUDA device.")

    def update(minibatch: TensorDictBase) -> dict[str, Tensor]:
        with set_recurrent_mode(True):
            metrics = loss_module(with_initial_state(minibatch["steps"], minibatch["initial"]))
        sum(value for name, value in metrics.items() if name.startswith("loss_")).backward()
        metrics["grad_norm"] = nn.utils.clip_grad_norm_(parameters, clip_grad_norm)
        if adapt_lr is not None:
            adapt_lr(metrics["kl"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return {name: value.detach() for name, value in metrics.items()}

    if compile_mode is not None:
        update = torch.compile(update, mode=compile_mode)
    if cudagraphs:
        update = CudaGraphModule(update, warmup=cudagraph_warmup)
    return update


def minibatches(num_envs: int, num_minibatches: int, device: torch.device | str) -> Iterator[Tensor]:
    """Env indices [num_envs / num_minibatches] that use every env once, in a new order each call."""
    yield from torch.randperm(num_envs, device=device).view(num_minibatches, -1)
