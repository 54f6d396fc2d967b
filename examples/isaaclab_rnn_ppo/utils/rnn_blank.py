"""The `blank` backend: torch.lstm, fused by oneDNN on the CPU, made to reset in the middle of a window.

Shapes: T steps, N envs, E input features, H hidden. Everything here is time-major, one layer a call.

A fused kernel takes no resets. So a blank step goes before each of them, whose gates two more input features with huge
weights decide: input, forget and output gate are shut, which leaves exact zeros in the state and lets no gradient
through. Envs with fewer resets than others end with steps that keep their cell state. A window of T steps with at most
K resets in an env takes T + K steps of the fast kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .rnn_scan import scan_layer

_SHUT = -1e30  # a sigmoid makes exactly 0 of it, whatever is added that trains
_MAX_WIDTH = 8192  # envs x hidden units: beyond, `scan` trains as fast


def blanks_pay(*, cell: str, reset: Tensor, weights: Sequence[Tensor], state: Sequence[Tensor]) -> bool:
    """Whether this backend is faster than `scan` for a layer: reset [T, N], the rest as `scan_layer`'s.

    Reads the resets, which on the CPU is free.
    """
    steps, envs = reset.shape
    fits = cell == "lstm" and reset.device.type == "cpu" and weights[0].dtype == state[0].dtype == torch.float32
    if not fits or torch.compiler.is_compiling() or not torch.backends.mkldnn.is_available():
        return False
    trains = torch.is_grad_enabled() and envs * weights[1].shape[1] > _MAX_WIDTH
    return not trains and int(reset[1:].sum(0).max() if steps > 1 else 0) <= steps // 4


class _Spread(torch.autograd.Function):
    """Rows [M, E] at `index` of [L, E + 2], zeros elsewhere, with `flags` [L, 2] behind them."""

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor, flags: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.width = rows.shape[1]
        out = rows.new_zeros(len(flags), ctx.width + 2)
        out[:, ctx.width :] = flags
        out[:, : ctx.width].index_copy_(0, index, rows)
        return out

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (index,) = ctx.saved_tensors
        return grad_outputs[0][:, : ctx.width].index_select(0, index), None, None


class _Pick(torch.autograd.Function):
    """Rows [M, H] of [L, H] at `index`, which names none twice."""

    @staticmethod
    def forward(ctx, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = rows.shape
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (index,) = ctx.saved_tensors
        return grad_outputs[0].new_zeros(ctx.shape).index_copy_(0, index, grad_outputs[0]), None


def _flag_weights(like: Tensor, hidden: int) -> Tensor:
    """Columns [4H, 2] for nn.LSTM's rows i, f, g, o: what a blank step and what a keeping step adds to each gate."""
    columns = like.new_zeros(4, hidden, 2)
    columns[0] = columns[1] = columns[3] = _SHUT
    columns[1, :, 1] = -_SHUT
    return columns.view(4 * hidden, 2)


def blank_lstm_layer(
    cell: str, x: Tensor, state: tuple[Tensor, ...], reset: Tensor, weights: tuple[Tensor, ...], *, recompute: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer over a window; arguments and results as `rnn_scan.scan_layer`'s, for an LSTM in one dtype.

    Zero times NaN is NaN: where an output is not finite, `scan` runs instead, which isolates episodes even then.
    """
    (steps, envs), hidden = reset.shape, weights[1].shape[1]
    if reset[0].any():
        state = tuple(torch.where(reset[0].unsqueeze(-1), 0.0, part) for part in state)
    entering = tuple(part.unsqueeze(0) for part in state)
    options = (True, 1, 0.0, torch.is_grad_enabled(), False, False)
    blank = reset.clone()
    blank[0] = False
    before = blank.cumsum(0)  # [T, N], blank steps up to each step
    length = steps + int(before[-1].max())
    if length == steps:
        y, h, c = torch.lstm(x.contiguous(), entering, weights, *options)
        return y, (h[0], c[0])

    # Rows of the longer window [length * N], in batch-first order, in which the input comes.
    index = torch.arange(steps, device=x.device).unsqueeze(1) + before
    index = index.mul_(envs).add_(torch.arange(envs, device=x.device))
    rows = index.t().flatten()
    flags = x.new_zeros(length * envs, 2)
    flags[:, 1] = 1.0
    flags[rows, 1] = 0.0
    flags[index[blank] - envs] = flags.new_tensor([1.0, 0.0])
    data = _Spread.apply(x.transpose(0, 1).reshape(len(rows), -1), rows, flags)
    w_ih = torch.cat([weights[0], _flag_weights(x, hidden)], 1)
    out, _, c = torch.lstm(data.view(length, envs, -1), entering, (w_ih, *weights[1:]), *options)
    if not out.detach().sum().isfinite():
        return scan_layer(cell, x, state, reset, weights, recompute=recompute)
    y = _Pick.apply(out.view(length * envs, hidden), rows).view(envs, steps, hidden).transpose(0, 1)
    return y, (y[-1], c[0])
