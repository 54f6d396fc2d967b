"""Every way to compile and capture the update, on the same synthetic batch, as ratios to eager.

    python benchmarks/compile.py steady --envs 64 512 --output benchmarks/results/compile_steady.json
    python benchmarks/compile.py first --output benchmarks/results/compile_first.json
    python benchmarks/compile.py kernels --envs 64

`steady` interleaves the contestants within one process: a round runs eager, every contestant once, and eager again
(see `interleaved` in learner_phase.py for what is kept). `first` times, in a fresh process each, the first advantages
and the first update: with an empty compile cache, and again with the cache that this left. `kernels` prints where one
compiled update spends its time.

A contestant is MODE[+cudagraphs][+pad]; MODE is a mode of --compile, or eager. Those with cudagraphs need CUDA.
Observations 60, actions 8, embedding 256, H 256, T 32; the update is of one minibatch of N envs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor.config
from isaaclab_rnn_ppo.utils.update import COMPILE_MODES, compile_seconds
from learner_phase import Ours, interleaved, synthetic_rollout
from machine import environment
from torch.profiler import ProfilerActivity, profile


def make_update_call(
    name: str, num_envs: int, args: argparse.Namespace
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The advantages of a batch, and the update of all its envs, as functions without arguments."""
    mode, *extras = name.split("+")
    backend = "pad" if "pad" in extras else args.backend
    ours = Ours(
        args.hidden,
        num_steps=args.steps,
        compile_mode=None if mode == "eager" else mode,
        backend=backend,
        fullgraph=backend != "pad",
        cudagraphs="cudagraphs" in extras,
        device=args.device,
    )
    batch = synthetic_rollout(num_envs, args.steps, args.hidden, device=args.device)
    training = ours.advantage(batch)
    return lambda: ours.advantage(batch), lambda: ours.update(training)


def measure_steady(num_envs: int, args: argparse.Namespace) -> dict:
    calls = {}
    for name in ["eager", *args.contestants]:
        _, calls[name] = make_update_call(name, num_envs, args)
        for _ in range(8):  # compilation, and the warm-up before a capture
            calls[name]()
    return {"num_envs": num_envs, **interleaved(calls, reference="eager", rounds=args.rounds, clock=args.clock)}


def measure_first(name: str, num_envs: int, args: argparse.Namespace) -> dict:
    """Seconds of the first phase (advantages and one update), and how many of them went into compiling."""
    start = time.perf_counter()
    _, update = make_update_call(name, num_envs, args)
    update()
    return {"seconds": round(time.perf_counter() - start, 2), "compile_s": round(compile_seconds(), 2)}


def measure_first_in_children(name: str, num_envs: int, args: argparse.Namespace) -> dict:
    figures = {}
    with tempfile.TemporaryDirectory() as cache:
        for label in ("empty cache", "second time"):
            command = [sys.executable, __file__, "first", "--envs", str(num_envs), "--child", name]
            for flag in ("steps", "hidden", "backend", "device", "threads"):
                command += [f"--{flag}", str(getattr(args, flag))]
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache}
            output = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
            figures[label] = json.loads(output.splitlines()[-1])
    return {"contestant": name, "num_envs": num_envs, **figures}


def show_kernels(num_envs: int, args: argparse.Namespace) -> None:
    torch._inductor.config.cpp.enable_kernel_profile = True
    _, update = make_update_call(args.contestants[0], num_envs, args)
    update(), update()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        update()
    print(profiled.key_averages().table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=80))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["steady", "first", "kernels"])
    parser.add_argument("--contestants", nargs="+", default=list(COMPILE_MODES), help="see above")
    parser.add_argument("--envs", type=int, nargs="+", default=[64], help="envs N of the minibatch")
    parser.add_argument("--steps", type=int, default=32, help="window length T, steps")
    parser.add_argument("--hidden", type=int, default=256, help="hidden and embedding units H")
    parser.add_argument("--backend", default="auto", help="recurrent backend")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="see learner_phase.py")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    results = []
    for num_envs in args.envs:
        if args.child:
            print(json.dumps(measure_first(args.child, num_envs, args)))
            return
        if args.what == "kernels":
            show_kernels(num_envs, args)
        elif args.what == "steady":
            results.append(measure_steady(num_envs, args))
            print(json.dumps(results[-1]), flush=True)
        else:
            for name in args.contestants:
                results.append(measure_first_in_children(name, num_envs, args))
                print(json.dumps(results[-1]), flush=True)
    if args.output:
        args.output.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
