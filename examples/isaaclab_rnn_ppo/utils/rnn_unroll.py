"""The LSTM of `rnn_scan.py` as a loop for `torch.compile` to unroll: one fused kernel a step beside its product.

Shapes: T steps, N envs, E input features, H hidden. Everything here is time-major, one layer a call.

Worth its long compilation where the steps are small; eager, `scan` is the faster one. A reset is a `where`, never a
product with zero, which would let NaN through.
"""

from __future__ import annotations

import torch
from torch import Tensor


class UnrolledLSTM(torch.autograd.Function):
    """Outputs [T, N, H] and the final cell state, with the backward written out.

    Autograd's own would add up T weight gradients where one product gives their sum.
    """

    @staticmethod
    def forward(ctx, x, h, c, reset, w_ih, w_hh, b_ih, b_hh):
        keep = reset.logical_not().unsqueeze(-1)
        pre = torch.addmm(b_ih + b_hh, x.flatten(0, 1), w_ih.t()).view(*reset.shape, -1)
        entering_h, entering_c, gates, cells, y = [], [], [], [], []
        for t in range(len(x)):
            h, c = torch.where(keep[t], h, 0.0), torch.where(keep[t], c, 0.0)
            entering_h.append(h)
            entering_c.append(c)
            i, f, g, o = (torch.mm(h, w_hh.t()) + pre[t]).chunk(4, 1)
            i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
            c = f * c + i * g
            h = o * c.tanh()
            gates += [i, f, g, o]
            cells.append(c)
            y.append(h)
        ctx.save_for_backward(x, reset, w_ih, w_hh, *entering_h, *entering_c, *cells, *gates)
        return torch.stack(y), c

    @staticmethod
    def backward(ctx, *grad_outputs):
        dy, dc = grad_outputs
        x, reset, w_ih, w_hh, *rest = ctx.saved_tensors
        steps = len(x)
        entering_h, entering_c, cells, gates = (
            rest[:steps], rest[steps : 2 * steps], rest[2 * steps : 3 * steps], rest[3 * steps :]
        )  # fmt: skip
        keep = reset.logical_not().unsqueeze(-1)
        dpre: list[Tensor] = [x] * steps
        dh = torch.zeros_like(dc)
        for t in reversed(range(steps)):
            i, f, g, o = gates[4 * t : 4 * t + 4]
            tanh_c = cells[t].tanh()
            dh = dh + dy[t]
            dc = dc + dh * o * (1 - tanh_c * tanh_c)
            dpre[t] = torch.cat(
                [
                    dc * g * i * (1 - i),
                    dc * entering_c[t] * f * (1 - f),
                    dc * i * (1 - g * g),
                    dh * tanh_c * o * (1 - o),
                ],
                1,
            )
            dh = torch.where(keep[t], torch.mm(dpre[t], w_hh), 0.0)
            dc = torch.where(keep[t], dc * f, 0.0)
        rows = torch.cat(dpre)
        dx = torch.mm(rows, w_ih).view_as(x)
        dw_ih, dw_hh = torch.mm(rows.t(), x.flatten(0, 1)), torch.mm(rows.t(), torch.cat(entering_h))
        db = rows.sum(0)
        return dx, dh, dc, None, dw_ih, dw_hh, db, db.clone()


def unrolled_lstm_layer(
    cell: str, x: Tensor, state: tuple[Tensor, ...], reset: Tensor, weights: tuple[Tensor, ...], *, recompute: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One layer over a window; arguments and results as `rnn_scan.scan_layer`'s, for an LSTM in one dtype."""
    y, c = UnrolledLSTM.apply(x, *state, reset, *weights)
    return y, (y[-1], c)


def unrolling_pays(
    *, compile_mode: str | None, device: str, cell: str, num_steps: int, recompute: bool = False, amp: bool = False
) -> bool:
    """Whether a long compilation buys a faster loop over time than `scan`: see knowledge_base/COMPILE.md."""
    fits = cell == "lstm" and not recompute and not amp
    return fits and compile_mode == "max-autotune" and device == "cpu" and num_steps <= 32
