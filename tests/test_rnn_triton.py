"""The Triton kernels: in the interpreter on the CPU, on a reduced grid, or on a GPU where there is one."""

from __future__ import annotations

import os

import pytest
import torch
from isaaclab_rnn_ppo.utils.rnn import rnn_forward
from test_rnn import CORES, RESETS, assert_close, make_inputs, make_resets, make_window, outcome, reference
from torchrl.modules import set_recurrent_mode

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton decides at decoration, so the variable is set around the import alone: left in the environment it would
    # change what other tests compile.
    os.environ["TRITON_INTERPRET"] = "1"
from isaaclab_rnn_ppo.utils import rnn_triton  # noqa: E402

os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture(autouse=True)
def interpret(monkeypatch):
    """What a user sets to run the kernels without CUDA."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def on_device(x, state, reset, weights, **kwargs):
    """rnn_forward with everything moved to the device under test."""
    move = [value.to(DEVICE) for value in (x, *state, *weights)]
    state, weights = tuple(move[1 : 1 + len(state)]), move[1 + len(state) :]
    y, final = rnn_forward(move[0], state, reset.to(DEVICE), weights, **kwargs)
    return y.cpu(), tuple(part.cpu() for part in final)


def check(cell, *, kind, envs, steps, hidden, layers=1, recompute=False):
    x, state, weights = make_inputs(cell, envs=envs, steps=steps, hidden=hidden, layers=layers)
    reset = make_resets(kind, envs, steps)
    expected = outcome(reference, x, state, reset, weights, torch.float64, cell=cell)
    actual = outcome(on_device, x, state, reset, weights, cell=cell, backend="triton", recompute=recompute)
    assert_close(actual, expected, 1e-5)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", RESETS)
@pytest.mark.parametrize("cell", CORES)
def test_matches_the_reference(cell, kind, recompute):
    check(cell, kind=kind, envs=7, steps=9, hidden=48, recompute=recompute)


@pytest.mark.parametrize(
    "envs,steps,hidden,layers", [(1, 1, 1, 1), (7, 9, 1, 1), (7, 1, 48, 1), (7, 3, 256, 1), (3, 5, 48, 3)]
)
@pytest.mark.parametrize("cell", CORES)
def test_matches_the_reference_at_the_corners(cell, envs, steps, hidden, layers):
    check(cell, kind="consecutive", envs=envs, steps=steps, hidden=hidden, layers=layers)


@pytest.mark.parametrize("cell", CORES)
def test_tiles_as_on_a_gpu(cell, monkeypatch):
    """The interpreter takes one tile; here a program takes several in every direction, with ragged edges."""
    if DEVICE == "cpu":
        monkeypatch.setattr(rnn_triton, "_INTERPRET_TILES", (16, 16, 16))
    check(cell, kind="consecutive", envs=19, steps=3, hidden=40)


@pytest.mark.parametrize("cell", CORES)
def test_agrees_with_scan(cell):
    x, state, weights = make_inputs(cell, envs=5, steps=6, hidden=32, layers=1)
    reset = torch.rand(5, 6) < 0.3
    scan = outcome(rnn_forward, x, state, reset, weights, cell=cell, backend="scan")
    actual = outcome(on_device, x, state, reset, weights, cell=cell, backend="triton")
    assert_close(actual, {name: value.double() for name, value in scan.items()}, 1e-5)


@pytest.mark.parametrize("cell", CORES)
def test_bf16_autocast(cell):
    x, state, weights = make_inputs(cell, envs=7, steps=9, hidden=48, layers=1)
    reset = make_resets("consecutive", 7, 9)
    expected = outcome(reference, x, state, reset, weights, torch.float64, cell=cell)

    def autocast(*args, **kwargs):
        with torch.autocast(DEVICE, torch.bfloat16):
            return on_device(*args, **kwargs)

    assert_close(outcome(autocast, x, state, reset, weights, cell=cell, backend="triton"), expected, 2e-2)


@pytest.mark.parametrize("cell", CORES)
def test_a_reset_isolates(cell):
    at = 2
    x, state, weights = make_inputs(cell, envs=3, steps=4, hidden=16, layers=1)
    reset = torch.zeros(3, 4, dtype=torch.bool)
    reset[:2, at] = True
    grad = torch.randn(3, 4, 16)

    def run(x, state, grad):
        x = x.clone().requires_grad_()
        y, final = on_device(x, state, reset, weights, cell=cell, backend="triton")
        return y.detach(), torch.autograd.grad(y, x, grad)[0], final

    y, dx, final = run(x, state, grad)
    dirty_x, dirty_state, dirty_grad = x.clone(), tuple(part.clone() for part in state), grad.clone()
    dirty_x[0, :at] = float("nan")
    for part in dirty_state:
        part[1] = float("nan")
    dirty_y, dirty_dx, dirty_final = run(dirty_x, dirty_state, grad)
    assert dirty_y[:2, :at].isnan().any(-1).all()
    assert torch.equal(y[:, at:], dirty_y[:, at:])
    assert torch.equal(dx[:, at:], dirty_dx[:, at:])
    assert all(torch.equal(a, b) for a, b in zip(final, dirty_final, strict=True))
    dirty_grad[:2, at:] = float("nan")
    assert torch.equal(dx[:, :at], run(x, state, dirty_grad)[1][:, :at])


@pytest.mark.parametrize("cell", CORES)
def test_runs_in_the_module_and_refuses_float64(cell):
    core = CORES[cell](3, 16, 2, backend="triton", device=DEVICE)
    window = make_window(core, envs=3, steps=4).to(DEVICE)
    with set_recurrent_mode(True), torch.no_grad():
        features = core(window.clone())["features"]
        core.backend = "pad"
        torch.testing.assert_close(features, core(window.clone())["features"], rtol=1e-5, atol=1e-6)
        core = CORES[cell](3, 16, backend="triton", device=DEVICE, dtype=torch.float64)
        with pytest.raises(ValueError, match="float64"):
            core(make_window(core, envs=3, steps=4).to(DEVICE))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("tf32,tolerance", [(False, 1e-5), (True, 5e-3)])
@pytest.mark.parametrize("backend", ["triton", "scan", "pad"])
@pytest.mark.parametrize("cell", CORES)
def test_parity_on_a_gpu(cell, backend, tf32, tolerance, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    x, state, weights = make_inputs(cell, envs=65, steps=33, hidden=256, layers=1)
    reset = torch.rand(65, 33) < 0.05
    expected = outcome(reference, x, state, reset, weights, torch.float64, cell=cell)
    assert_close(outcome(on_device, x, state, reset, weights, cell=cell, backend=backend), expected, tolerance)
