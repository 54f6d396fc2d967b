"""How training scales over ranks, where its time goes, and what more GPUs would give.

    python benchmarks/scaling.py run --ranks 1 2 --output benchmarks/results/scaling.json
    python benchmarks/scaling.py predict --results benchmarks/results/scaling.json --nodes 8 --gpus 8 \
        --latency-us 40 --bandwidth-gbs 20

`run` trains on the real simulator: one rank; then, for every other number of ranks, as many environments on each (weak
scaling), and as many over all (strong). A process has --threads threads of the CPU, so that a rank more is a core more
while there are cores. Words behind `--` are train.py's.

The seconds are those of rank 0 and an iteration: `collect`, the worker's own rollout; `transfer`, weights to the worker
and the batch back, to the learner's device; `learn`, advantages, updates and normalisers, without `all_reduce` and
`wait`, the time until the slowest rank has come to the all-reduce. The last two are told apart by a barrier in front of
each, which an ordinary run does not have. On CUDA the clock waits for the device at each phase.

`predict` puts the terms of a result together, see knowledge_base/SCALING.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from isaaclab_rnn_ppo.train import make_objectives, make_worker_policy, model_factory, seed_everything
from isaaclab_rnn_ppo.utils import (
    RolloutCollector,
    average_over_ranks,
    bytes_of,
    data_parallel,
    make_advantage,
    make_collector,
    make_env,
    num_ranks,
    parse_args,
    quiet_libraries,
    rank,
    resolve_asset_root,
    seed_of_rank,
    update,
)
from machine import environment

PHASES = ("collect", "transfer", "learn", "all_reduce", "wait")
BYTES = [2**exponent for exponent in range(10, 25, 2)]


def make_timed_policy(make_policy, **specs):
    """In the worker: ``make_policy``'s, and from here on a batch tells in place of an episode's length its seconds."""
    rollout = RolloutCollector.rollout

    def timed(self):
        start = time.perf_counter()
        batch = rollout(self)
        batch["episodes", "length"].fill_(time.perf_counter() - start)
        return batch

    RolloutCollector.rollout = timed
    return make_policy(**specs)


class Clock:
    """Seconds by phase; waits for the device."""

    def __init__(self, device: str):
        self.cuda = device.startswith("cuda")
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def all_reduce(self, values):
        """``average_over_ranks``, timed, with a barrier in front."""
        start = self.now()
        if num_ranks() > 1:
            dist.barrier()
        together = self.now()
        result = average_over_ranks(values)
        self.seconds["wait"].append(together - start)
        self.seconds["all_reduce"].append(self.now() - together)
        return result


def measure_all_reduce(device: str, rounds: int = 20) -> dict[str, list[float]]:
    """Median seconds of an all-reduce of ``BYTES``, and the line that fits them: latency, and bytes a second."""
    clock, medians = Clock(device), []
    for size in BYTES:
        values = [torch.ones(size // 4, device=device)]
        clock.seconds.clear()
        for _ in range(rounds + 3):
            clock.all_reduce(values)
        medians.append(statistics.median(clock.seconds["all_reduce"][3:]))
    slope, latency = statistics.linear_regression(BYTES, medians)
    return {"bytes": BYTES, "seconds": medians, "latency_s": latency, "bandwidth_bytes_s": 1 / slope}


def work(args: argparse.Namespace, rounds: int) -> dict:
    """Train, timed. Runs on every rank."""
    quiet_libraries()
    seed_everything(args.seed)
    asset_root, _ = resolve_asset_root(args.asset_root, task=args.task)
    factory = model_factory(args)
    collector = make_collector(
        create_env_fn=partial(
            make_env, args.task, device=args.device, asset_root=asset_root, overrides=args.env_overrides
        ),
        make_policy=partial(make_timed_policy, partial(make_worker_policy, factory)),
        num_envs=args.num_envs,
        rollout_steps=args.rollout_steps,
        device=args.device,
        seed=seed_of_rank(args.seed),
        backend=args.collector_backend,
    )
    try:
        models = factory(**{key: collector.getattr_env(key) for key in ("observation_spec", "action_spec")})
        (objective,) = make_objectives(models, args)
        advantage = make_advantage(value_operator=models.value_operator)
        clock, rollouts, iterations = Clock(args.device), iter(collector), defaultdict(list)
        update.average_over_ranks = clock.all_reduce
        for round_ in range(rounds + 2):
            clock.seconds.clear()
            start = clock.now()
            collector.update_policy_weights_(models.collector_policy)
            batch = next(rollouts).to(args.device)
            collected = clock.now()
            training = advantage(batch)
            objective.learn(training)
            models.update_normalizers(training["steps"])
            learned = clock.now()
            if round_ < 2:  # they warm up
                continue
            inside = {name: sum(clock.seconds[name]) for name in ("all_reduce", "wait")}
            rollout_s = float(batch["episodes", "length"].max())
            times = {
                "collect": rollout_s,
                "transfer": collected - start - rollout_s,
                "learn": learned - collected - sum(inside.values()),
                **inside,
            }
            for name, seconds in times.items():
                iterations[name].append(seconds)
            iterations["iteration"].append(learned - start)
        medians = {name: statistics.median(values) for name, values in iterations.items()}
        frames = batch["steps"].numel() * num_ranks()
        parameters = list(objective.loss.parameters())
        return {
            "ranks": num_ranks(),
            "envs_a_rank": args.num_envs,
            "frames_an_iteration": frames,
            "fps": frames / medians["iteration"],
            "seconds": medians,
            "all_reduce_share_of_update": medians["all_reduce"] / (medians["learn"] + medians["all_reduce"]),
            "transfer_share_of_iteration": medians["transfer"] / medians["iteration"],
            "updates_an_iteration": args.num_epochs * args.num_minibatches,
            "gradient_bytes": sum(parameter.numel() * parameter.element_size() for parameter in parameters),
            "batch_bytes": bytes_of(batch),
            **({"all_reduce_line": measure_all_reduce(args.device)} if num_ranks() > 1 else {}),
        }
    finally:
        collector.shutdown()


def launch(ranks: int, envs: int, options: argparse.Namespace, folder: Path) -> dict:
    """``work`` on that many ranks."""
    output = folder / f"scaling_{ranks}_{envs}.json"
    start = [sys.executable] if ranks == 1 else ["torchrun", "--standalone", f"--nproc-per-node={ranks}"]
    words = ["--task", options.task, "--num-envs", str(envs), *options.train]
    command = [*start, __file__, "worker", "--rounds", str(options.rounds), "--output", str(output), "--", *words]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(options.threads), "PATH": path})
    return json.loads(output.read_text())


def run(options: argparse.Namespace) -> None:
    folder = options.output.parent
    folder.mkdir(exist_ok=True)
    results, base = [], None
    for ranks in options.ranks:
        for kind, envs in (("weak", options.envs), ("strong", options.envs // ranks)):
            if ranks == 1 and kind == "strong":
                continue
            result = launch(ranks, envs, options, folder)
            (folder / f"scaling_{ranks}_{envs}.json").unlink()
            base = base or result
            speedup = result["fps"] / base["fps"]
            own = {"speedup": speedup, "efficiency": speedup / ranks, "load_average_1min": os.getloadavg()[0]}
            results.append({"scaling": kind, **result, **own})
            print(json.dumps(results[-1], indent=1), flush=True)
            options.output.write_text(
                json.dumps(
                    {
                        "environment": {"threads_a_process": options.threads, **environment("isaaclab")},
                        "results": results,
                    },
                    indent=1,
                )
                + "\n"
            )


def predicted_seconds(
    one: dict, *, ranks: int, latency_s: float, bandwidth_bytes_s: float, spread: float = 0.0
) -> dict[str, float]:
    """Seconds of an iteration on ``ranks`` with as many envs each as the one that ``one`` measured.

    A ring: every rank sends 2 (R - 1) / R of the gradient in 2 (R - 1) steps (Patarasuk and Yuan, 2009, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations").

    Args:
        one: result of one rank.
        latency_s: of a step between two neighbours.
        bandwidth_bytes_s: of the slowest link of the ring, a direction.
        spread: relative standard deviation of a rank's seconds between two all-reduces.
    """
    seconds = {name: one["seconds"][name] for name in ("collect", "transfer", "learn")}
    volume = 2 * (ranks - 1) / ranks * one["gradient_bytes"]
    seconds["all_reduce"] = one["updates_an_iteration"] * (2 * (ranks - 1) * latency_s + volume / bandwidth_bytes_s)
    # Expected maximum of R independent normal times, about sqrt(2 ln R) standard deviations.
    work_s = seconds["collect"] + seconds["transfer"] + seconds["learn"]
    seconds["wait"] = work_s * spread * (2 * torch.tensor(float(ranks)).log()).sqrt().item()
    return seconds


def predict(options: argparse.Namespace) -> None:
    results = json.loads(options.results.read_text())["results"]
    (one,) = [result for result in results if result["ranks"] == 1]
    ranks = options.nodes * options.gpus
    seconds = predicted_seconds(
        one,
        ranks=ranks,
        latency_s=options.latency_us * 1e-6,
        bandwidth_bytes_s=options.bandwidth_gbs * 1e9,
        spread=options.spread,
    )
    total = sum(seconds.values())
    frames = one["frames_an_iteration"] * ranks
    speedup = frames / total / one["fps"]
    prediction = {"ranks": ranks, "seconds": seconds, "fps": frames / total, "speedup": speedup}
    print(json.dumps(prediction | {"efficiency": speedup / ranks}, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="measure")
    running.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks; the first is 1")
    running.add_argument("--task", default="Isaac-Cartpole", help="Isaac Lab task id")
    running.add_argument("--envs", type=int, default=256, help="envs of one rank")
    running.add_argument("--threads", type=int, default=1, help="CPU threads of a process")
    running.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    worker = commands.add_parser("worker", help="what `run` starts")
    worker.add_argument("--output", type=Path, required=True)
    for command in (running, worker):
        command.add_argument("--rounds", type=int, default=10, help="iterations that count")
        command.add_argument("train", nargs="*", help="train.py's words, behind --")
    predicting = commands.add_parser("predict", help="put measured terms together")
    predicting.add_argument("--results", type=Path, required=True, help="JSON file of `run`")
    predicting.add_argument("--nodes", type=int, default=1)
    predicting.add_argument("--gpus", type=int, default=8, help="of a node")
    predicting.add_argument("--latency-us", type=float, required=True, help="of a step of the ring, microseconds")
    predicting.add_argument("--bandwidth-gbs", type=float, required=True, help="of the slowest link, GB/s a direction")
    predicting.add_argument("--spread", type=float, default=0.0, help="relative deviation of a rank's time")
    options = parser.parse_args()
    if options.command == "predict":
        predict(options)
    elif options.command == "run":
        run(options)
    else:
        args = parse_args(options.train)
        with data_parallel(args.device, timeout_s=600):
            result = work(args, options.rounds)
            if rank() == 0:
                options.output.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
