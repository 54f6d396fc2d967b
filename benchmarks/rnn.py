"""Recurrent backends against plain nn.LSTM/nn.GRU without resets: time, memory, compile time.

    python benchmarks/rnn.py time --envs 64 512 --output benchmarks/results/rnn_time.json
    python benchmarks/rnn.py memory --envs 512
    python benchmarks/rnn.py compile --steps 32 128

`time` interleaves the contestants: a round runs plain, a contestant, plain, the next contestant, plain, and so on. A
contestant's figure is the median over rounds of its ratio to the mean of the plain times right before and after it. A
round is dropped for a contestant, as loaded, when those two differ by more than 10 % or their mean exceeds the best
plain time by more than 20 %.
`memory` and `compile` measure in fresh processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from isaaclab_rnn_ppo.utils.rnn import GRU, LSTM
from machine import added_peak_bytes, environment
from tensordict import TensorDict
from torch import Tensor, nn
from torchrl.modules import GRUModule, LSTMModule, set_recurrent_mode

CONTESTANTS = (
    "plain", "scan", "scan-recompute", "scan-compiled", "pad", "triton",
    "torchrl-pad", "torchrl-scan", "torchrl-scan-compiled", "torchrl-triton",
)  # fmt: skip
DEFAULT = ("scan", "scan-recompute", "scan-compiled", "pad", "torchrl-pad")


def make_contestant(
    name: str, *, cell: str, envs: int, steps: int, hidden: int, reset_rate: float, device: str
) -> tuple[Callable[[], Tensor], nn.Module, Tensor]:
    """A function that runs the forward over a window [envs, steps, hidden], its module, and its input."""
    torch.manual_seed(0)
    x = torch.randn(envs, steps, hidden, device=device, requires_grad=True)
    is_init = (torch.rand(envs, steps, 1) < reset_rate).to(device)
    zeros = torch.zeros(envs, 1, hidden, device=device)
    keys = ("recurrent_state_h", "recurrent_state_c")[: 2 if cell == "lstm" else 1]
    if name == "plain":
        module = (nn.LSTM if cell == "lstm" else nn.GRU)(hidden, hidden, batch_first=True, device=device)
        state = zeros.transpose(0, 1).contiguous()
        state = (state, state.clone()) if cell == "lstm" else state
        return lambda: module(x, state)[0], module, x
    if name.startswith("torchrl"):
        # TorchRL reads a dense state: zeros at resets, which an expanded entry cannot express in general.
        state = zeros.unsqueeze(1).repeat(1, steps, 1, 1)
        keys = keys if cell == "lstm" else ("recurrent_state",)
        module = (LSTMModule if cell == "lstm" else GRUModule)(
            input_size=hidden,
            hidden_size=hidden,
            recurrent_backend=name.split("-")[1],
            in_keys=["embed", *keys],
            out_keys=["features", *[("next", key) for key in keys]],
            device=device,
        )
    else:
        state = zeros.unsqueeze(1).expand(envs, steps, 1, hidden)
        module = (LSTM if cell == "lstm" else GRU)(
            hidden, hidden, backend=name.split("-")[0], recompute="recompute" in name, device=device
        )
    batch = TensorDict({"embed": x, "is_init": is_init, **{key: state for key in keys}}, [envs, steps])

    def forward(embed: Tensor) -> Tensor:
        return module(batch.copy().set("embed", embed))["features"]

    if name.endswith("compiled"):
        forward = torch.compile(forward)

    def run() -> Tensor:
        with set_recurrent_mode(True):
            return forward(x)

    return run, module, x


def make_call(name: str, mode: str, **sizes) -> Callable[[], None]:
    """One timed call: "forward" without gradients, or "forward_backward" down to the input and every weight."""
    forward, module, x = make_contestant(name, **sizes)
    grad = torch.randn_like(x)
    inputs = [x, *module.parameters()]

    def call() -> None:
        if mode == "forward":
            with torch.no_grad():
                forward()
        else:
            torch.autograd.grad(forward(), inputs, grad)

    return call


def seconds(call: Callable[[], None], repeats: int) -> float:
    """Mean wall time of a call, synchronised."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def measure_time(contestants: list[str], *, mode: str, rounds: int, **sizes) -> dict:
    """Median per-round ratios to plain for one size; see the module."""
    calls = {name: make_call(name, mode, **sizes) for name in ["plain", *contestants]}
    for call in calls.values():
        call(), call()
    repeats = max(1, int(0.1 / seconds(calls["plain"], 2)))
    samples: dict[str, list[tuple[float, float, float]]] = {name: [] for name in contestants}
    for _ in range(rounds):
        before = seconds(calls["plain"], repeats)
        for name in contestants:
            own = seconds(calls[name], repeats)
            after = seconds(calls["plain"], repeats)
            samples[name].append((own, before, after))
            before = after
    best = min(after for rows in samples.values() for _, _, after in rows)
    result = {"mode": mode, **sizes, "rounds": rounds, "plain_best_ms": round(1e3 * best, 3), "contestants": {}}
    for name, rows in samples.items():
        kept = [
            (own, (before + after) / 2)
            for own, before, after in rows
            if abs(before - after) <= 0.1 * min(before, after) and before + after <= 2.4 * best
        ]
        ratios = sorted(own / plain for own, plain in kept)
        result["contestants"][name] = {"rounds_kept": len(kept)} | (
            {
                "ratio_median": round(statistics.median(ratios), 3),
                "ratio_min": round(ratios[0], 3),
                "ratio_max": round(ratios[-1], 3),
                "ms_median": round(1e3 * statistics.median(own for own, _ in kept), 3),
            }
            if kept
            else {}
        )
    return result


def child(args: list[str]) -> dict:
    """Run this script in a fresh process, with an empty compilation cache, and read the JSON on its last line."""
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, __file__, *args]
        output = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
    return json.loads(output.splitlines()[-1])


def peak_memory(name: str, repeats: int, **sizes) -> dict:
    """Peak bytes that one forward and backward adds to a warm process: resident set on the CPU, allocator on CUDA."""
    call = make_call(name, "forward_backward", **{**sizes, "envs": 8})
    call()
    call = make_call(name, "forward_backward", **sizes)
    if sizes["device"] == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return {"peak_bytes": torch.cuda.max_memory_allocated() - before}

    def repeated() -> None:
        for _ in range(repeats):
            call()

    return {"peak_bytes": added_peak_bytes(repeated)}


def compile_seconds(name: str, **sizes) -> dict:
    """Time of the first compiled call, forward and backward; "trivial" is the fixed part of any compilation.

    The CPU time, with that of the C++ compiler, is the figure to trust on a loaded machine.
    """
    if name == "trivial":
        x = torch.randn(64, 64, requires_grad=True)
        function = torch.compile(lambda value: value.sin() * 2)

        def call() -> None:
            function(x).sum().backward()
    else:
        call = make_call(name, "forward_backward", **sizes)
    start, cpu_start = time.perf_counter(), sum(os.times()[:4])
    call()
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "cpu_seconds": round(sum(os.times()[:4]) - cpu_start, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["time", "memory", "compile"])
    parser.add_argument("--cell", choices=["lstm", "gru"], nargs="+", default=["lstm"])
    parser.add_argument("--envs", type=int, nargs="+", default=[64], help="envs N")
    parser.add_argument("--steps", type=int, nargs="+", default=[32], help="window length T, steps")
    parser.add_argument("--hidden", type=int, nargs="+", default=[256], help="hidden and input units H")
    parser.add_argument("--reset-rate", type=float, nargs="+", default=[0.03], help="fraction of steps that reset")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(DEFAULT))
    parser.add_argument("--mode", nargs="+", choices=["forward", "forward_backward"], default=["forward_backward"])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    results = []
    for cell, envs, steps, hidden, rate in (
        (c, n, t, h, r) for c in args.cell for n in args.envs for t in args.steps for h in args.hidden
        for r in args.reset_rate
    ):  # fmt: skip
        sizes = dict(cell=cell, envs=envs, steps=steps, hidden=hidden, reset_rate=rate, device=args.device)
        if args.child:
            function = {"memory": lambda n, **s: peak_memory(n, 1, **s), "compile": compile_seconds}[args.what]
            print(json.dumps(function(args.child, **sizes)))
            return
        flags = [f"--{key.replace('_', '-')}={value}" for key, value in sizes.items()]
        if args.what == "time":
            for mode in args.mode:
                results.append(measure_time(args.contestants, mode=mode, rounds=args.rounds, **sizes))
                print(json.dumps(results[-1]), flush=True)
            continue
        names = ["plain", *args.contestants] if args.what == "memory" else ["trivial", *args.contestants]
        figures = {name: child([args.what, *flags, f"--child={name}"]) for name in names}
        results.append({"what": args.what, **sizes, **figures})
        print(json.dumps(results[-1]), flush=True)
    if args.output:
        args.output.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
