"""What a compact rollout costs, beside TorchRL's plain one: bytes, time, peak memory.

    PYTHONPATH=tests python benchmarks/rollout.py bytes --output benchmarks/results/rollout_bytes.json
    PYTHONPATH=tests python benchmarks/rollout.py speed --output benchmarks/results/rollout_speed.json
    PYTHONPATH=tests python benchmarks/rollout.py large --output benchmarks/results/rollout_large.json

The env is the tests' table of random numbers (observation 60, action 8, 2 % of the steps end an episode), which costs
next to nothing.

`bytes` counts the storages that a worker process shares with the learner.
`speed` runs both collectors in this process, in turn. `same policy` is TorchRL's Collector with the policy of this
suite, `torchrl policy` with TorchRL's own LSTMModule. A ratio is that of two rollouts that ran one after the other;
below 1 the compact one is faster. The process's CPU time stands beside the wall time, for a machine that others use.
`large` collects a batch in a worker and learns an epoch from it; the peaks are VmHWM of each process, shared memory
included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial
from pathlib import Path

import torch
from isaaclab_rnn_ppo.utils import make_advantage, make_collector, make_loss, make_update, minibatches, quiet_libraries
from machine import environment, status_bytes
from tensor_env import make_local_collector, make_plain_policy, make_random_env, make_test_models, make_test_policy
from torchrl.collectors import Collector, MultiSyncCollector
from torchrl.weight_update import MultiProcessWeightSyncScheme

NUM_OBS, NUM_ACTIONS, SLOTS = 60, 8, 2
PLAIN_OPTIONS = {"storing_device": "cpu", "device": "cpu", "use_buffers": True, "auto_register_policy_transforms": True}


def make_bench_env(num_envs: int, seed: int = 0):
    return make_random_env(num_envs, seed, num_obs=NUM_OBS, num_actions=NUM_ACTIONS, num_steps=16, end_rate=0.02)


def shared_bytes(batch) -> int:
    storages = (value.untyped_storage() for value in batch.values(True, True))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measure_bytes(*, envs: int, steps: int, hidden: int, rounds: int) -> dict:
    collector = make_collector(
        create_env_fn=make_bench_env,
        make_policy=partial(make_test_policy, hidden_size=hidden, embedding=(hidden,)),
        num_envs=envs,
        rollout_steps=steps,
        boundary_slots=SLOTS,
    )
    next(iter(collector))
    compact = shared_bytes(collector.buffers[0]) / (envs * steps)
    collector.shutdown()
    plain_collector = MultiSyncCollector(
        [partial(make_bench_env, envs)],
        make_plain_policy(num_obs=NUM_OBS, num_actions=NUM_ACTIONS, hidden_size=hidden),
        frames_per_batch=envs * steps,
        weight_sync_schemes={"policy": MultiProcessWeightSyncScheme()},
        **PLAIN_OPTIONS,
    )
    next(iter(plain_collector))
    plain = shared_bytes(plain_collector.buffers[0]) / (envs * steps)
    plain_collector.shutdown()
    return {"bytes_per_transition": {"compact": compact, "plain torchrl": plain}}


def measure_speed(*, envs: int, steps: int, hidden: int, rounds: int) -> dict:
    env = make_bench_env(envs)
    policy = partial(make_test_policy, hidden_size=hidden, embedding=(hidden,))
    compact = make_local_collector(env, rollout_steps=steps, make_policy=policy, boundary_slots=SLOTS)
    specs = {"observation_spec": env.observation_spec, "action_spec": env.action_spec}
    plain_policies = {
        "same policy": policy(**specs),
        "torchrl policy": make_plain_policy(num_obs=NUM_OBS, num_actions=NUM_ACTIONS, hidden_size=hidden),
    }
    contestants = {"compact": iter(compact)} | {
        name: iter(
            Collector(
                partial(make_bench_env, envs),
                module,
                frames_per_batch=envs * steps,
                return_same_td=True,
                **PLAIN_OPTIONS,
            )
        )
        for name, module in plain_policies.items()
    }
    result = {}
    clocks = {"wall": time.perf_counter, "cpu": time.process_time}
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in contestants} for clock in clocks}
    for round_ in range(rounds + 1):
        for name, rollouts in contestants.items():
            starts = {clock: read() for clock, read in clocks.items()}
            next(rollouts)
            if round_:  # the first one warms up
                for clock, read in clocks.items():
                    seconds[clock][name].append(read() - starts[clock])
    for clock, times in seconds.items():
        ratios = {
            name: [mine / theirs for mine, theirs in zip(times["compact"], times[name])] for name in plain_policies
        }
        result[clock] = {
            "seconds_a_rollout": {name: statistics.median(values) for name, values in times.items()},
            "ratio_to_plain": {
                name: {"median": statistics.median(r), "min": min(r), "max": max(r)} for name, r in ratios.items()
            },
        }
    return result


def peak_mib(pid: int | str) -> float:
    return status_bytes("VmHWM", pid) / 2**20


def measure_large(*, envs: int, steps: int, hidden: int, rounds: int) -> dict:
    options = {"hidden_size": hidden, "embedding": (hidden,)}
    collector = make_collector(
        create_env_fn=make_bench_env,
        make_policy=partial(make_test_policy, **options),
        num_envs=envs,
        rollout_steps=steps,
        boundary_slots=SLOTS,
    )
    models = make_test_models(
        observation_spec=collector.getattr_env("observation_spec"),
        action_spec=collector.getattr_env("action_spec"),
        **options,
    )
    loss = make_loss(actor=models.actor, value_head=models.value_head)
    update = make_update(loss_module=loss, optimizer=torch.optim.Adam(loss.parameters()))
    start_mib = {"learner": peak_mib("self"), "worker": peak_mib(collector.procs[0].pid)}
    collector.update_policy_weights_(models.collector_policy)
    times = [time.perf_counter()]
    batch = next(iter(collector))
    times.append(time.perf_counter())
    training = make_advantage(value_operator=models.value_operator)(batch)
    times.append(time.perf_counter())
    metrics = [update(training[env_ids]) for env_ids in minibatches(envs, 16, "cpu")]
    times.append(time.perf_counter())
    peaks = {"learner": peak_mib("self"), "worker": peak_mib(collector.procs[0].pid)}
    shared = shared_bytes(collector.buffers[0])
    collector.shutdown()
    assert all(value.isfinite().all() for entry in metrics for value in entry.values())
    return {
        "batch_mib": shared / 2**20,
        "peak_mib": peaks,
        "peak_mib_before_the_rollout": start_mib,
        "seconds": dict(zip(("collect", "advantage", "epoch of 16 minibatches"), map(float.__sub__, times[1:], times))),
    }


def main() -> None:
    defaults = {"bytes": (measure_bytes, 64), "speed": (measure_speed, 4096), "large": (measure_large, 16384)}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=defaults)
    parser.add_argument("--envs", type=int, help="envs N: 64, 4096 or 16384 by default")
    parser.add_argument("--steps", type=int, default=32, help="window length T, steps")
    parser.add_argument("--hidden", type=int, default=256, help="hidden units H")
    parser.add_argument("--rounds", type=int, default=5, help="rollouts of each contestant")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    quiet_libraries()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    measure, envs = defaults[args.what]
    sizes = {"envs": args.envs or envs, "steps": args.steps, "hidden": args.hidden, "rounds": args.rounds}
    result = {"what": args.what, "boundary_slots": SLOTS, **sizes, **measure(**sizes)}
    print(json.dumps(result, indent=1))
    if args.output:
        args.output.parent.mkdir(exist_ok=True)
        args.output.write_text(json.dumps({"environment": environment(), "results": [result]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
