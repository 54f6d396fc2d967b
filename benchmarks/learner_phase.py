"""The learning phase against the same phase on a plain, shared nn.LSTM.

    python benchmarks/learner_phase.py time --envs 64 512 --output benchmarks/results/learner_phase.json
    python benchmarks/learner_phase.py time --envs 512 --reference eager --contestants bf16
    python benchmarks/learner_phase.py memory --envs 4096

A phase is the advantages of one rollout and 3 epochs of 4 minibatches; observations 60, actions 8, embedding 256,
H 256, T 32. `plain` is hand-written in torch: one nn.LSTM without resets under the same embedding and heads, a loop for
the advantages, the same losses, clipping and fused Adam, indices instead of tensordicts. `eager`, `bf16` (--amp bf16)
and the modes of --compile are what train.py runs.

`time` interleaves the contestants: a round runs the reference, a contestant, the reference, the next contestant, and so
on; a contestant's figure is the median over rounds of its ratio to the mean of the times of the reference right before
and after it. A round is dropped for a contestant, as loaded, when those two differ by more than 10 % or their mean
exceeds the best by more than 20 %. `--clock cpu` counts processor time instead of wall time: for one thread on a
machine that others use.
`memory` measures one phase in a fresh process each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from isaaclab_rnn_ppo.utils.advantages import make_advantage
from isaaclab_rnn_ppo.utils.losses import make_loss
from isaaclab_rnn_ppo.utils.models import make_models
from isaaclab_rnn_ppo.utils.rnn_unroll import unrolling_pays
from isaaclab_rnn_ppo.utils.schedules import make_optimizer
from isaaclab_rnn_ppo.utils.update import COMPILE_MODES, accelerate, make_update, minibatches
from machine import added_peak_bytes, environment
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torchrl.data import Composite, Unbounded

OBS, ACT, EPOCHS, MINIBATCHES = 60, 8, 3, 4
GAMMA, LAMBDA, CLIP, ENTROPY, LR = 0.99, 0.95, 0.2, 0.005, 3e-4
CONTESTANTS = ("plain", "eager", "bf16", *COMPILE_MODES)


def synthetic_rollout(
    num_envs: int, num_steps: int, hidden: int, *, reset_rate: float = 0.03, seed: int = 0, device: str = "cpu"
) -> TensorDictBase:
    """A batch as `utils/rollout.py` describes it: normal numbers, every other episode end a time-out."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    done = torch.rand(num_envs, num_steps, 1, generator=generator) < reset_rate
    first = torch.rand(num_envs, 1, 1, generator=generator) < reset_rate
    steps = {
        "policy": normal(num_envs, num_steps, OBS),
        "action": normal(num_envs, num_steps, ACT),
        "action_log_prob": normal(num_envs, num_steps) * 0.1 - 1.4 * ACT,
        "is_init": torch.cat([first, done[:, :-1]], 1),
        "policy_version": torch.zeros(num_envs, num_steps, dtype=torch.int64),
        "next": {"reward": normal(num_envs, num_steps, 1), "done": done, "terminated": done & (normal(done.shape) > 0)},
    }
    final = {
        "policy": normal(num_envs, 2, OBS),
        "time": torch.full((num_envs, 2), num_steps - 1),
        "valid": torch.tensor([False, True]).expand(num_envs, 2),
    }
    state = {f"recurrent_state_{part}": normal(num_envs, 1, hidden) * 0.1 for part in "hc"}
    return TensorDict(
        {
            "steps": TensorDict(steps, [num_envs, num_steps]),
            "initial": TensorDict(state, [num_envs]),
            "final": TensorDict(final, [num_envs, 2]),
        },
        [num_envs],
    ).to(device)


class Ours:
    """Advantages and update as train.py wires them, with the recurrent backend that it chooses."""

    def __init__(
        self,
        hidden: int,
        *,
        num_steps: int,
        compile_mode: str | None = None,
        backend: str = "auto",
        device: str = "cpu",
        amp: str = "none",
        **acceleration,
    ):
        torch.manual_seed(0)
        if backend == "auto" and unrolling_pays(
            compile_mode=compile_mode, device=device, cell="lstm", num_steps=num_steps
        ):
            backend = "unroll"
        models = make_models(
            observation_spec=Composite(policy=Unbounded((1, OBS)), shape=[1]),
            action_spec=Unbounded((1, ACT)),
            hidden_size=hidden,
            embedding=(hidden,),
            rnn_backend=backend,
            amp=amp,
            device=device,
        )
        loss_module = make_loss(actor=models.actor, value_head=models.value_head, entropy_coeff=ENTROPY)
        self.parameters = list(loss_module.parameters())
        fullgraph = acceleration.get("fullgraph", True)
        self.advantage = accelerate(
            make_advantage(value_operator=models.value_operator, gamma=GAMMA, gae_lambda=LAMBDA),
            compile_mode=compile_mode,
            fullgraph=fullgraph,
        )
        self.update = make_update(
            loss_module=loss_module,
            optimizer=make_optimizer(self.parameters, LR),
            compile_mode=compile_mode,
            **acceleration,
        )

    def phase(self, batch: TensorDictBase) -> None:
        training = self.advantage(batch)
        for _ in range(EPOCHS):
            for env_ids in minibatches(len(training), MINIBATCHES, training.device):
                self.update(training[env_ids])


class Plain(nn.Module):
    """The same phase in plain torch, without resets and without bootstraps inside the window.

    With ``separate`` the critic has an LSTM of its own, and the layer of ``hidden`` units stands behind each LSTM
    instead of before it: rsl_rl's layout.
    """

    def __init__(self, hidden: int, *, separate: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.separate = separate
        if separate:
            self.lstm, self.critic_lstm = (nn.LSTM(OBS, hidden, batch_first=True) for _ in range(2))
            self.layer, self.critic_layer = (nn.Sequential(nn.Linear(hidden, hidden), nn.ELU()) for _ in range(2))
        else:
            self.embedding = nn.Sequential(nn.Linear(OBS, hidden), nn.ELU())
            self.lstm = nn.LSTM(hidden, hidden, batch_first=True)
        self.mean, self.value = nn.Linear(hidden, ACT), nn.Linear(hidden, 1)
        self.log_std = nn.Parameter(torch.zeros(ACT))
        self.optimizer = torch.optim.Adam(self.parameters(), lr=LR, fused=True)

    def features(self, obs: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return self.layer(self.lstm(obs, state)[0]) if self.separate else self.lstm(self.embedding(obs), state)[0]

    def critic_features(self, obs: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        return self.critic_layer(self.critic_lstm(obs, state)[0]) if self.separate else self.features(obs, state)

    def phase(self, batch: dict[str, Tensor]) -> None:
        with torch.no_grad():
            obs = torch.cat([batch["obs"], batch["last_obs"]], 1)
            values = self.value(self.critic_features(obs, (batch["h"], batch["c"]))).squeeze(-1)
            going = 1 - batch["terminated"]
            delta = batch["reward"] + GAMMA * going * values[:, 1:] - values[:, :-1]
            factor = GAMMA * LAMBDA * (1 - batch["done"])
            advantage, last = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
            for t in range(delta.shape[1] - 1, -1, -1):
                last = delta[:, t] + factor[:, t] * last
                advantage[:, t] = last
            target = advantage + values[:, :-1]
            advantage = (advantage - advantage.mean()) / advantage.std().clamp(min=1e-4)
        for _ in range(EPOCHS):
            for ids in torch.randperm(len(target), device=target.device).view(MINIBATCHES, -1):
                state = batch["h"][:, ids], batch["c"][:, ids]
                features = self.features(batch["obs"][ids], state)
                dist = torch.distributions.Normal(self.mean(features), self.log_std.exp())
                ratio = (dist.log_prob(batch["action"][ids]).sum(-1) - batch["log_prob"][ids]).exp()
                adv = advantage[ids]
                policy = -torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv).mean()
                of_value = self.critic_features(batch["obs"][ids], state) if self.separate else features
                value = (self.value(of_value).squeeze(-1) - target[ids]).square().mean()
                loss = policy + value - ENTROPY * dist.entropy().sum(-1).mean()
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters(), 1.0)
                self.optimizer.step()


def plain_batch(batch: TensorDictBase) -> dict[str, Tensor]:
    """The tensors of a rollout that `Plain` reads."""
    steps = batch["steps"]
    return {
        "obs": steps["policy"],
        "last_obs": batch["final", "policy"][:, -1:],
        "action": steps["action"],
        "log_prob": steps["action_log_prob"],
        **{key: steps["next", key].squeeze(-1).float() for key in ("reward", "done", "terminated")},
        **{part: batch["initial", f"recurrent_state_{part}"].transpose(0, 1).contiguous() for part in "hc"},
    }


def make_phase(name: str, num_envs: int, num_steps: int, hidden: int, device: str) -> Callable[[], None]:
    batch = synthetic_rollout(num_envs, num_steps, hidden, device=device)
    if name == "plain":
        plain, tensors = Plain(hidden).to(device), plain_batch(batch)
        return lambda: plain.phase(tensors)
    options = {"eager": {}, "bf16": {"amp": "bf16"}}.get(name, {"compile_mode": name})
    ours = Ours(hidden, num_steps=num_steps, device=device, **options)
    return lambda: ours.phase(batch)


def interleaved(calls: dict[str, Callable[[], None]], *, reference: str, rounds: int, clock: str) -> dict:
    """Median per-round ratios to `reference`, by the rule of the module docstring; and milliseconds.

    `rounds_kept` is of the contestant that kept the fewest; one that kept none is missing from the figures.
    """
    read = time.process_time if clock == "cpu" else time.perf_counter

    def seconds(name: str) -> float:
        start = read()
        calls[name]()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return read() - start

    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in calls if name != reference}
    before = seconds(reference)
    for _ in range(rounds):
        for name, of_name in rows.items():
            taken, after = seconds(name), seconds(reference)
            of_name.append((taken, (before + after) / 2, abs(before - after) / min(before, after)))
            before = after
    best = min(mean for of_name in rows.values() for _, mean, _ in of_name)
    kept = {
        name: [(taken, mean) for taken, mean, drift in of_name if drift <= 0.10 and mean <= 1.2 * best]
        for name, of_name in rows.items()
    }
    result = {"clock": clock, "rounds": rounds, "rounds_kept": min(map(len, kept.values()))}
    ratios = {name: sorted(taken / mean for taken, mean in of_name) for name, of_name in kept.items() if of_name}
    if ratios:
        result["ratios"] = {
            name: {"median": round(statistics.median(r), 3), "min": round(r[0], 3), "max": round(r[-1], 3)}
            for name, r in ({reference: [1.0]} | ratios).items()
        }
        means = [mean for of_name in kept.values() for _, mean in of_name]
        result["ms"] = {reference: round(1e3 * statistics.median(means), 2)} | {
            name: round(1e3 * statistics.median(taken for taken, _ in kept[name]), 2) for name in ratios
        }
    return result


def peak_memory(name: str, num_envs: int, num_steps: int, hidden: int, device: str) -> int:
    """Bytes that one phase adds at its peak to a process that has run a small one."""
    make_phase(name, 8, num_steps, hidden, device)()
    call = make_phase(name, num_envs, num_steps, hidden, device)
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before

    return added_peak_bytes(call)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["time", "memory"])
    parser.add_argument("--envs", type=int, nargs="+", default=[64], help="envs N")
    parser.add_argument("--steps", type=int, default=32, help="window length T, steps")
    parser.add_argument("--hidden", type=int, default=256, help="hidden and embedding units H")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=["eager", "default"])
    parser.add_argument("--reference", choices=("plain", "eager"), default="plain", help="what ratios are to")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    results = []
    for num_envs in args.envs:
        sizes = {"num_envs": num_envs, "num_steps": args.steps, "hidden": args.hidden, "device": args.device}
        if args.child:
            print(json.dumps(peak_memory(args.child, **sizes)))
            return
        names = [args.reference, *args.contestants]
        if args.what == "memory":
            flags = ["--envs", str(num_envs), "--steps", str(args.steps), "--hidden", str(args.hidden)]
            flags += ["--device", args.device, "--threads", str(args.threads)]
            peaks = {}
            for name in names:
                command = [sys.executable, __file__, "memory", *flags, "--child", name]
                peaks[name] = int(
                    subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
                )
            figures = {
                "peak_bytes": peaks,
                "ratios": {name: round(p / max(peaks[args.reference], 1), 3) for name, p in peaks.items()},
            }
        else:
            calls = {name: make_phase(name, **sizes) for name in names}
            for call in calls.values():
                call(), call()
            figures = interleaved(calls, reference=args.reference, rounds=args.rounds, clock=args.clock)
        results.append({"what": args.what, **sizes, **figures})
        print(json.dumps(results[-1]), flush=True)
    if args.output:
        args.output.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
