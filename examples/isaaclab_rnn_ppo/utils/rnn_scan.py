"""The `scan` backend: a loop over time with resets and a hand-derived backward, in plain torch.

Shapes: T steps, N envs, E input features, H hidden. Everything here is time-major, one layer a call.

What makes it about as fast as a fused kernel: the input product of many steps is one product; a sigmoid is
`0.5 + 0.5 tanh(x / 2)` (halving is exact, and `tanh` is the one activation with a fast vector routine), so an LSTM
step takes one `tanh` over contiguous gates; the backward computes the derivative factors of many steps at once and
keeps one product and a few multiplications a step.

A reset masks the *bits* of the state that enters a step (`value & 0`): a multiplication by zero would let NaN
through, and `where`/`masked_fill` cost four times as much.

Each direction is one `torch.library` operator, so `torch.compile` sees a single node whatever T is.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows (steps x envs) that one hoisted product or factor computation covers: enough for an efficient product,
# few enough that what it needs besides stays small.
_CHUNK_ROWS = 4096
_INT = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _chunks(steps: int, envs: int) -> list[tuple[int, int]]:
    """Split `range(steps)` into `(start, stop)` pieces of about `_CHUNK_ROWS` rows."""
    size = max(1, _CHUNK_ROWS // max(1, envs))
    return [(start, min(start + size, steps)) for start in range(0, steps, size)]


def _keep_bits(reset: Tensor, dtype: torch.dtype) -> Tensor:
    """All ones where the state is kept, all zeros where it resets: integers [T, N, 1] as wide as `dtype`."""
    return reset.logical_not().unsqueeze(-1).to(_INT[dtype.itemsize]).neg_()


def _bits(value: Tensor) -> Tensor:
    """The same memory as integers."""
    return value.view(_INT[value.dtype.itemsize])


def _mask(value: Tensor, keep: Tensor, out: Tensor) -> Tensor:
    """`out = value` with exact zeros where `keep` is 0, whatever `value` holds there."""
    torch.bitwise_and(_bits(value), keep, out=_bits(out))
    return out


def _resets_any(reset: Tensor) -> list[bool]:
    """Whether any env resets at each step.

    On the CPU reading this is free and saves masking. On an accelerator it would synchronise: mask every step.
    """
    return reset.any(1).tolist() if reset.device.type == "cpu" else [True] * reset.shape[0]


def _entering(y: Tensor, h0: Tensor, keep: Tensor, start: int, stop: int) -> Tensor:
    """Hidden state that entered steps `start:stop`, zero at resets: [stop - start, N, H]."""
    out = torch.empty_like(y[start:stop])
    if start:
        return _mask(y[start - 1 : stop - 1], keep[start:stop], out)
    out[0].copy_(h0)
    out[1:].copy_(y[: stop - 1])
    return _mask(out, keep[:stop], out)


def _sigmoid_scale(weight: Tensor, hidden: int, tanh_gate: int) -> Tensor:
    """1/2 for the rows of sigmoid gates, 1 for those of the tanh gate: [gates * H, 1]."""
    scale = weight.new_full((weight.shape[0], 1), 0.5)
    scale[tanh_gate * hidden : (tanh_gate + 1) * hidden] = 1.0
    return scale


def _accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a^T b`, in the precision of `total`."""
    if total.dtype == a.dtype:
        total.addmm_(a.t(), b)
    else:
        total.add_(a.t() @ b)


# --------------------------------------------------------------------------------------------------------------- LSTM


def _tanh_rows(rows: Tensor) -> Tensor:
    """Weights or bias [4H, *] of nn.LSTM for gates in the order i, f, o, g, all of which a `tanh` activates."""
    hidden = len(rows) // 4
    out = torch.empty_like(rows)
    torch.mul(rows[: 2 * hidden], 0.5, out=out[: 2 * hidden])
    torch.mul(rows[3 * hidden :], 0.5, out=out[2 * hidden : 3 * hidden])
    out[3 * hidden :] = rows[2 * hidden : 3 * hidden]
    return out


def _gate_views(block: Tensor) -> list[tuple[Tensor, ...]]:
    """Per-step views of gates [steps, N, 4H]: all, those of a sigmoid, i, f, o, g."""
    hidden = block.shape[-1] // 4
    gates = block.unflatten(-1, (4, hidden))
    return [part.unbind(0) for part in (block, block[..., : 3 * hidden], *gates.unbind(-2))]


@torch.library.custom_op("isaaclab_rnn_ppo::lstm_scan", mutates_args=())
def _lstm_scan(
    x: Tensor,
    h0: Tensor,
    c0: Tensor,
    reset: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    save: bool,
    recompute: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs [T, N, H], c_n; for the backward gates i, f, o, g [T, N, 4H] and cells entering each step [T, N, H]."""
    with torch.autocast(x.device.type, enabled=False), torch.no_grad():
        steps, envs, hidden = *reset.shape, w_hh.shape[1]
        mixed = x.dtype != c0.dtype
        resets, keep_h, keep_c = _resets_any(reset), _keep_bits(reset, x.dtype), _keep_bits(reset, c0.dtype)
        w_ih, w_hh, bias = _tanh_rows(w_ih).t(), _tanh_rows(w_hh).t(), _tanh_rows(b_ih + b_hh)
        half = c0.new_full((1,), 0.5)

        chunks = _chunks(steps, envs)
        keep_gates = save and not recompute
        y = x.new_empty(steps, envs, hidden)
        gates = c0.new_empty(steps if keep_gates else chunks[0][1], envs, 4 * hidden)
        products = x.new_empty(chunks[0][1], envs, 4 * hidden) if mixed else None
        cells = c0.new_empty(steps if save else min(steps, 2), envs, hidden)
        c_n, tanh_c = c0.new_empty(envs, hidden), c0.new_empty(envs, hidden)
        h = masked = x.new_empty(envs, hidden).copy_(h0)
        c = cells[0].copy_(c0)
        _mask(h, keep_h[0], out=h)
        _mask(c, keep_c[0], out=c)

        # Views are made in bulk: at small N a step costs about as much in calls as in arithmetic.
        outputs, keep_h, keep_c = y.unbind(0), keep_h.unbind(0), keep_c.unbind(0)
        slots = cells.unbind(0)
        for start, stop in chunks:
            block = gates[start:stop] if keep_gates else gates[: stop - start]
            product = block if products is None else products[: stop - start]
            torch.addmm(bias, x[start:stop].flatten(0, 1), w_ih, out=product.view(-1, 4 * hidden))
            steps_of = zip(range(start, stop), product.unbind(0), *_gate_views(block), strict=True)
            for t, pre, act, sigmoids, i, f, o, g in steps_of:
                pre.addmm_(h, w_hh)
                if mixed:
                    act.copy_(pre)
                act.tanh_()
                torch.add(half, sigmoids, alpha=0.5, out=sigmoids)
                last = t == steps - 1
                c_next = c_n if last else slots[(t + 1) % len(slots)]
                torch.mul(i, g, out=c_next).addcmul_(f, c)
                torch.tanh(c_next, out=tanh_c)
                h, c = outputs[t], c_next
                if mixed:  # an output of another dtype would be converted through a temporary
                    h.copy_(tanh_c.mul_(o))
                else:
                    torch.mul(o, tanh_c, out=h)
                if not last and resets[t + 1]:
                    h = _mask(h, keep_h[t + 1], out=masked)
                    _mask(c, keep_c[t + 1], out=c)
        return y, c_n, gates if keep_gates else c0.new_empty(0), cells if save else c0.new_empty(0)


@_lstm_scan.register_fake
def _(x, h0, c0, reset, w_ih, w_hh, b_ih, b_hh, save, recompute):
    steps, envs, hidden = *reset.shape, w_hh.shape[1]
    return (
        x.new_empty(steps, envs, hidden),
        c0.new_empty(envs, hidden),
        c0.new_empty(steps, envs, 4 * hidden) if save and not recompute else c0.new_empty(0),
        c0.new_empty(steps, envs, hidden) if save else c0.new_empty(0),
    )


@torch.library.custom_op("isaaclab_rnn_ppo::lstm_scan_backward", mutates_args=())
def _lstm_scan_backward(
    dy: Tensor | None,
    dc_n: Tensor | None,
    x: Tensor,
    h0: Tensor,
    y: Tensor,
    c_n: Tensor,
    reset: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    gates: Tensor,
    cells: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, h0, c0, w_ih, w_hh and of either bias."""
    with torch.autocast(x.device.type, enabled=False), torch.no_grad():
        steps, envs, hidden = *reset.shape, w_hh.shape[1]
        mixed = x.dtype != cells.dtype
        resets, keep_h, keep_c = _resets_any(reset), _keep_bits(reset, x.dtype), _keep_bits(reset, cells.dtype)
        new = cells.new_empty
        dx = x.new_empty(x.shape)
        dw_ih, dw_hh = torch.zeros_like(w_ih, dtype=cells.dtype), torch.zeros_like(w_hh, dtype=cells.dtype)
        db = cells.new_zeros(4 * hidden)
        dh, dc = new(envs, hidden), cells.new_zeros(envs, hidden)
        if dc_n is not None:
            dc.copy_(dc_n)
        dc_gates = dc.unsqueeze(1)
        rec = x.new_zeros(envs, hidden)  # gradient of h_t through step t + 1
        dy_steps = [] if dy is None else dy.unbind(0)

        for start, stop in reversed(_chunks(steps, envs)):
            c_in, h_in = cells[start:stop], _entering(y, h0, keep_h, start, stop)
            if gates.numel():
                i, f, o, g = gates[start:stop].unflatten(-1, (4, hidden)).unbind(-2)
            else:
                block = (x[start:stop] @ w_ih.t()).add_(h_in @ w_hh.t()).add_(b_ih + b_hh).to(cells.dtype)
                i, f, g, o = block.unflatten(-1, (4, hidden)).unbind(-2)
                g.tanh_()
                for gate in (i, f, o):
                    gate.sigmoid_()
            tanh_c = torch.mul(i, g).addcmul_(f, c_in).tanh_()
            # Factors of the four gates' pre-activation gradients; o's multiplies dh, the others' dc.
            grads = new(stop - start, envs, 4, hidden)
            torch.ops.aten.sigmoid_backward(g, i, grad_input=grads[:, :, 0])
            torch.ops.aten.sigmoid_backward(c_in, f, grad_input=grads[:, :, 1])
            torch.ops.aten.tanh_backward(i, g, grad_input=grads[:, :, 2])
            torch.ops.aten.sigmoid_backward(tanh_c, o, grad_input=grads[:, :, 3])
            via_c = torch.ops.aten.tanh_backward(o, tanh_c)
            low = x.new_empty(stop - start, envs, 4 * hidden) if mixed else grads.view(stop - start, envs, 4 * hidden)
            parts = (f, via_c, grads[:, :, :3], grads[:, :, 3], grads.view(low.shape), low)
            steps_of = zip(range(start, stop), *[part.unbind(0) for part in parts], strict=True)
            for t, f_t, via_c_t, grad_ifg, grad_o, grad_t, low_t in reversed(list(steps_of)):
                if dy is None:
                    dh.copy_(rec)
                else:
                    torch.add(rec, dy_steps[t], out=dh)
                dc.addcmul_(dh, via_c_t)
                grad_ifg.mul_(dc_gates)
                grad_o.mul_(dh)
                dc.mul_(f_t)
                if mixed:
                    low_t.copy_(grad_t)
                torch.mm(low_t, w_hh, out=rec)
                if resets[t]:
                    _mask(rec, keep_h[t], out=rec)
                    _mask(dc, keep_c[t], out=dc)
            rows = low.view(-1, 4 * hidden)
            torch.mm(rows, w_ih, out=dx[start:stop].view(-1, x.shape[-1]))
            _accumulate(dw_ih, rows, x[start:stop].flatten(0, 1))
            _accumulate(dw_hh, rows, h_in.flatten(0, 1))
            db.add_(grads.view(-1, 4 * hidden).sum(0))
        return dx, rec.to(h0.dtype), dc, dw_ih.to(w_ih.dtype), dw_hh.to(w_hh.dtype), db.to(b_ih.dtype)


@_lstm_scan_backward.register_fake
def _(dy, dc_n, x, h0, y, c_n, reset, w_ih, w_hh, b_ih, b_hh, gates, cells):
    return tuple(value.new_empty(value.shape) for value in (x, h0, c_n, w_ih, w_hh, b_ih))


def _lstm_setup(ctx, inputs, output):
    x, h0, _, reset, w_ih, w_hh, b_ih, b_hh, _, _ = inputs
    y, c_n, gates, cells = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, h0, y, c_n, reset, w_ih, w_hh, b_ih, b_hh, gates, cells)


def _lstm_backward(ctx, dy, dc_n, _dgates, _dcells):
    dx, dh0, dc0, dw_ih, dw_hh, db = _lstm_scan_backward(dy, dc_n, *ctx.saved_tensors)
    return dx, dh0, dc0, None, dw_ih, dw_hh, db, db, None, None


_lstm_scan.register_autograd(_lstm_backward, setup_context=_lstm_setup)


# ---------------------------------------------------------------------------------------------------------------- GRU


@torch.library.custom_op("isaaclab_rnn_ppo::gru_scan", mutates_args=())
def _gru_scan(
    x: Tensor,
    h0: Tensor,
    reset: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Outputs [T, N, H], and for the backward r and z [T, N, 2H], n [T, N, H], and W_hn h + b_hn [T, N, H]."""
    with torch.autocast(x.device.type, enabled=False), torch.no_grad():
        steps, envs, hidden = *reset.shape, w_hh.shape[1]
        resets, keep = _resets_any(reset), _keep_bits(reset, x.dtype)
        scale = _sigmoid_scale(w_ih, hidden, tanh_gate=2)
        w_ih, w_hh = w_ih * scale, w_hh * scale
        split = 2 * hidden
        w_rz, w_hn, b_hn = w_hh[:split].t(), w_hh[split:].t(), b_hh[split:]
        b_rz = (b_ih + b_hh)[:split] * 0.5
        half = x.new_full((1,), 0.5)

        chunks = _chunks(steps, envs)
        size = steps if save else chunks[0][1]
        y = x.new_empty(steps, envs, hidden)
        rz, n, hn = x.new_empty(size, envs, split), x.new_empty(size, envs, hidden), x.new_empty(size, envs, hidden)
        h = masked = x.new_empty(envs, hidden).copy_(h0)
        _mask(h, keep[0], out=h)
        outputs, keep = y.unbind(0), keep.unbind(0)
        for start, stop in chunks:
            at = slice(start, stop) if save else slice(0, stop - start)
            rows = x[start:stop].flatten(0, 1)
            torch.addmm(b_rz, rows, w_ih[:split].t(), out=rz[at].view(-1, split))
            torch.addmm(b_ih[split:], rows, w_ih[split:].t(), out=n[at].view(-1, hidden))
            parts = (rz[at], rz[at][..., :hidden], rz[at][..., hidden:], n[at], hn[at])
            steps_of = zip(range(start, stop), *[part.unbind(0) for part in parts], strict=True)
            for t, rz_t, r_t, z_t, n_t, hn_t in steps_of:
                rz_t.addmm_(h, w_rz).tanh_()
                torch.add(half, rz_t, alpha=0.5, out=rz_t)
                torch.addmm(b_hn, h, w_hn, out=hn_t)
                n_t.addcmul_(r_t, hn_t).tanh_()
                h = torch.lerp(n_t, h, z_t, out=outputs[t])
                if t + 1 < steps and resets[t + 1]:
                    h = _mask(h, keep[t + 1], out=masked)
        if not save:
            rz, n, hn = x.new_empty(0), x.new_empty(0), x.new_empty(0)
        return y, rz, n, hn


@_gru_scan.register_fake
def _(x, h0, reset, w_ih, w_hh, b_ih, b_hh, save):
    steps, envs, hidden = *reset.shape, w_hh.shape[1]
    sizes = [(steps, envs, k * hidden) if save else (0,) for k in (2, 1, 1)]
    return x.new_empty(steps, envs, hidden), *[x.new_empty(size) for size in sizes]


@torch.library.custom_op("isaaclab_rnn_ppo::gru_scan_backward", mutates_args=())
def _gru_scan_backward(
    dy: Tensor,
    x: Tensor,
    h0: Tensor,
    y: Tensor,
    reset: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor,
    b_hh: Tensor,
    rz: Tensor,
    n: Tensor,
    hn: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, h0, w_ih, w_hh, b_ih, b_hh."""
    with torch.autocast(x.device.type, enabled=False), torch.no_grad():
        steps, envs, hidden = *reset.shape, w_hh.shape[1]
        acc = h0.dtype
        mixed = x.dtype != acc
        resets, keep, keep_acc = _resets_any(reset), _keep_bits(reset, x.dtype), _keep_bits(reset, acc)
        split = 2 * hidden
        dx = x.new_empty(x.shape)
        dw_ih, dw_hh = torch.zeros_like(w_ih, dtype=acc), torch.zeros_like(w_hh, dtype=acc)
        db_ih, db_hh = torch.zeros_like(b_ih, dtype=acc), torch.zeros_like(b_hh, dtype=acc)
        dh = h0.new_zeros(envs, hidden)
        dh_gates, dy_steps = dh.unsqueeze(1), dy.unbind(0)
        for start, stop in reversed(_chunks(steps, envs)):
            h_in = _entering(y, h0, keep, start, stop)
            rows = x[start:stop].flatten(0, 1)
            if rz.numel():
                block, cand, hn_k = rz[start:stop].to(acc), n[start:stop].to(acc), hn[start:stop].to(acc)
            else:
                pre = torch.addmm(b_ih, rows, w_ih.t()).view(stop - start, envs, -1).to(acc)
                rec = torch.addmm(b_hh, h_in.flatten(0, 1), w_hh.t()).view(stop - start, envs, -1).to(acc)
                block = (pre[..., :split] + rec[..., :split]).sigmoid_()
                hn_k = rec[..., split:].contiguous()
                cand = torch.addcmul(pre[..., split:], block[..., :hidden], hn_k).tanh_()
            r, z = block[..., :hidden], block[..., hidden:]
            # Factors of dh in the gradients of the pre-activations: r, z, W_hn h + b_hn; and n's.
            grads = h0.new_empty(stop - start, envs, 3, hidden)
            grad_n = torch.ops.aten.tanh_backward(1 - z, cand)
            torch.ops.aten.sigmoid_backward(grad_n * hn_k, r, grad_input=grads[:, :, 0])
            torch.ops.aten.sigmoid_backward(h_in - cand, z, grad_input=grads[:, :, 1])
            torch.mul(grad_n, r, out=grads[:, :, 2])
            low = x.new_empty(stop - start, envs, 3 * hidden) if mixed else grads.view(stop - start, envs, 3 * hidden)
            parts = (z, grad_n, grads, low)
            steps_of = zip(range(start, stop), *[part.unbind(0) for part in parts], strict=True)
            for t, z_t, grad_n_t, grad_t, low_t in reversed(list(steps_of)):
                dh.add_(dy_steps[t])
                grad_t.mul_(dh_gates)
                grad_n_t.mul_(dh)
                dh.mul_(z_t)
                if mixed:
                    dh.add_(low_t.copy_(grad_t.view(envs, -1)) @ w_hh)
                else:
                    dh.addmm_(low_t, w_hh)
                if resets[t]:
                    _mask(dh, keep_acc[t], out=dh)
            grads, low = grads.view(-1, 3 * hidden), low.view(-1, 3 * hidden)
            low_n = grad_n.view(-1, hidden).to(x.dtype)
            out = dx[start:stop].view(-1, x.shape[-1])
            torch.mm(low[:, :split], w_ih[:split], out=out).addmm_(low_n, w_ih[split:])
            _accumulate(dw_ih[:split], low[:, :split], rows)
            _accumulate(dw_ih[split:], low_n, rows)
            _accumulate(dw_hh, low, h_in.flatten(0, 1))
            db_hh.add_(grads.sum(0))
            db_ih[split:].add_(grad_n.view(-1, hidden).sum(0))
        db_ih[:split].copy_(db_hh[:split])
        return dx, dh, dw_ih.to(w_ih.dtype), dw_hh.to(w_hh.dtype), db_ih.to(b_ih.dtype), db_hh.to(b_hh.dtype)


@_gru_scan_backward.register_fake
def _(dy, x, h0, y, reset, w_ih, w_hh, b_ih, b_hh, rz, n, hn):
    return tuple(value.new_empty(value.shape) for value in (x, h0, w_ih, w_hh, b_ih, b_hh))


def _gru_setup(ctx, inputs, output):
    x, h0, reset, w_ih, w_hh, b_ih, b_hh, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, h0, output[0], reset, w_ih, w_hh, b_ih, b_hh, *output[1:])


def _gru_backward(ctx, dy, *_saved):
    if dy is None:
        return (None,) * 8
    dx, dh0, *dw = _gru_scan_backward(dy, *ctx.saved_tensors)
    return dx, dh0, None, *dw, None


_gru_scan.register_autograd(_gru_backward, setup_context=_gru_setup)


# ------------------------------------------------------------------------------------------------------------ backend


def scan_layer(
    cell: str, x: Tensor, state: tuple[Tensor, ...], reset: Tensor, weights: tuple[Tensor, ...], *, recompute: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """One recurrent layer over a window.

    Args:
        cell: "lstm" or "gru".
        x: input [T, N, E] with any strides, in the dtype of the weights.
        state: `(h, c)` or `(h,)`, each [N, H]. Its dtype is that of the cell state and may be wider than x's.
        reset: bool [T, N], the state is zero before the steps marked.
        weights: `w_ih, w_hh, b_ih, b_hh` in nn.LSTM's or nn.GRU's layout.
        recompute: save outputs and cell states only, and recompute the gates in the backward.

    Returns:
        Outputs [T, N, H] and the state after the last step.
    """
    save = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *state, *weights))
    if cell == "lstm":
        y, c_n, _, _ = _lstm_scan(x, *state, reset, *weights, save, recompute)
        return y, (y[-1].to(state[0].dtype), c_n)
    y = _gru_scan(x, *state, reset, *weights, save and not recompute)[0]
    return y, (y[-1].to(state[0].dtype),)
