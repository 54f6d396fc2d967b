"""The `triton` backend: persistent reset-aware kernels for CUDA, forward and backward.

Shapes: T steps, N envs, E input features, H hidden. Everything here is time-major, one layer a call.

One program owns a block of envs and runs the whole window, so nothing but its own threads has to be synchronised:
rows of a batch never meet. The products with the input, and those of the weight and input gradients, have no
recurrence and are left to cuBLAS. Per step a program streams `W_hh` (from L2, where it stays) and multiplies it with
its rows of the previous state.

The kernels also run in Triton's interpreter on the CPU (TRITON_INTERPRET=1), which shapes them: the window length is
a compile-time constant (a `range` over a run-time value is not interpreted), `tanh` and the sigmoid are written out
(no libdevice), and there operands are cast to float32 before `tl.dot` (bf16 gives garbage).
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

_INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
# Rows, columns and depth of a tile in the interpreter; None: one tile covers all, since an interpreted iteration costs
# milliseconds whatever its size.
_INTERPRET_TILES: tuple[int, int, int] | None = None


@triton.jit
def _tanh(x):
    # Series near zero, where 1 - exp(-2|x|) would cancel: both branches are within 2e-7 relative.
    a = tl.abs(x)
    e = tl.exp(-2.0 * a)
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = x * (1.0 - s * (0.33333333 - s * (0.13333333 - s * 0.053968254)))
    return tl.where(a < 0.2, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, CAST: tl.constexpr):
    if CAST:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _lstm_forward_kernel(
    gates, w_hh, h0, c0, reset, y, cells, N,
    T: tl.constexpr, H: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """gates [T, N, 4H]: input product in, activations out. y, cells [T, N, H]: states after each step."""
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)  # a window can exceed 2^31 elements
    row_ok = rows < N
    for t in range(T):
        keep = (tl.load(reset + t * N + rows, mask=row_ok, other=1) == 0)[:, None]
        h_src = h0
        c_src = c0
        before = rows
        if t > 0:
            h_src = y
            c_src = cells
            before = (t - 1) * N + rows
        for j in range(0, H, BH):
            cols = j + tl.arange(0, BH)
            ok = row_ok[:, None] & (cols < H)[None, :]
            acc_i = tl.full((BN, BH), 0.0, tl.float32)
            acc_f = tl.full((BN, BH), 0.0, tl.float32)
            acc_g = tl.full((BN, BH), 0.0, tl.float32)
            acc_o = tl.full((BN, BH), 0.0, tl.float32)
            for k in range(0, H, BK):
                ks = k + tl.arange(0, BK)
                h = tl.load(h_src + before[:, None] * H + ks[None, :], mask=keep & (ks < H)[None, :], other=0.0)
                w = w_hh + cols[None, :] * H + ks[:, None]
                w_ok = (ks < H)[:, None] & (cols < H)[None, :]
                acc_i = _dot(h, tl.load(w, mask=w_ok, other=0.0), acc_i, PRECISION, CAST)
                acc_f = _dot(h, tl.load(w + H * H, mask=w_ok, other=0.0), acc_f, PRECISION, CAST)
                acc_g = _dot(h, tl.load(w + 2 * H * H, mask=w_ok, other=0.0), acc_g, PRECISION, CAST)
                acc_o = _dot(h, tl.load(w + 3 * H * H, mask=w_ok, other=0.0), acc_o, PRECISION, CAST)
            at = gates + (t * N + rows)[:, None] * (4 * H) + cols[None, :]
            i = _sigmoid(acc_i + tl.load(at, mask=ok, other=0.0).to(tl.float32))
            f = _sigmoid(acc_f + tl.load(at + H, mask=ok, other=0.0).to(tl.float32))
            g = _tanh(acc_g + tl.load(at + 2 * H, mask=ok, other=0.0).to(tl.float32))
            o = _sigmoid(acc_o + tl.load(at + 3 * H, mask=ok, other=0.0).to(tl.float32))
            c = tl.load(c_src + before[:, None] * H + cols[None, :], mask=ok & keep, other=0.0)
            c = f * c + i * g
            dtype = gates.dtype.element_ty
            tl.store(at, i.to(dtype), mask=ok)
            tl.store(at + H, f.to(dtype), mask=ok)
            tl.store(at + 2 * H, g.to(dtype), mask=ok)
            tl.store(at + 3 * H, o.to(dtype), mask=ok)
            out = (t * N + rows)[:, None] * H + cols[None, :]
            tl.store(cells + out, c, mask=ok)
            tl.store(y + out, (o * _tanh(c)).to(y.dtype.element_ty), mask=ok)
        # This program's next step reads what its other threads have just written.
        tl.debug_barrier()


@triton.jit
def _lstm_backward_kernel(
    gates, cells, c0, dy, w_hh, reset, grads, dc, N,
    T: tl.constexpr, H: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """grads [T, N, 4H]: gradients of the pre-activations, out. dc [N, H]: of c_n in, of c0 out."""
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)  # a window can exceed 2^31 elements
    row_ok = rows < N
    keep_next = row_ok[:, None]
    for step in range(T):
        t = T - 1 - step
        keep = (tl.load(reset + t * N + rows, mask=row_ok, other=1) == 0)[:, None]
        c_src = c0
        before = rows
        if t > 0:
            c_src = cells
            before = (t - 1) * N + rows
        for j in range(0, H, BH):
            cols = j + tl.arange(0, BH)
            ok = row_ok[:, None] & (cols < H)[None, :]
            out = (t * N + rows)[:, None] * H + cols[None, :]
            here = rows[:, None] * H + cols[None, :]
            dh = tl.load(dy + out, mask=ok, other=0.0).to(tl.float32)
            if step > 0:
                acc = tl.full((BN, BH), 0.0, tl.float32)
                for k in range(0, 4 * H, BK):
                    ks = k + tl.arange(0, BK)
                    k_ok = ks < 4 * H
                    d = tl.load(
                        grads + ((t + 1) * N + rows)[:, None] * (4 * H) + ks[None, :],
                        mask=keep_next & k_ok[None, :], other=0.0,
                    )  # fmt: skip
                    w = tl.load(
                        w_hh + ks[:, None] * H + cols[None, :], mask=k_ok[:, None] & (cols < H)[None, :], other=0.0
                    )
                    acc = _dot(d, w, acc, PRECISION, CAST)
                dh += acc
            at = (t * N + rows)[:, None] * (4 * H) + cols[None, :]
            i = tl.load(gates + at, mask=ok, other=0.0).to(tl.float32)
            f = tl.load(gates + at + H, mask=ok, other=0.0).to(tl.float32)
            g = tl.load(gates + at + 2 * H, mask=ok, other=0.0).to(tl.float32)
            o = tl.load(gates + at + 3 * H, mask=ok, other=0.0).to(tl.float32)
            tanh_c = _tanh(tl.load(cells + out, mask=ok, other=0.0))
            c = tl.load(c_src + before[:, None] * H + cols[None, :], mask=ok & keep, other=0.0)
            d_c = tl.load(dc + here, mask=ok, other=0.0) + dh * o * (1.0 - tanh_c * tanh_c)
            dtype = grads.dtype.element_ty
            tl.store(grads + at, (d_c * g * i * (1.0 - i)).to(dtype), mask=ok)
            tl.store(grads + at + H, (d_c * c * f * (1.0 - f)).to(dtype), mask=ok)
            tl.store(grads + at + 2 * H, (d_c * i * (1.0 - g * g)).to(dtype), mask=ok)
            tl.store(grads + at + 3 * H, (dh * tanh_c * o * (1.0 - o)).to(dtype), mask=ok)
            tl.store(dc + here, tl.where(keep, d_c * f, 0.0), mask=ok)
        keep_next = keep
        tl.debug_barrier()


@triton.jit
def _gru_forward_kernel(
    gates, hn, w_hh, b_hh, h0, reset, y, N,
    T: tl.constexpr, H: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """gates [T, N, 3H]: input product in, r z n out. hn [T, N, H]: W_hn h + b_hn, out. y [T, N, H]: out."""
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)  # a window can exceed 2^31 elements
    row_ok = rows < N
    for t in range(T):
        keep = (tl.load(reset + t * N + rows, mask=row_ok, other=1) == 0)[:, None]
        h_src = h0
        before = rows
        if t > 0:
            h_src = y
            before = (t - 1) * N + rows
        for j in range(0, H, BH):
            cols = j + tl.arange(0, BH)
            ok = row_ok[:, None] & (cols < H)[None, :]
            acc_r = tl.full((BN, BH), 0.0, tl.float32)
            acc_z = tl.full((BN, BH), 0.0, tl.float32)
            acc_n = tl.full((BN, BH), 0.0, tl.float32)
            for k in range(0, H, BK):
                ks = k + tl.arange(0, BK)
                h = tl.load(h_src + before[:, None] * H + ks[None, :], mask=keep & (ks < H)[None, :], other=0.0)
                w = w_hh + cols[None, :] * H + ks[:, None]
                w_ok = (ks < H)[:, None] & (cols < H)[None, :]
                acc_r = _dot(h, tl.load(w, mask=w_ok, other=0.0), acc_r, PRECISION, CAST)
                acc_z = _dot(h, tl.load(w + H * H, mask=w_ok, other=0.0), acc_z, PRECISION, CAST)
                acc_n = _dot(h, tl.load(w + 2 * H * H, mask=w_ok, other=0.0), acc_n, PRECISION, CAST)
            bias = b_hh + cols[None, :]
            col_ok = (cols < H)[None, :]
            at = gates + (t * N + rows)[:, None] * (3 * H) + cols[None, :]
            acc_r += tl.load(bias, mask=col_ok, other=0.0).to(tl.float32)
            acc_z += tl.load(bias + H, mask=col_ok, other=0.0).to(tl.float32)
            acc_n += tl.load(bias + 2 * H, mask=col_ok, other=0.0).to(tl.float32)
            r = _sigmoid(acc_r + tl.load(at, mask=ok, other=0.0).to(tl.float32))
            z = _sigmoid(acc_z + tl.load(at + H, mask=ok, other=0.0).to(tl.float32))
            n = _tanh(r * acc_n + tl.load(at + 2 * H, mask=ok, other=0.0).to(tl.float32))
            h = tl.load(h_src + before[:, None] * H + cols[None, :], mask=ok & keep, other=0.0).to(tl.float32)
            dtype = gates.dtype.element_ty
            out = (t * N + rows)[:, None] * H + cols[None, :]
            tl.store(at, r.to(dtype), mask=ok)
            tl.store(at + H, z.to(dtype), mask=ok)
            tl.store(at + 2 * H, n.to(dtype), mask=ok)
            tl.store(hn + out, acc_n.to(dtype), mask=ok)
            tl.store(y + out, (n + z * (h - n)).to(dtype), mask=ok)
        tl.debug_barrier()


@triton.jit
def _gru_backward_kernel(
    gates, hn, y, h0, dy, w_hh, reset, grads, grad_n, carry, N,
    T: tl.constexpr, H: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, CAST: tl.constexpr,
):  # fmt: skip
    """grads [T, N, 3H]: gradients of r, z and W_hn h + b_hn; grad_n [T, N, H]: of n's pre-activation.

    carry [N, H]: gradient of h that passes through z, without the product with W_hh.
    """
    rows = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)  # a window can exceed 2^31 elements
    row_ok = rows < N
    keep_next = row_ok[:, None]
    for step in range(T):
        t = T - 1 - step
        keep = (tl.load(reset + t * N + rows, mask=row_ok, other=1) == 0)[:, None]
        h_src = h0
        before = rows
        if t > 0:
            h_src = y
            before = (t - 1) * N + rows
        for j in range(0, H, BH):
            cols = j + tl.arange(0, BH)
            ok = row_ok[:, None] & (cols < H)[None, :]
            out = (t * N + rows)[:, None] * H + cols[None, :]
            here = rows[:, None] * H + cols[None, :]
            dh = tl.load(dy + out, mask=ok, other=0.0).to(tl.float32)
            if step > 0:
                acc = tl.load(carry + here, mask=ok, other=0.0)
                for k in range(0, 3 * H, BK):
                    ks = k + tl.arange(0, BK)
                    k_ok = ks < 3 * H
                    d = tl.load(
                        grads + ((t + 1) * N + rows)[:, None] * (3 * H) + ks[None, :],
                        mask=keep_next & k_ok[None, :], other=0.0,
                    )  # fmt: skip
                    w = tl.load(
                        w_hh + ks[:, None] * H + cols[None, :], mask=k_ok[:, None] & (cols < H)[None, :], other=0.0
                    )
                    acc = _dot(d, w, acc, PRECISION, CAST)
                dh += acc
            at = (t * N + rows)[:, None] * (3 * H) + cols[None, :]
            r = tl.load(gates + at, mask=ok, other=0.0).to(tl.float32)
            z = tl.load(gates + at + H, mask=ok, other=0.0).to(tl.float32)
            n = tl.load(gates + at + 2 * H, mask=ok, other=0.0).to(tl.float32)
            w_h = tl.load(hn + out, mask=ok, other=0.0).to(tl.float32)
            h = tl.load(h_src + before[:, None] * H + cols[None, :], mask=ok & keep, other=0.0).to(tl.float32)
            d_n = dh * (1.0 - z) * (1.0 - n * n)
            dtype = grads.dtype.element_ty
            tl.store(grads + at, (d_n * w_h * r * (1.0 - r)).to(dtype), mask=ok)
            tl.store(grads + at + H, (dh * (h - n) * z * (1.0 - z)).to(dtype), mask=ok)
            tl.store(grads + at + 2 * H, (d_n * r).to(dtype), mask=ok)
            tl.store(grad_n + out, d_n.to(dtype), mask=ok)
            tl.store(carry + here, tl.where(keep, dh * z, 0.0), mask=ok)
        keep_next = keep
        tl.debug_barrier()


def _launch(kernel, envs: int, steps: int, hidden: int, *args: Tensor) -> None:
    """Run `kernel` with one program a block of envs."""
    width = max(16, triton.next_power_of_2(hidden))
    if _INTERPRET:
        rows, block, depth = _INTERPRET_TILES or (max(16, triton.next_power_of_2(envs)), width, width)
    else:
        # Wide enough that W_hh is streamed seldom, narrow enough that every multiprocessor has a block.
        rows = 16 if envs < 4096 else 32 if envs < 8192 else 64
        block, depth = min(width, 64), min(width, 32)
    kernel[(triton.cdiv(envs, rows),)](
        *args, envs, T=steps, H=hidden, BN=rows, BH=block, BK=depth,
        PRECISION="tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee", CAST=_INTERPRET, num_warps=4,
    )  # fmt: skip


def _entering(y: Tensor, h0: Tensor, reset: Tensor) -> Tensor:
    """Hidden state that entered each step, zero at resets: [T, N, H]."""
    previous = torch.cat([h0.to(y.dtype).unsqueeze(0), y[:-1]])
    return previous.masked_fill_(reset.unsqueeze(-1), 0.0)


# --------------------------------------------------------------------------------------------------------------- LSTM


@torch.library.custom_op("isaaclab_rnn_ppo::lstm_triton", mutates_args=())
def _lstm(
    x: Tensor, h0: Tensor, c0: Tensor, reset: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
    save: bool, recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Outputs, c_n, and for the backward the gates [T, N, 4H] and the cell states after each step [T, N, H]."""
    with torch.autocast(x.device.type, enabled=False), torch.no_grad():
        steps, envs, hidden = *reset.shape, w_hh.shape[1]
        gates = torch.addmm(b_ih + b_hh, x.flatten(0, 1), w_ih.t()).view(steps, envs, -1)
        y, cells = x.new_empty(steps, envs, hidden), c0.new_empty(steps, envs, hidden)
        _launch(
            _lstm_forward_kernel, envs, steps, hidden,
            gates, w_hh.contiguous(), h0.to(x.dtype).contiguous(), c0.contiguous(), reset.to(torch.int8), y, cells,
        )  # fmt: skip
        return (
            y,
            cells[-1].clone(),
            gates if save and not recompute else x.new_empty(0),
            cells if save else c0.new_empty(0),
        )


@_lstm.register_fake
def _(x, h0, c0, reset, w_ih, w_hh, b_ih, b_hh, save, recompute):
    steps, envs, hidden = *reset.shape, w_hh.shape[1]
    return (
        x.new_empty(steps, envs, hidden),
        c0.new_empty(envs, hidden),
        x.new_empty(steps, envs, 4 * hidden) if save and not recompute else x.new_empty(0),
        c0.new_empty(steps, envs, hidden) if save else c0.new_empty(0),
    )


@torch.library.custom_op("isaaclab_rnn_ppo::lstm_triton_backward", mutates_args=())
def _lstm_grad(
    dy: Tensor | None, dc_n: Tensor | None, x: Tensor, h0: Tensor, c0: Tensor, reset: Tensor, w_ih: Tensor,
    w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, y: Tensor, gates: Tensor, cells: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, h0, c0, w_ih, w_hh and of either bias."""
    with torch.autocast(x.device.type, enabled=False), torch.no_grad():
        steps, envs, hidden = *reset.shape, w_hh.shape[1]
        rows, h_in = x.flatten(0, 1), _entering(y, h0, reset).flatten(0, 1)
        if not gates.numel():
            gates = torch.addmm(b_ih + b_hh, rows, w_ih.t()).addmm_(h_in, w_hh.t())
            gates[:, : 2 * hidden].sigmoid_()
            gates[:, 2 * hidden : 3 * hidden].tanh_()
            gates[:, 3 * hidden :].sigmoid_()
        grads = x.new_empty(steps * envs, 4 * hidden)
        dc = cells.new_zeros(envs, hidden) if dc_n is None else dc_n.clone(memory_format=torch.contiguous_format)
        dy = torch.zeros_like(y) if dy is None else dy.contiguous()
        _launch(
            _lstm_backward_kernel, envs, steps, hidden,
            gates, cells, c0.contiguous(), dy, w_hh.contiguous(), reset.to(torch.int8), grads, dc,
        )  # fmt: skip
        dh0 = (grads[:envs] @ w_hh).masked_fill_(reset[0].unsqueeze(-1), 0.0).to(h0.dtype)
        return (grads @ w_ih).view_as(x), dh0, dc, grads.t() @ rows, grads.t() @ h_in, grads.sum(0)


@_lstm_grad.register_fake
def _(dy, dc_n, x, h0, c0, reset, w_ih, w_hh, b_ih, b_hh, y, gates, cells):
    return tuple(value.new_empty(value.shape) for value in (x, h0, c0, w_ih, w_hh, b_ih))


def _lstm_setup(ctx, inputs, output):
    y, _, gates, cells = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:8], y, gates, cells)


def _lstm_backward(ctx, dy, dc_n, _dgates, _dcells):
    dx, dh0, dc0, dw_ih, dw_hh, db = _lstm_grad(dy, dc_n, *ctx.saved_tensors)
    return dx, dh0, dc0, None, dw_ih, dw_hh, db, db, None, None


_lstm.register_autograd(_lstm_backward, setup_context=_lstm_setup)


# ---------------------------------------------------------------------------------------------------------------- GRU


@torch.library.custom_op("isaaclab_rnn_ppo::gru_triton", mutates_args=())
def _gru(
    x: Tensor, h0: Tensor, reset: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, save: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, and for the backward r z n [T, N, 3H] and W_hn h + b_hn [T, N, H]."""
    with torch.autocast(x.device.type, enabled=False), torch.no_grad():
        steps, envs, hidden = *reset.shape, w_hh.shape[1]
        gates = torch.addmm(b_ih, x.flatten(0, 1), w_ih.t()).view(steps, envs, -1)
        y, hn = x.new_empty(steps, envs, hidden), x.new_empty(steps, envs, hidden)
        _launch(
            _gru_forward_kernel, envs, steps, hidden,
            gates, hn, w_hh.contiguous(), b_hh, h0.to(x.dtype).contiguous(), reset.to(torch.int8), y,
        )  # fmt: skip
        return (y, gates, hn) if save else (y, x.new_empty(0), x.new_empty(0))


@_gru.register_fake
def _(x, h0, reset, w_ih, w_hh, b_ih, b_hh, save):
    steps, envs, hidden = *reset.shape, w_hh.shape[1]
    sizes = [(steps, envs, k * hidden) if save else (0,) for k in (3, 1)]
    return x.new_empty(steps, envs, hidden), *[x.new_empty(size) for size in sizes]


@torch.library.custom_op("isaaclab_rnn_ppo::gru_triton_backward", mutates_args=())
def _gru_grad(
    dy: Tensor, x: Tensor, h0: Tensor, reset: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
    y: Tensor, gates: Tensor, hn: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, h0, w_ih, w_hh, b_ih, b_hh."""
    with torch.autocast(x.device.type, enabled=False), torch.no_grad():
        steps, envs, hidden = *reset.shape, w_hh.shape[1]
        split = 2 * hidden
        rows, h_in = x.flatten(0, 1), _entering(y, h0, reset).flatten(0, 1)
        if not gates.numel():
            gates = torch.addmm(b_ih, rows, w_ih.t())
            product = torch.addmm(b_hh, h_in, w_hh.t())
            gates[:, :split].add_(product[:, :split]).sigmoid_()
            hn = product[:, split:].contiguous()
            gates[:, split:].addcmul_(gates[:, :hidden], hn).tanh_()
        grads, grad_n = x.new_empty(steps * envs, 3 * hidden), x.new_empty(steps * envs, hidden)
        carry = torch.empty(envs, hidden, device=x.device, dtype=torch.float32)
        _launch(
            _gru_backward_kernel, envs, steps, hidden,
            gates, hn, y, h0.to(x.dtype).contiguous(), dy.contiguous(), w_hh.contiguous(), reset.to(torch.int8),
            grads, grad_n, carry,
        )  # fmt: skip
        dh0 = (grads[:envs] @ w_hh).masked_fill_(reset[0].unsqueeze(-1), 0.0).to(h0.dtype).add_(carry)
        dw_hh, db_hh = grads.t() @ h_in, grads.sum(0)
        # r and z have one pre-activation; n's differs between the input and the state product.
        grads[:, split:] = grad_n
        return (grads @ w_ih).view_as(x), dh0, grads.t() @ rows, dw_hh, grads.sum(0), db_hh


@_gru_grad.register_fake
def _(dy, x, h0, reset, w_ih, w_hh, b_ih, b_hh, y, gates, hn):
    return tuple(value.new_empty(value.shape) for value in (x, h0, w_ih, w_hh, b_ih, b_hh))


def _gru_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:7], *output)
    ctx.set_materialize_grads(False)


def _gru_backward(ctx, dy, _dgates, _dhn):
    if dy is None:
        return (None,) * 8
    dx, dh0, *dw = _gru_grad(dy, *ctx.saved_tensors)
    return dx, dh0, None, *dw, None


_gru.register_autograd(_gru_backward, setup_context=_gru_setup)


# ------------------------------------------------------------------------------------------------------------ backend


def triton_layer(
    cell: str, x: Tensor, state: tuple[Tensor, ...], reset: Tensor, weights: tuple[Tensor, ...], *, recompute: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One recurrent layer over a window; arguments and results as `scan_layer`'s, float32 or bf16.

    Raises:
        ValueError: float64 input, which the kernels would silently round.
    """
    if x.dtype == torch.float64:
        raise ValueError("--rnn-backend 'triton' computes in float32 or bf16, got float64: use scan or pad.")
    save = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *state, *weights))
    if cell == "lstm":
        y, c_n, _, _ = _lstm(x, *state, reset, *weights, save, recompute)
        return y, (y[-1].to(state[0].dtype), c_n)
    y = _gru(x, *state, reset, *weights, save and not recompute)[0]
    return y, (y[-1].to(state[0].dtype),)
