"""The recurrent cores against a float64 step-by-step reference, and TorchRL's module contract."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from isaaclab_rnn_ppo.utils import rnn_scan
from isaaclab_rnn_ppo.utils.rnn import GRU, LSTM, RecurrentCore, resolve_backend, rnn_forward
from isaaclab_rnn_ppo.utils.rnn_scan import _gru_scan, _lstm_scan
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn
from torchrl.collectors import Collector
from torchrl.envs import Compose, InitTracker, StepCounter, TransformedEnv
from torchrl.envs.custom import PendulumEnv
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode
from torchrl.modules.utils import get_primers_from_module

CORES = {"lstm": LSTM, "gru": GRU}
TORCH = {"lstm": nn.LSTM, "gru": nn.GRU}
RESETS = ("none", "first", "last", "consecutive", "everywhere")
# Cells, backends, and whether they recompute.
VARIANTS = [(cell, *backend) for cell in CORES for backend in (("scan", False), ("scan", True), ("pad", False))]
VARIANTS += [("lstm", "unroll", False), ("lstm", "blank", False)]
MIXED_VARIANTS = [variant for variant in VARIANTS if variant[1] == "scan"]


def make_resets(kind: str, envs: int, steps: int) -> Tensor:
    """bool [N, T]; another step in every env, except where the kind says which."""
    reset = torch.zeros(envs, steps, dtype=torch.bool)
    if kind == "everywhere":
        reset[:] = True
    elif kind == "first":
        reset[::2, 0] = True
    elif kind == "last":
        reset[::2, -1] = True
    elif kind == "consecutive":
        for env in range(envs):
            reset[env, env % steps : env % steps + 3] = True
    return reset


def reference(x, state, reset, weights, *, cell):
    """Textbook recurrence, one step at a time: outputs [N, T, H] and final states [N, L, H]."""
    layers = len(weights) // 4
    state = [[part[:, layer] for layer in range(layers)] for part in state]
    outputs = []
    for t in range(x.shape[1]):
        value = x[:, t]
        for layer in range(layers):
            w_ih, w_hh, b_ih, b_hh = weights[4 * layer : 4 * layer + 4]
            state_in = [torch.where(reset[:, t, None], 0.0, part[layer]) for part in state]
            from_x, from_h = value @ w_ih.T + b_ih, state_in[0] @ w_hh.T + b_hh
            if cell == "lstm":
                i, f, g, o = (from_x + from_h).chunk(4, -1)
                state[1][layer] = f.sigmoid() * state_in[1] + i.sigmoid() * g.tanh()
                state[0][layer] = o.sigmoid() * state[1][layer].tanh()
            else:
                (x_r, x_z, x_n), (h_r, h_z, h_n) = from_x.chunk(3, -1), from_h.chunk(3, -1)
                z = (x_z + h_z).sigmoid()
                n = (x_n + (x_r + h_r).sigmoid() * h_n).tanh()
                state[0][layer] = (1 - z) * n + z * state_in[0]
            value = state[0][layer]
        outputs.append(value)
    return torch.stack(outputs, 1), tuple(torch.stack(part, 1) for part in state)


def make_inputs(cell, *, envs, steps, hidden, layers, features=5):
    torch.manual_seed(envs + 10 * steps + 100 * hidden + layers)
    core = CORES[cell](features, hidden, layers)
    x = torch.randn(envs, steps, features)
    state = tuple(torch.randn(envs, layers, hidden) for _ in core.state_keys)
    return x, state, [w.detach() for w in core.flat_weights()]


def outcome(function, x, state, reset, weights, dtype=torch.float32, **kwargs) -> dict[str, Tensor]:
    """Outputs, final states and every gradient of a fixed random projection of both."""
    x, *rest = [value.detach().to(dtype, copy=True).requires_grad_() for value in (x, *state, *weights)]
    state, weights = tuple(rest[: len(state)]), rest[len(state) :]
    y, final = function(x, state, reset, weights, **kwargs)
    generator = torch.Generator().manual_seed(1)
    outputs = (y, *final)
    torch.autograd.backward(
        outputs, [torch.randn(value.shape, generator=generator).to(value.dtype) for value in outputs]
    )
    named = {"y": y, **{f"final{k}": part for k, part in enumerate(final)}, "dx": x.grad}
    named |= {f"dstate{k}": part.grad for k, part in enumerate(state)}
    named |= {f"dw{k}": weight.grad for k, weight in enumerate(weights)}
    return {name: value.detach() for name, value in named.items()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Norm-wise relative error of every entry."""
    assert actual.keys() == expected.keys()
    errors = {
        name: ((actual[name].double() - value).norm() / value.norm().clamp(min=1e-12)).item()
        for name, value in expected.items()
    }
    assert all(error <= tolerance for error in errors.values()), errors


def check_reference(cell, *, layers, kind, envs, steps, hidden, backend, recompute):
    x, state, weights = make_inputs(cell, envs=envs, steps=steps, hidden=hidden, layers=layers)
    reset = make_resets(kind, envs, steps)
    expected = outcome(reference, x, state, reset, weights, torch.float64, cell=cell)
    actual = outcome(rnn_forward, x, state, reset, weights, cell=cell, backend=backend, recompute=recompute)
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("cell,backend,recompute", VARIANTS)
@pytest.mark.parametrize("kind", RESETS)
@pytest.mark.parametrize("layers", [1, 3])
def test_matches_the_reference(cell, layers, kind, backend, recompute):
    check_reference(
        cell, layers=layers, kind=kind, envs=7, steps=33, hidden=48, backend=backend, recompute=recompute
    )  # fmt: skip


@pytest.mark.parametrize("cell,backend,recompute", VARIANTS)
@pytest.mark.parametrize("envs,steps,hidden", [(1, 1, 1), (7, 1, 48), (1, 33, 256), (7, 33, 1)])
def test_matches_the_reference_at_the_corners(cell, envs, steps, hidden, backend, recompute):
    check_reference(
        cell, layers=1, kind="consecutive", envs=envs, steps=steps, hidden=hidden, backend=backend, recompute=recompute
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cell,backend,recompute", VARIANTS)
@pytest.mark.parametrize("kind", RESETS)
@pytest.mark.parametrize("hidden", [1, 48, 256])
@pytest.mark.parametrize("steps", [1, 33])
@pytest.mark.parametrize("envs", [1, 7])
@pytest.mark.parametrize("layers", [1, 3])
def test_matches_the_reference_on_the_grid(cell, layers, envs, steps, hidden, kind, backend, recompute):
    check_reference(
        cell, layers=layers, kind=kind, envs=envs, steps=steps, hidden=hidden, backend=backend, recompute=recompute
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["none", "consecutive"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cell", CORES)
def test_scan_matches_the_reference_over_many_chunks(cell, recompute, kind, monkeypatch):
    monkeypatch.setattr(rnn_scan, "_CHUNK_ROWS", 21)  # three steps of seven envs: the last chunk is short
    check_reference(cell, layers=1, kind=kind, envs=7, steps=10, hidden=48, backend="scan", recompute=recompute)


@pytest.mark.parametrize("cell", CORES)
def test_backends_agree_pairwise(cell):
    x, state, weights = make_inputs(cell, envs=7, steps=33, hidden=48, layers=2)
    reset = torch.rand(7, 33) < 0.1
    results = [
        outcome(rnn_forward, x, state, reset, weights, cell=cell, backend=backend, recompute=recompute)
        for own, backend, recompute in VARIANTS
        if own == cell
    ]
    for k, first in enumerate(results):
        for second in results[k + 1 :]:
            assert_close(first, {name: value.double() for name, value in second.items()}, 2e-6)


@pytest.mark.parametrize("cell,backend,recompute", VARIANTS)
def test_accepts_any_strides(cell, backend, recompute):
    x, state, weights = make_inputs(cell, envs=7, steps=9, hidden=48, layers=2)
    reset = make_resets("consecutive", 7, 9)
    expected = outcome(rnn_forward, x, state, reset, weights, cell=cell, backend=backend, recompute=recompute)

    def strided(x, state, reset, weights, **kwargs):
        wide = torch.stack([x, x], -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
        assert not wide.is_contiguous()
        state = tuple(part.transpose(1, 2).contiguous().transpose(1, 2) for part in state)
        return rnn_forward(wide, state, reset.t().contiguous().t(), weights, **kwargs)

    actual = outcome(strided, x, state, reset, weights, cell=cell, backend=backend, recompute=recompute)
    assert_close(actual, {name: value.double() for name, value in expected.items()}, 1e-6)


@pytest.mark.parametrize("cell,backend,recompute", VARIANTS)
def test_gradcheck(cell, backend, recompute):
    x, state, weights = make_inputs(cell, envs=3, steps=4, hidden=3, layers=2, features=2)
    reset = torch.tensor([[1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]])
    inputs = [value.double().requires_grad_() for value in (x, *state, *weights)]

    def function(x, *rest):
        state, weights = rest[: len(CORES[cell].state_suffixes)], rest[len(CORES[cell].state_suffixes) :]
        y, final = rnn_forward(x, state, reset, weights, cell=cell, backend=backend, recompute=recompute)
        return y, *final

    assert torch.autograd.gradcheck(function, inputs)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("cell,backend,recompute", MIXED_VARIANTS)
def test_bf16_autocast(cell, backend, recompute, layers):
    x, state, weights = make_inputs(cell, envs=7, steps=33, hidden=48, layers=layers)
    reset = make_resets("consecutive", 7, 33)
    expected = outcome(reference, x, state, reset, weights, torch.float64, cell=cell)

    def autocast(*args, **kwargs):
        with torch.autocast("cpu", torch.bfloat16):
            y, final = rnn_forward(*args, **kwargs)
        assert y.dtype == torch.bfloat16
        assert all(part.dtype == torch.float32 for part in final)
        return y, final

    actual = outcome(autocast, x, state, reset, weights, cell=cell, backend=backend, recompute=recompute)
    assert_close(actual, expected, 2e-2)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3.0])
@pytest.mark.parametrize("cell,backend,recompute", VARIANTS)
def test_a_reset_isolates(cell, backend, recompute, bad):
    """Whatever happens before a reset, everything after it stays the same to the bit, and the other way round.

    To rounding where `blank` leaves what is not finite to `scan`.
    """
    at = 4
    falls_back = backend == "blank" and bad != 3.0
    x, state, weights = make_inputs(cell, envs=3, steps=9, hidden=48, layers=2)
    reset = torch.zeros(3, 9, dtype=torch.bool)
    reset[:2, at] = True
    grad = torch.randn(3, 9, 48)

    def run(x, state, grad):
        x = x.clone().requires_grad_()
        y, final = rnn_forward(x, state, reset, weights, cell=cell, backend=backend, recompute=recompute)
        (dx,) = torch.autograd.grad(y, x, grad)
        return y.detach(), dx, final

    y, dx, final = run(x, state, grad)
    dirty_x, dirty_state = x.clone(), tuple(part.clone() for part in state)
    dirty_x[0, :at] = bad
    for part in dirty_state:
        part[1] = bad
    dirty_y, dirty_dx, dirty_final = run(dirty_x, dirty_state, grad)
    same = partial(torch.allclose, rtol=1e-5, atol=1e-6) if falls_back else torch.equal
    assert same(y[:, at:], dirty_y[:, at:])
    assert same(dx[:, at:], dirty_dx[:, at:])
    assert all(same(a, b) for a, b in zip(final, dirty_final, strict=True))
    assert not torch.equal(y[:2, :at], dirty_y[:2, :at])
    # A gradient does not pass a reset either.
    dirty_grad = grad.clone()
    dirty_grad[:2, at:] = 3.0 if backend == "blank" else bad  # which multiplies it by zero
    assert torch.equal(dx[:, :at], run(x, state, dirty_grad)[1][:, :at])


@pytest.mark.parametrize("cell,backend,recompute", VARIANTS)
def test_integer_is_init_is_a_mask(cell, backend, recompute):
    x, state, weights = make_inputs(cell, envs=1, steps=6, hidden=8, layers=1)
    reset = torch.tensor([[0, 0, 1, 0, 0, 1]])
    run = [
        rnn_forward(x, state, mask, weights, cell=cell, backend=backend, recompute=recompute)[0]
        for mask in (reset.bool(), reset, reset.unsqueeze(-1))
    ]
    assert torch.equal(run[0], run[1]) and torch.equal(run[0], run[2])
    assert not torch.equal(run[0], rnn_forward(x, state, reset * 0, weights, cell=cell, backend=backend)[0])


@pytest.mark.parametrize("cell", CORES)
def test_without_gradients_nothing_is_saved(cell, monkeypatch):
    x, state, weights = make_inputs(cell, envs=7, steps=33, hidden=48, layers=1)
    reset = make_resets("consecutive", 7, 33)
    operator, saved = getattr(rnn_scan, f"_{cell}_scan"), []

    def spy(*args):
        outputs = operator(*args)
        saved.append(sum(value.numel() for value in outputs[2 if cell == "lstm" else 1 :]))
        return outputs

    monkeypatch.setattr(rnn_scan, f"_{cell}_scan", spy)
    for weight in weights:
        weight.requires_grad_()
    expected, _ = rnn_forward(x, state, reset, weights, cell=cell, backend="scan")
    with torch.no_grad():
        actual, _ = rnn_forward(x, state, reset, weights, cell=cell, backend="scan")
    assert torch.equal(actual, expected)
    assert saved[0] > 0 and saved[1] == 0


@pytest.mark.parametrize("recompute", [False, True])
def test_operators_are_well_formed(recompute):
    x, state, weights = make_inputs("lstm", envs=3, steps=4, hidden=8, layers=1)
    leaves = [value.requires_grad_() for value in (x.transpose(0, 1).contiguous(), *[s[:, 0].clone() for s in state])]
    reset, weights = torch.rand(4, 3) < 0.3, [weight.requires_grad_() for weight in weights]
    torch.library.opcheck(_lstm_scan, (*leaves, reset, *weights, True, recompute))
    x, state, weights = make_inputs("gru", envs=3, steps=4, hidden=8, layers=1)
    leaves = [value.requires_grad_() for value in (x.transpose(0, 1).contiguous(), state[0][:, 0].clone())]
    torch.library.opcheck(_gru_scan, (*leaves, reset, *[weight.requires_grad_() for weight in weights], not recompute))


def test_shapes_are_checked():
    x, state, weights = make_inputs("lstm", envs=3, steps=4, hidden=8, layers=2)
    reset = torch.zeros(3, 4, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"is_init must be \[N, T\]"):
        rnn_forward(x, state, reset.t(), weights, cell="lstm")
    with pytest.raises(ValueError, match=r"state must be \[N, L, H\]"):
        rnn_forward(x, (state[0][:, :1], state[1]), reset, weights, cell="lstm")
    with pytest.raises(ValueError, match="--rnn-recompute"):
        rnn_forward(x, state, reset, weights, cell="lstm", backend="pad", recompute=True)


# ------------------------------------------------------------------------------------------------------------ modules


def make_window(core: RecurrentCore, *, envs=4, steps=6) -> TensorDict:
    torch.manual_seed(0)
    batch = TensorDict({"embed": torch.randn(envs, steps, core.input_size)}, [envs, steps])
    batch["is_init"] = torch.rand(envs, steps, 1) < 0.3
    for key in core.state_keys:
        batch[key] = torch.randn(envs, 1, core.num_layers, core.hidden_size).expand(-1, steps, -1, -1)
    return batch


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("cell", CORES)
def test_initialised_as_torch_and_checkpoints_convert(cell, layers):
    torch.manual_seed(5)
    core = CORES[cell](6, 16, layers)
    torch.manual_seed(5)
    plain = TORCH[cell](6, 16, layers, batch_first=True)
    assert [name for name, _ in core.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert all(torch.equal(a, b) for a, b in zip(core.parameters(), plain.parameters(), strict=True))
    other = TORCH[cell](6, 16, layers, batch_first=True)
    core.load_state_dict(other.state_dict())
    plain.load_state_dict(core.state_dict())
    x, state = torch.randn(3, 7, 6), torch.zeros(3, layers, 16)
    states = (state,) * len(core.state_keys)
    y, _ = rnn_forward(x, states, torch.zeros(3, 7), core.flat_weights(), cell=cell, backend="scan")
    torch.testing.assert_close(y, plain(x)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("batch", [(), (4,), (2, 2)])
@pytest.mark.parametrize("cell", CORES)
def test_collecting_takes_the_steps_of_the_window(cell, batch):
    core = CORES[cell](6, 16, 2)
    window = make_window(core)
    window = window.reshape(*batch, 6) if batch else window[0]
    with set_recurrent_mode(True):
        expected = core(window.clone())["features"]
    state = {key: window[..., 0][key] for key in core.state_keys}
    for t in range(6):
        step = window[..., t].select("embed", "is_init").update(state)
        core(step)
        torch.testing.assert_close(step["features"], expected.select(-2, t), rtol=1e-5, atol=1e-6)
        state = {key: step["next", key] for key in core.state_keys}
        assert all(part.shape == (*batch, 2, 16) for part in state.values())


@pytest.mark.parametrize("cell", CORES)
def test_collecting_under_autocast_acts_as_training(cell):
    core = CORES[cell](6, 16, 2)
    window = make_window(core)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with set_recurrent_mode(True):
            expected = core(window.clone())["features"][:, 0]
        step = core(window[:, 0].clone())
    assert all(step["next", key].dtype == torch.float32 for key in core.state_keys)
    torch.testing.assert_close(step["features"], expected, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("cell", CORES)
def test_recurrent_mode_reads_only_the_first_state_and_writes_none(cell):
    core = CORES[cell](6, 16, 2)
    window = make_window(core)
    with set_recurrent_mode(True):
        output = core(window.clone())
        assert "next" not in output
        poisoned = window.clone()
        for key in core.state_keys:
            assert window[key].untyped_storage().nbytes() == 4 * 2 * 16 * 4  # still expanded: one step's bytes
            poisoned[key] = poisoned[key].contiguous()
            poisoned[key][:, 1:] = float("nan")
        assert torch.equal(core(poisoned)["features"], output["features"])


@pytest.mark.parametrize("cell", CORES)
def test_missing_entries_are_errors(cell):
    core = CORES[cell](6, 16)
    for mode in (False, True):
        window = make_window(core) if mode else make_window(core)[:, 0]
        for key, remedy in (("is_init", "InitTracker"), (core.state_keys[-1], "make_tensordict_primer"), ("embed", "")):
            with set_recurrent_mode(mode), pytest.raises(KeyError, match=f"'{key}' is missing.*{remedy}"):
                core(window.exclude(key))


@pytest.mark.parametrize("cell", CORES)
def test_drop_in_for_torchrl(cell):
    """Same collected batch as TorchRL's own module with the same weights, in a real collector."""
    torch.manual_seed(0)
    core = CORES[cell](3, 16, 2, in_key="embed")
    stock_state = list(core.state_keys) if cell == "lstm" else ["recurrent_state_h"]
    stock = {"lstm": LSTMModule, "gru": GRUModule}[cell](
        input_size=3,
        hidden_size=16,
        num_layers=2,
        in_keys=["embed", *stock_state],
        out_keys=["features", *[("next", key) for key in stock_state]],
    )
    getattr(stock, cell).load_state_dict(core.state_dict())
    head = nn.Linear(16, 1)
    batches = []
    for module in (core, stock):
        join = TensorDictModule(
            lambda th, thdot: torch.stack([th.cos(), th.sin(), thdot], -1), in_keys=["th", "thdot"], out_keys=["embed"]
        )
        policy = TensorDictSequential(join, module, TensorDictModule(head, in_keys=["features"], out_keys=["action"]))
        env = TransformedEnv(PendulumEnv(seed=0), Compose(InitTracker(), StepCounter(max_steps=5)))
        env.append_transform(get_primers_from_module(policy))
        env.set_seed(0)
        torch.manual_seed(0)
        collector = Collector(env, policy, frames_per_batch=16, total_frames=16)
        batches.append(next(iter(collector)))
        collector.shutdown()
    ours, theirs = batches
    assert ours["is_init"].sum() >= 3
    for key in ("action", "features", *stock_state, *[("next", k) for k in stock_state]):
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-6)
    # The state is fed back: what enters step 1 is what left step 0, and is not zero.
    key = core.state_keys[0]
    assert torch.equal(ours[key][1], ours["next", key][0]) and ours[key][1].abs().sum() > 0


def count_nodes(function, *args) -> int:
    """Nodes of the one graph that Dynamo and AOT autograd make of a function."""
    counts = []

    def backend(graph, _):
        counts.append(len(graph.graph.nodes))
        return graph.forward

    torch.compile(function, fullgraph=True, dynamic=False, backend=backend)(*args)
    assert len(counts) == 1
    return counts[0]


@pytest.mark.parametrize("cell", CORES)
def test_one_graph_whose_size_does_not_grow_with_the_window(cell):
    core = CORES[cell](6, 16, 2, backend="scan")
    with set_recurrent_mode(True):
        short, long = [
            count_nodes(lambda batch: core(batch)["features"], make_window(core, steps=steps)) for steps in (3, 60)
        ]
    assert short == long


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("cell", CORES)
@torch._inductor.config.patch({"cpp.vec_isa_ok": True})  # skips a probe that takes longer than the test
def test_compiled_equals_eager(cell, recompute):
    core = CORES[cell](6, 16, 2, backend="scan", recompute=recompute)
    window = make_window(core)

    def loss(embed: Tensor) -> Tensor:
        return (core(window.copy().set("embed", embed))["features"] ** 2).sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True)):
        embed = window["embed"].clone().requires_grad_()
        core.zero_grad()
        with set_recurrent_mode(True):
            value = function(embed)
        value.backward()
        results.append([value.detach(), embed.grad, *[weight.grad.clone() for weight in core.parameters()]])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-6)


def test_auto_takes_blank_steps_where_they_pay():
    """Up to a width when training, at any without gradients; not for a GRU, nor where resets are many or traced."""

    def taken(*, cell="lstm", envs=16, resets=2, grad=True, run=rnn_forward) -> str:
        x, state, weights = make_inputs(cell, envs=envs, steps=32, hidden=64, layers=1)
        reset = torch.zeros(envs, 32, dtype=torch.bool)
        reset[0, 1 : 1 + resets] = True
        with torch.set_grad_enabled(grad):
            y, *others = [
                run(x, state, reset, weights, cell=cell, backend=backend)[0]
                for backend in ("auto", "scan", *(["blank"] if cell == "lstm" else []))
            ]
        return "scan" if torch.equal(y, others[0]) else "blank" if torch.equal(y, others[-1]) else "neither"

    assert taken() == taken(envs=129, grad=False) == taken(resets=8) == taken(resets=0) == "blank"
    assert taken(cell="gru") == taken(envs=129) == taken(resets=9) == "scan"
    assert taken(run=torch.compile(rnn_forward, backend="eager", fullgraph=False)) == "scan"


def test_backend_names():
    assert resolve_backend("auto", "cpu") == "scan"
    assert resolve_backend("auto", "cuda:0") == "triton"
    assert resolve_backend("pad", "cpu") == "pad"
    with pytest.raises(ValueError, match=r"--rnn-backend 'cudnn'.*auto, blank, pad, scan, triton"):
        LSTM(3, 4, backend="cudnn")


def test_triton_needs_cuda(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="--rnn-backend 'triton' needs a CUDA device, got cpu"):
        resolve_backend("triton", "cpu")
