"""Recurrent cores with resets: drop-ins for TorchRL's `LSTMModule`/`GRUModule`, on a choice of backends.

Shapes: N envs, T steps, E input features, H hidden, L layers.

While collecting (`torchrl.modules.recurrent_mode()` off) a core takes one fused ATen step. In recurrent mode it
runs a window `[N, T]` from the window's initial state alone, zeroes the state at every `is_init` step, and emits
outputs only: training reads no other state, and a dense one costs more than the rest of a batch.
"""

from __future__ import annotations

import math
import os

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor, nn
from torchrl.data import Unbounded
from torchrl.envs.transforms import TensorDictPrimer
from torchrl.modules import recurrent_mode

from .rnn_blank import blank_lstm_layer, blanks_pay
from .rnn_scan import scan_layer
from .rnn_unroll import unrolled_lstm_layer

BACKENDS = ("auto", "blank", "pad", "scan", "triton", "unroll")
EAGER_BACKENDS = ("blank", "pad")  # their shapes depend on the resets
_GATES = {"lstm": 4, "gru": 3}


def resolve_backend(name: str, device: torch.device | str) -> str:
    """Name of the backend that runs in recurrent mode on `device`.

    Args:
        name: one of `BACKENDS`; "auto" is "triton" on CUDA and "scan" elsewhere, for which `rnn_forward` takes "blank"
            where that is faster.
        device: where the weights are.

    Raises:
        ValueError: unknown name, or "triton" off CUDA (its interpreter, TRITON_INTERPRET=1, runs anywhere).
    """
    on_cuda = torch.device(device).type == "cuda"
    if name not in BACKENDS:
        raise ValueError(f"--rnn-backend {name!r} is unknown: use one of {', '.join(BACKENDS)}.")
    if name == "triton" and not on_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(f"--rnn-backend 'triton' needs a CUDA device, got {device}: use auto, scan or pad.")
    if name == "auto":
        return "triton" if on_cuda else "scan"
    return name


def rnn_forward(
    x: Tensor,
    state: tuple[Tensor, ...],
    is_init: Tensor,
    weights: list[Tensor] | tuple[Tensor, ...],
    *,
    cell: str,
    backend: str = "auto",
    recompute: bool = False,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run a stack of recurrent layers over a window with resets.

    Args:
        x: input [N, T, E].
        state: `(h, c)` for "lstm", `(h,)` for "gru", each [N, L, H]: the state entering the window.
        is_init: [N, T] or [N, T, 1], bool or integer mask; the state is zero before the steps marked.
        weights: `w_ih, w_hh, b_ih, b_hh` a layer, in nn.LSTM's or nn.GRU's layout and order.
        cell: "lstm" or "gru".
        backend: one of `BACKENDS`.
        recompute: recompute the gates in the backward instead of saving them ("scan" and "triton").

    Returns:
        Outputs [N, T, H] and the final state, each [N, L, H]. Under autocast the outputs have its dtype; the state
        keeps the dtype it came in.

    Raises:
        ValueError: a shape that does not fit, or a backend that cannot run here.
    """
    automatic, backend = backend == "auto", resolve_backend(backend, x.device)
    steps, envs, layers = x.shape[1], x.shape[0], len(weights) // 4
    hidden = weights[1].shape[1]
    if is_init.shape not in ((envs, steps), (envs, steps, 1)):
        raise ValueError(f"is_init must be [N, T] or [N, T, 1] for x {list(x.shape)}, got {list(is_init.shape)}.")
    for part in state:
        if part.shape != (envs, layers, hidden):
            raise ValueError(f"state must be [N, L, H] = {[envs, layers, hidden]}, got {list(part.shape)}.")
    if recompute and backend == "pad":
        raise ValueError("--rnn-recompute has no effect with --rnn-backend 'pad': use scan or triton.")
    device = x.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else weights[0].dtype
    with torch.autocast(device, enabled=False):
        # Once a call: casting inside the loop would cast every weight at every step.
        x, weights = x.to(dtype), [w.to(dtype) for w in weights]
        reset = (is_init.squeeze(-1) if is_init.ndim == 3 else is_init).bool()
        if backend == "pad":
            return _pad_forward(x, state, reset, weights, cell=cell)
        if backend == "triton":
            # Imported here: Triton is no part of a CPU installation of torch.
            from .rnn_triton import triton_layer as run_layer
        elif backend in ("blank", "unroll"):
            if cell != "lstm" or recompute or x.dtype != state[0].dtype:
                raise ValueError(
                    f"--rnn-backend {backend!r} is for an LSTM in one precision, without recomputing: use scan."
                )
            run_layer = blank_lstm_layer if backend == "blank" else unrolled_lstm_layer
        else:
            run_layer = scan_layer
        out = x.transpose(0, 1)
        reset = reset.t().contiguous()
        if automatic and not recompute and blanks_pay(cell=cell, reset=reset, weights=weights, state=state):
            run_layer = blank_lstm_layer
        finals = []
        for layer in range(layers):
            out, final = run_layer(
                cell,
                out,
                tuple(part[:, layer] for part in state),
                reset,
                tuple(weights[4 * layer : 4 * layer + 4]),
                recompute=recompute,
            )
            finals.append(final)
        return out.transpose(0, 1), tuple(torch.stack(parts, 1) for parts in zip(*finals, strict=True))


def _pad_forward(
    x: Tensor, state: tuple[Tensor, ...], reset: Tensor, weights: list[Tensor], *, cell: str
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """`rnn_forward` through torch.lstm/torch.gru: each row is cut at its resets into packed sequences."""
    envs, steps, _ = x.shape
    layers = len(weights) // 4
    start = reset.clone()
    start[:, 0] = True
    segment = start.flatten().cumsum(0).sub_(1)  # [N * T], of each step
    lengths = torch.bincount(segment)
    first = start.flatten().nonzero().squeeze(1)  # flat index of each segment's first step
    # Packed sequences come longest first.
    lengths, order = lengths.sort(descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    position = torch.arange(envs * steps, device=x.device) - first[segment]
    batch_sizes = torch.bincount(position)  # number of segments at least that long
    offset = batch_sizes.cumsum(0) - batch_sizes
    packed = offset[position] + rank[segment]  # packed row of each flat step
    data = x.flatten(0, 1)[torch.empty_like(packed).scatter_(0, packed, torch.arange(len(packed), device=x.device))]

    entering = (first[order] % steps == 0) & ~reset.flatten()[first[order]]
    env = first[order] // steps
    hx = [torch.where(entering[:, None, None], part[env], 0.0).transpose(0, 1).to(x.dtype) for part in state]
    args = (weights, True, layers, 0.0, torch.is_grad_enabled(), False)
    if cell == "lstm":
        out, *final = torch.lstm(data, batch_sizes.cpu(), hx, *args)
    else:
        out, *final = torch.gru(data, batch_sizes.cpu(), hx[0], *args)
    last = rank[segment.view(envs, steps)[:, -1]]  # each row's last segment
    final = tuple(f[:, last].transpose(0, 1).to(s.dtype) for f, s in zip(final, state, strict=True))
    return out[packed].view(envs, steps, -1), final


class RecurrentCore(TensorDictModuleBase):
    """What the LSTM and the GRU core share. See `LSTM`."""

    cell: str
    state_suffixes: tuple[str, ...]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        *,
        in_key: str = "embed",
        out_key: str = "features",
        state_key: str = "recurrent_state",
        is_init_key: str = "is_init",
        backend: str = "auto",
        recompute: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.in_key, self.out_key, self.is_init_key = in_key, out_key, is_init_key
        self.state_keys = tuple(state_key + suffix for suffix in self.state_suffixes)
        self.in_keys = [in_key, *self.state_keys, is_init_key]
        self.out_keys = [out_key, *[("next", key) for key in self.state_keys]]
        self.backend, self.recompute = backend, recompute
        # Plain parameters, under nn.LSTM's names and in its order: Dynamo refuses an nn.LSTM submodule.
        rows, bound = _GATES[self.cell] * hidden_size, 1 / math.sqrt(hidden_size)
        for layer in range(num_layers):
            width = input_size if layer == 0 else hidden_size
            shapes = {
                "weight_ih": (rows, width),
                "weight_hh": (rows, hidden_size),
                "bias_ih": (rows,),
                "bias_hh": (rows,),
            }
            for name, shape in shapes.items():
                value = torch.empty(shape, device=device, dtype=dtype).uniform_(-bound, bound)
                self.register_parameter(f"{name}_l{layer}", nn.Parameter(value))
        resolve_backend(backend, self.weight_ih_l0.device)

    def flat_weights(self) -> list[Tensor]:
        """Parameters in nn.LSTM's order: `w_ih, w_hh, b_ih, b_hh` a layer."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [getattr(self, f"{name}_l{layer}") for layer in range(self.num_layers) for name in names]

    def make_tensordict_primer(self) -> TensorDictPrimer:
        """Transform that adds the zero recurrent state [L, H] to an env's specs and resets."""
        shape = (self.num_layers, self.hidden_size)
        return TensorDictPrimer({key: Unbounded(shape=shape) for key in self.state_keys}, expand_specs=True)

    def _require(self, tensordict: TensorDictBase, key: str, remedy: str) -> Tensor:
        value = tensordict.get(key, None)
        if value is None:
            raise KeyError(f"{key!r} is missing: {remedy} Without it the memory would silently vanish.")
        return value

    @dispatch(auto_batch_size=False)
    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the features, and while collecting the next state. See the class for keys and shapes.

        Raises:
            KeyError: the input, the state or `is_init` is missing.
        """
        x = self._require(tensordict, self.in_key, "it is the input of the recurrent core.")
        is_init = self._require(tensordict, self.is_init_key, "append TorchRL's InitTracker to the env.")
        remedy = "append this module's make_tensordict_primer() to the env, or put the window's initial state there."
        state = tuple(self._require(tensordict, key, remedy) for key in self.state_keys)
        batch = x.shape[:-1]
        if not recurrent_mode():
            flat = tuple(part.reshape(-1, self.num_layers, self.hidden_size) for part in state)
            features, state = self.step(x.reshape(-1, x.shape[-1]), flat, is_init.reshape(-1))
            tensordict.set(self.out_key, features.reshape(*batch, self.hidden_size))
            for key, part in zip(self.state_keys, state, strict=True):
                tensordict.set(("next", key), part.reshape(*batch, *part.shape[1:]))
            return tensordict
        # Only the state entering the window is read, so an expanded entry costs nothing.
        state = tuple(part.select(len(batch) - 1, 0).reshape(-1, *part.shape[-2:]) for part in state)
        features, _ = rnn_forward(
            x.reshape(-1, *x.shape[-2:]),
            state,
            is_init.reshape(-1, x.shape[-2]),
            self.flat_weights(),
            cell=self.cell,
            backend=self.backend,
            recompute=self.recompute,
        )
        tensordict.set(self.out_key, features.reshape(*batch, self.hidden_size))
        return tensordict

    def step(self, x: Tensor, state: tuple[Tensor, ...], is_init: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step: x [N, E], state [N, L, H], is_init [N] -> features [N, H], next state [N, L, H]."""
        if torch.is_autocast_enabled(x.device.type):
            # ATen's step keeps the cell state in bf16; this one acts with the numerics that training uses.
            out, state = rnn_forward(
                x.unsqueeze(1), state, is_init.unsqueeze(1), self.flat_weights(), cell=self.cell, backend="scan"
            )
            return out.squeeze(1), state
        # One fused cell a layer: faster than torch.lstm on a single step, and on CUDA free of cuDNN's weight packing.
        weights, finals = self.flat_weights(), []
        state = tuple(torch.where(is_init.bool().view(-1, 1, 1), 0.0, part) for part in state)
        for layer in range(self.num_layers):
            entering = [part[:, layer] for part in state]
            of_layer = weights[4 * layer : 4 * layer + 4]
            if self.cell == "lstm":
                finals.append(torch.lstm_cell(x, entering, *of_layer))
            else:
                finals.append((torch.gru_cell(x, entering[0], *of_layer),))
            x = finals[-1][0]
        return x, tuple(torch.stack(parts, 1) for parts in zip(*finals, strict=True))


class LSTM(RecurrentCore):
    """LSTM core: drop-in for TorchRL's `LSTMModule`.

    Reads `in_key`, the state (`state_key + "_h"`, `state_key + "_c"`) and `is_init_key`. Parameters have nn.LSTM's
    names, layout and initialisation, so `load_state_dict` works both ways.

    - Collecting: input [*, E], state [*, L, H], is_init [*, 1] -> features [*, H], `("next", state)` [*, L, H].
    - Recurrent mode: input [*, T, E], is_init [*, T, 1], state [*, T, L, H] of which index 0 along time alone is read
      (an expanded view will do) -> features [*, T, H], and no state.

    Args:
        input_size, hidden_size, num_layers: as nn.LSTM's.
        in_key, out_key, state_key, is_init_key: tensordict keys.
        backend: one of `BACKENDS`, used in recurrent mode.
        recompute: trade time for memory in the backward.

    Raises:
        ValueError: a backend that cannot run on `device`.
    """

    cell = "lstm"
    state_suffixes = ("_h", "_c")


class GRU(RecurrentCore):
    """GRU core: drop-in for TorchRL's `GRUModule`, with the state under `state_key + "_h"`. Otherwise as `LSTM`."""

    cell = "gru"
    state_suffixes = ("_h",)
