"""Compact rollouts in one process and through TorchRL's multi-process collectors.

Shapes: N envs, T steps, B boundary slots, W workers.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import inspect
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from isaaclab_rnn_ppo.utils import collectors, rollout
from isaaclab_rnn_ppo.utils.advantages import make_advantage, with_initial_state
from isaaclab_rnn_ppo.utils.collectors import RestartingCollector, make_collector
from isaaclab_rnn_ppo.utils.rollout import RolloutCollector, bytes_of, require_memory
from isaaclab_rnn_ppo.utils.signals import Interrupted, interruptible
from isaaclab_rnn_ppo.utils.update import minibatches
from tensor_env import (
    TableEnv,
    make_local_collector,
    make_plain_policy,
    make_random_env,
    make_test_models,
    make_test_policy,
    origin,
    with_transforms,
)
from tensordict import TensorDict
from test_advantages import SequentialValues, reference
from torchrl.collectors import Collector, MultiAsyncCollector, MultiCollector, MultiSyncCollector
from torchrl.data.tensor_specs import ContinuousBox
from torchrl.envs import Compose, RewardSum, TransformedEnv
from torchrl.modules import set_recurrent_mode
from torchrl.weight_update import MultiProcessWeightSyncScheme

T = 8

# --- one process ------------------------------------------------------------------------------------


def test_a_batch_holds_the_contract_and_nothing_else():
    env = make_random_env(6, critic=True, log=True)
    batch = next(iter(make_local_collector(env, rollout_steps=T, boundary_slots=3)))
    assert set(batch.keys()) == {"steps", "initial", "final", "episodes", "worker", "collector"}
    assert batch["steps"].shape == (6, T) and batch["final"].shape == (6, 3) and batch["initial"].shape == (6,)
    assert set(batch["steps"].keys(True, True)) == {
        *("policy", "critic", "action", "action_log_prob", "is_init", "policy_version"),
        *(("next", key) for key in ("reward", "done", "terminated")),
    }
    states = ("recurrent_state_h", "recurrent_state_c", "critic_state_h", "critic_state_c")
    assert set(batch["initial"].keys()) == set(states)
    assert set(batch["final"].keys()) == {"policy", "critic", "time", "valid"}
    assert set(batch["episodes"].keys()) == {"return", "length", "count", "log"}
    for part in ("steps", "final"):
        assert torch.equal(batch[part, "critic"], batch[part, "policy"] * 2)
    dtypes = {value.dtype for value in batch.values(True, True)}
    assert dtypes <= {torch.float32, torch.bool, torch.int32, torch.int64}
    assert all(value.is_contiguous() for value in batch.values(True, True))


def test_finals_are_those_of_their_env_and_step():
    env = make_random_env(16, seed=2, end_rate=0.3)
    rollouts = iter(make_local_collector(env, rollout_steps=T, boundary_slots=4))
    for window in range(3):
        batch = next(rollouts)
        final, flags = batch["final"], batch["steps", "next"]
        done, terminated = flags["done"].squeeze(-1), flags["terminated"].squeeze(-1)
        for n in range(16):
            truncated = (done & ~terminated)[n, :-1].nonzero().flatten().tolist()[:3]
            expected = truncated + ([] if terminated[n, -1] else [T - 1])
            assert final["time"][n][final["valid"][n]].tolist() == expected
            seeds, envs, steps = origin(final["policy"][n][final["valid"][n]])
            assert (seeds == 2).all() and (envs == n).all()
            k = [window * T + t for t in expected]
            assert steps.tolist() == [-1 - k if done[n, k % T] else k + 1 for k in k]


def test_episode_statistics_over_windows():
    env = make_random_env(16, end_rate=0.15, log=True)
    _, _, ends, rewards = env.base_env.tables
    rollouts = iter(make_local_collector(env, rollout_steps=T))
    total, length = torch.zeros(16), torch.zeros(16)
    for window in range(4):
        expected = TensorDict({key: torch.zeros(16) for key in ("return", "length", "count")}, [16])
        expected["log"] = torch.zeros(16, 2)
        for k in range(window * T, (window + 1) * T):
            total, length, ended = total + rewards[k], length + 1, ends[k] > 0
            for key, value in (("return", total), ("length", length), ("count", torch.ones(16))):
                expected[key] += torch.where(ended, value, 0.0)
            expected["log"] += torch.where(ended[:, None], torch.stack([rewards[k], -rewards[k]], -1), 0.0)
            total, length = torch.where(ended, 0.0, total), torch.where(ended, 0.0, length)
        actual = next(rollouts)["episodes"]
        for key in ("return", "length", "count", "log"):
            torch.testing.assert_close(actual[key], expected[key], rtol=1e-5, atol=1e-5)


def test_memory_does_not_vanish_without_primer_and_init_tracker():
    """PITFALLS: an env without them gets them; the state that enters step 2 is not zero, and resets."""
    env = TransformedEnv(
        make_random_env(32, end_rate=0.3).base_env, Compose(RewardSum(in_keys=["reward"], reward_spec=True))
    )
    rollouts = iter(make_local_collector(env, rollout_steps=1))
    assert not next(rollouts)["initial", "recurrent_state_h"].any()
    second = next(rollouts)
    fresh = second["steps", "is_init"].flatten()
    state = second["initial", "recurrent_state_h"].flatten(1)
    assert fresh.any() and not fresh.all()
    assert (state[~fresh] != 0).all() and not state[fresh].any()


def test_what_the_worker_holds_across_steps():
    """At most 1.5 times the batch, between any two steps, whoever holds it.

    Not counted: the weights, the env's own tables, and the bounds in TorchRL's specs of the env, which are
    constants that any TorchRL env has.
    """
    gc.collect()
    existing = gc.get_objects()  # kept until the end: an id is unique only while its object lives
    known = {id(thing) for thing in existing}
    env = make_random_env(32, num_obs=60, num_actions=8, num_steps=64, end_rate=0.05)
    policies, calls, held = [], [], []

    def measure(*_):
        if len(calls) % 8 == 0:  # it takes its time
            held.append(measure_bytes())
        calls.append(None)

    def measure_bytes() -> int:
        mine = [thing for thing in gc.get_objects() if type(thing) is torch.Tensor and id(thing) not in known]
        bounds = [(box._low, box._high) for box in gc.get_objects() if type(box) is ContinuousBox]
        given = {t.data_ptr() for t in [*env.base_env.tables, *policies[0].parameters(), *sum(bounds, ())]}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in mine}
        return sum(size for address, size in storages.items() if address not in given)

    def make_policy(**specs):
        policies.append(make_test_policy(**specs, hidden_size=256, embedding=(256,)))
        return policies[0]

    collector = make_local_collector(env, rollout_steps=32, make_policy=make_policy)
    rollouts = iter(collector)
    next(rollouts)
    policies[0].register_forward_pre_hook(measure)  # between two steps
    batch = next(rollouts)
    measure()
    assert len(calls) == 33 and len(held) == 5
    print(f"held: {max(held) / bytes_of(batch):.2f} times the batch")
    assert all(1.0 < h / bytes_of(batch) < 1.5 for h in held), [h / bytes_of(batch) for h in held]


def test_one_env_and_one_step():
    env = make_random_env(1, end_rate=0.5)
    for batch, _ in zip(make_local_collector(env, rollout_steps=1), range(4)):
        assert batch["steps"].shape == (1, 1)


@pytest.mark.parametrize(("num_envs", "num_minibatches"), [(12, 4), (5, 1), (7, 7)])
def test_every_env_is_used_once_an_epoch_in_a_new_order(num_envs, num_minibatches):
    epochs = [torch.cat(list(minibatches(num_envs, num_minibatches, "cpu"))).tolist() for _ in range(4)]
    assert all(sorted(epoch) == list(range(num_envs)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1


# --- memory -----------------------------------------------------------------------------------------


def test_preflight_names_the_memory_the_sizes_and_the_flag(monkeypatch):
    require_memory(1000.0, num_envs=4, batch_envs=4)
    huge = 2.0**50
    with pytest.raises(ValueError, match=r"of shared memory \(/dev/shm\).*--num-envs.*--rollout-steps.*--shm-size"):
        require_memory(huge, num_envs=1, batch_envs=1)
    with pytest.raises(ValueError, match=r"need 1,073,741,824.0 MiB of host memory.*--num-envs or --rollout-steps\.$"):
        require_memory(huge, num_envs=0, batch_envs=1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**20, 2**30))
    require_memory(2.0**19, num_envs=8, batch_envs=2, device="cuda:0")
    with pytest.raises(ValueError, match=r"need 1.5 MiB of device memory \(cuda:0\), which has 1.0 MiB left"):
        require_memory(2.0**19, num_envs=8, batch_envs=3, device="cuda:0")


SHM_SCRIPT = """
from functools import partial
from isaaclab_rnn_ppo.utils.collectors import RestartingCollector, make_collector
from tensor_env import make_random_env, make_test_policy
try:
    make_collector(
        create_env_fn=partial(make_random_env, num_obs=60, num_steps=8), make_policy=make_test_policy,
        num_envs=512, rollout_steps=32,
    )
except ValueError as error:
    print("ValueError:", str(error).splitlines()[0])
"""


def test_too_small_shared_memory_is_an_error_before_the_first_rollout():
    """In a mount namespace of its own, where /dev/shm has 1 MiB. It would be a bus error in the worker."""
    enter = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*enter, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*enter, sys.executable, "-c", SHM_SCRIPT],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert "ValueError: the rollouts need" in done.stdout and "MiB of shared memory (/dev/shm)" in done.stdout, done
    assert "MiB left: lower --num-envs or --rollout-steps" in done.stdout


INTERRUPTED_PUSH_SCRIPT = """
import threading
from functools import partial
from isaaclab_rnn_ppo.utils.collectors import make_collector
from tensor_env import make_random_env, make_test_models, make_test_policy

if __name__ == "__main__":
    env = partial(make_random_env, num_steps=8)
    collector = make_collector(
        create_env_fn=env, make_policy=make_test_policy, num_envs=4, rollout_steps=8, async_collection=True
    )
    specs = {name: collector.getattr_env(name) for name in ("observation_spec", "action_spec")}
    collector.update_policy_weights_(make_test_models(**specs).actor)
    next(iter(collector))
    scheme = collector._weight_sync_schemes["policy"]
    for queues in (scheme._weight_init_queues, scheme._instruction_queues):
        for queue in queues.values():
            stale = threading.Lock()
            stale.acquire()
            queue._notempty._waiters.appendleft(stale)
    collector.shutdown()
    print("ended", flush=True)
"""


def test_a_push_that_a_signal_interrupts_does_not_keep_the_process_from_ending(tmp_path):
    """Left in the queues is what an exception between ``notify``'s two statements leaves: the next one wakes nobody."""
    script = tmp_path / "push.py"
    script.write_text(INTERRUPTED_PUSH_SCRIPT)
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode == 0 and "ended" in done.stdout, done


# --- workers ----------------------------------------------------------------------------------------


@dataclass
class Run:
    """What a collector returned, batch by batch, and what was pushed before."""

    batches: list[TensorDict] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)  # the learner's, when the batch was taken
    models: dict[int, object] = field(default_factory=dict)  # by version
    worker_bytes: int = 0  # of the storages that the first worker shares with the learner


def perturb(models) -> None:
    with torch.no_grad():
        for parameter in {*models.collector_policy.parameters(), *models.value_operator.parameters()}:
            parameter.add_(0.3 * torch.randn_like(parameter))


def collect(num_iterations: int, *, env, options=None, perturb_from: int = 0, pauses=(), **kwargs) -> Run:
    """Push, take a batch, change the weights, and so on."""
    options, run = options or {}, Run()
    torch.manual_seed(3)
    collector = make_collector(create_env_fn=env, make_policy=partial(make_test_policy, **options), **kwargs)
    try:
        specs = {key: collector.getattr_env(key) for key in ("observation_spec", "action_spec")}
        models = make_test_models(**specs, **options)
        rollouts = iter(collector)
        for iteration in range(num_iterations):
            if iteration > perturb_from:
                perturb(models)
            before = collector.policy_version
            collector.update_policy_weights_(models.collector_policy)
            assert collector.policy_version == before + 1
            run.models[before + 1] = copy.deepcopy(models)
            run.batches.append(next(rollouts).clone())
            run.versions.append(collector.policy_version)
            if iteration in pauses:
                time.sleep(1.5)
        if kwargs.get("backend") != "ray":
            shared = (collector.buffers if isinstance(collector, MultiSyncCollector) else collector.out_tensordicts)[0]
            assert all(value.is_shared() for value in shared.values(True, True) if value.numel())
            run.worker_bytes = storage_bytes(shared)
    finally:
        collector.shutdown()
    return run


def storage_bytes(batch: TensorDict) -> int:
    storages = (value.untyped_storage() for value in batch.values(True, True))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def log_prob_error(batch: TensorDict, models) -> float:
    """Largest difference between the stored log-probabilities and those of the models, recomputed."""
    window = with_initial_state(batch["steps"], batch["initial"])
    with torch.no_grad(), set_recurrent_mode(True):
        recomputed = models.actor.get_dist(window).log_prob(window["action"])
    return float((recomputed - batch["steps", "action_log_prob"]).abs().max())


needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="the extra `ray` is not installed")
BACKENDS = ["multiprocess", pytest.param("ray", marks=[needs_ray, pytest.mark.slow])]


@pytest.fixture(scope="module", params=BACKENDS)
def two_workers(request) -> Run:
    """Two windows with the first weights, then others; 6 envs each, with a critic of its own."""
    return collect(
        5,
        env=partial(make_random_env, end_rate=0.3, unknown_rate=0.1, critic=True, log=True),
        perturb_from=1,
        num_envs=12,
        rollout_steps=T,
        boundary_slots=3,
        num_collectors=2,
        seed=3,
        backend=request.param,
    )


@pytest.fixture(scope="module")
def one_worker() -> Run:
    """The sizes of the published figure: observation 60, action 8, H 256, T 32, B 2, float32."""
    return collect(
        3,
        env=partial(make_random_env, num_obs=60, num_actions=8, num_steps=96),
        options={"hidden_size": 256, "embedding": (256,)},
        num_envs=16,
        rollout_steps=32,
        first_version=7,
    )


def test_sync_batches_are_ordered_by_worker_and_env(two_workers):
    for window, batch in enumerate(two_workers.batches):
        assert batch["worker"].tolist() == [0] * 6 + [1] * 6
        assert batch["collector", "traj_ids"].tolist() == list(range(12))
        seeds, envs, steps = (part.T for part in origin(batch["steps", "policy"]))
        assert (seeds == 3 + torch.tensor([0] * 6 + [1] * 6)).all()
        assert (envs == torch.arange(12) % 6).all()
        assert (steps == window * T + torch.arange(T)[:, None]).all()
        valid = batch["final", "valid"]
        seeds, envs, _ = origin(batch["final", "policy"])
        assert (seeds == (3 + batch["worker"])[:, None])[valid].all()
        assert (envs == (torch.arange(12) % 6)[:, None])[valid].all()
        assert torch.equal(batch["steps", "critic"], batch["steps", "policy"] * 2)


def test_every_sample_of_both_workers_is_exact(two_workers):
    """Against the sequential reference, for the LSTM critic that travelled and for an MLP on the same batch."""
    tables = [make_random_env(6, seed, end_rate=0.3, unknown_rate=0.1).base_env.tables for seed in (3, 4)]
    tables = [torch.cat([table[: 2 * T + (i == 0)] for table in parts], 1) for i, parts in enumerate(zip(*tables))]
    env = with_transforms(TableEnv(*tables, critic=True))
    specs = {"observation_spec": env.observation_spec, "action_spec": env.action_spec}
    for models in (two_workers.models[1], make_test_models(**specs, rnn="none", critic_obs="critic")):
        values = SequentialValues(models, scale=2.0)
        expected = reference(tables, values, num_slots=3, gamma=0.97, gae_lambda=0.9)
        advantage = make_advantage(value_operator=models.value_operator, gamma=0.97, gae_lambda=0.9, normalize=False)
        for window in range(2):
            training = advantage(two_workers.batches[window])
            for key in ("advantage", "value_target"):
                actual = training["steps", key].squeeze(-1).T.double()
                torch.testing.assert_close(actual, expected[key][window * T :][:T], rtol=1e-5, atol=1e-5)
            assert torch.equal(training["bootstrap_approximated"], expected["approximated"][window])
    assert expected["approximated"].any()


def check_versions(run: Run, first: int) -> None:
    """Every frame, the first one too, of every worker; staleness 0; on-policy identity."""
    assert run.versions == list(range(first, first + len(run.batches)))
    for version, batch in zip(run.versions, run.batches):
        assert (batch["steps", "policy_version"] == version).all()
        assert batch["steps", "is_init"].any()
        assert log_prob_error(batch, run.models[version]) < 1e-4
        for worker in batch["worker"].unique():
            part = batch[batch["worker"] == worker]
            for other, models in run.models.items():
                is_other = any(
                    not torch.equal(mine, theirs)
                    for mine, theirs in zip(models.actor.parameters(), run.models[version].actor.parameters())
                )
                assert not is_other or log_prob_error(part, models) > 1e-2, (version, other)


def test_sync_frames_carry_the_version_and_the_weights_pushed_last(two_workers):
    check_versions(two_workers, first=1)


def test_versions_go_on_from_the_first_one(one_worker):
    check_versions(one_worker, first=8)


def test_bytes_per_transition(one_worker):
    """380 or less, of all that crosses the process boundary; the plain TorchRL rollout 15 times as much."""
    batch = one_worker.batches[0]
    compact = one_worker.worker_bytes / batch["steps"].numel()
    assert one_worker.worker_bytes == bytes_of(batch)
    plain = Collector(
        partial(make_random_env, 16, num_obs=60, num_actions=8, num_steps=96),
        make_plain_policy(num_obs=60, num_actions=8, hidden_size=256),
        frames_per_batch=16 * 32,
        storing_device="cpu",
        device="cpu",
        use_buffers=True,
        auto_register_policy_transforms=True,
    )
    plain_batch = next(iter(plain))
    plain_bytes = storage_bytes(plain_batch) / plain_batch.numel()
    print(f"bytes a transition: {compact:.1f}, plain {plain_bytes:.1f}")
    assert compact <= 380
    assert plain_bytes > 15 * compact


def make_uneven_env(num_envs: int, seed: int):
    """The second worker is much slower."""
    return make_random_env(num_envs, seed, end_rate=0.2, delay_s=0.04 * (seed % 2))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_workers", [1, 2])
def test_async_batches(num_workers, backend):
    """One worker, one version and one set of weights a batch; bounded staleness; no rollout thrown away."""
    run = collect(
        10,
        env=make_uneven_env,
        pauses=(3, 6),
        num_envs=4 * num_workers,
        rollout_steps=T,
        num_collectors=num_workers,
        async_collection=True,
        seed=4,
        backend=backend,
    )
    staleness = []
    for iteration, (version, batch) in enumerate(zip(run.versions, run.batches)):
        worker, window = iteration % num_workers, iteration // num_workers
        assert (batch["worker"] == worker).all()
        seeds, envs, steps = (part.T for part in origin(batch["steps", "policy"]))
        assert (seeds == 4 + worker).all() and (envs == torch.arange(4)).all()
        assert (steps == window * T + torch.arange(T)[:, None]).all()
        (tag,) = batch["steps", "policy_version"].unique().tolist()
        assert log_prob_error(batch, run.models[tag]) < 1e-4
        assert all(log_prob_error(batch, models) > 1e-2 for v, models in run.models.items() if v != tag)
        staleness.append(version - tag)
    assert min(staleness) >= 0 and max(staleness) <= num_workers, staleness
    assert staleness[-num_workers:] == [num_workers] * num_workers  # it is asynchronous


# --- TorchRL's private hooks ------------------------------------------------------------------------

# Where a digest differs, TorchRL has changed what collectors.py and rollout.py rely on: read it again.
HOOKS = {
    Collector._init_policy: "899c21e60f38",
    Collector._maybe_make_final_rollout: "30dc0b988973",
    Collector._make_carrier: "b7c052159e39",
    Collector._postproc: "548da8cd47ba",
    Collector.rollout: "350d5f2493ee",
    Collector.iterator: "3be80086e7d9",
    Collector.update_policy_weights_: "84657ca13c43",
    MultiCollector._run_processes: "4315a7f888d6",
    MultiCollector._recv_and_check: "b58912d9010b",
    MultiSyncCollector.iterator: "8191c61f289c",
    MultiAsyncCollector.iterator: "d421c517e152",
    MultiAsyncCollector._get_from_queue: "aaa665f8694b",
    MultiAsyncCollector._queue_len.fget: "d4c788a0c9e0",
    MultiProcessWeightSyncScheme._background_receive_loop: "7ecf0b297c63",
    MultiProcessWeightSyncScheme.send: "e0e99078740f",
}


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__qualname__)
def test_torchrl_has_not_changed_what_is_overridden(hook):
    source = inspect.getsource(inspect.unwrap(hook))
    assert hashlib.sha256(source.encode()).hexdigest()[:12] == HOOKS[hook]


def test_only_the_pinned_private_hooks_are_overridden():
    pinned = {hook.__name__ for hook in HOOKS}
    for ours in (RolloutCollector, collectors.SyncCollector, collectors.AsyncCollector, collectors._LearnerSide):
        for name in vars(ours):
            theirs = [base for base in (Collector, MultiSyncCollector, MultiAsyncCollector) if hasattr(base, name)]
            if name.startswith("_") and not name.startswith("__") and name != "_abc_impl" and theirs:
                assert name in pinned, f"{ours.__name__}.{name}"
    assert rollout.RolloutCollector is collectors.RolloutCollector


# --- devices, and workers that Ray places -----------------------------------------------------------


def make_env_that_tells_its_device(num_envs: int, seed: int, device: str):
    env = make_random_env(num_envs, seed, device=device)
    env.base_env.told = device
    return env


@pytest.mark.parametrize("async_collection", [False, True])
def test_every_worker_has_its_device(async_collection):
    collector = make_collector(
        create_env_fn=make_env_that_tells_its_device,
        make_policy=make_test_policy,
        num_envs=4,
        rollout_steps=T,
        num_collectors=2,
        collector_devices=["cpu:0", "cpu"],
        async_collection=async_collection,
    )
    try:
        assert collector.getattr_env("told") == "cpu:0"
        assert list(map(str, collector.env_device)) == list(map(str, collector.policy_device)) == ["cpu:0", "cpu"]
    finally:
        collector.shutdown()
    with pytest.raises(ValueError, match="--collector-devices: 1 devices for 2 collectors"):
        make_collector(
            create_env_fn=make_env_that_tells_its_device,
            make_policy=make_test_policy,
            num_envs=4,
            rollout_steps=T,
            num_collectors=2,
            collector_devices=["cpu"],
        )


def make_env_that_refuses(num_envs: int, seed: int):
    raise ValueError("--task Nothing: there is none.")


@pytest.mark.slow
@needs_ray
def test_what_the_env_refuses_comes_back_from_ray_as_it_was():
    import ray

    with pytest.raises(ValueError, match=r"^--task Nothing: there is none\.$"):
        make_collector(
            create_env_fn=make_env_that_refuses,
            make_policy=make_test_policy,
            num_envs=4,
            rollout_steps=T,
            backend="ray",
        )
    assert not ray.is_initialized()


def make_env_that_dies_at_once(num_envs: int, seed: int):
    os._exit(1)


def test_a_worker_that_dies_while_it_starts_is_a_fault_and_no_bug():
    with pytest.raises(collectors.WorkerFault, match="a worker died while it started"):
        make_collector(
            create_env_fn=make_env_that_dies_at_once, make_policy=make_test_policy, num_envs=4, rollout_steps=T
        )


def make_env_that_dies(num_envs: int, seed: int):
    env = make_random_env(num_envs, seed)
    step = env.base_env._step
    env.base_env._step = lambda tensordict: os._exit(1) if seed == 0 and env.base_env.k == T + 1 else step(tensordict)
    return env


@pytest.mark.slow
@needs_ray
def test_a_dead_worker_of_ray_is_started_again():
    import ray

    start = partial(
        make_collector,
        create_env_fn=make_env_that_dies,
        make_policy=make_test_policy,
        num_envs=4,
        rollout_steps=T,
        backend="ray",
    )
    collector = RestartingCollector(start, seed=0, max_restarts=1, first_version=0)
    try:
        models = make_test_models(**{key: collector.getattr_env(key) for key in ("observation_spec", "action_spec")})
        batches = [collector.collect(models.collector_policy) for _ in range(3)]
    finally:
        collector.shutdown()
    assert collector.num_restarts == 1
    assert [int(batch["steps", "policy_version"].max()) for batch in batches] == [1, 2, 3]
    assert not ray.is_initialized()


@pytest.mark.slow
@needs_ray
def test_ray_leaves_signals_to_the_learner():
    collector = None
    try:
        with pytest.raises(Interrupted), interruptible():
            collector = make_collector(
                create_env_fn=make_random_env, make_policy=make_test_policy, num_envs=4, rollout_steps=T, backend="ray"
            )
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
    finally:
        if collector is not None:
            collector.shutdown()
