"""A learning phase, this suite's beside the other libraries'.

    uv sync --group peers
    PYTHONPATH=tests python benchmarks/learner.py --envs 64 512 --output benchmarks/results/learner.json

A phase turns a stored rollout into advantages and makes 3 epochs of 4 minibatches; observations 60, actions 8,
embedding 256, H 256, T 32, 3 % of the steps end an episode. `peers.py` says how each library is built. `plain` is plain
nn.LSTM in torch without resets (`learner_phase.py`), with as many LSTMs as the contestant has: one shared by actor and
critic, or two, in rsl_rl's layout (the layer of 256 behind each LSTM). Contestants take turns in one process;
`learner_phase.py` has the rule that drops loaded rounds.

Results are added to the output, and replace those of the same sizes and clock.

`lstm passes` are forward steps through an LSTM in a phase, padding included, in units of N x T, counted by hooks: 3
epochs make 3, and advantages from fresh values one more. The others store values while they collect, so their passes
for the advantages belong to the collection and are not timed here.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version
from pathlib import Path

import matplotlib
import torch
from learner_phase import ACT, OBS, Plain, interleaved, plain_batch, synthetic_rollout
from machine import environment
from peers import CONTESTANTS, PACKAGES, count_lstm_steps, make_window, random_ends

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def measure(
    names: list[str], *, num_lstms: int, num_envs: int, num_steps: int, hidden: int, rounds: int, clock: str
) -> dict:
    """Time the contestants that have so many LSTMs."""
    plain = Plain(hidden, separate=num_lstms == 2)
    tensors = plain_batch(synthetic_rollout(num_envs, num_steps, hidden))
    window = make_window(random_ends(num_envs, num_steps), num_obs=OBS)
    calls, passes = {"plain": lambda: plain.phase(tensors)}, {}
    for name in names:
        contestant = CONTESTANTS[name](num_envs, num_steps, OBS, ACT, hidden)
        contestant.collect(window)
        passes[name] = round(count_lstm_steps(contestant), 2)
        for _ in range(rounds):
            contestant.prepare()
        calls[name] = contestant.learn
    calls["plain"]()  # a first time, which the contestants have had
    figures = interleaved(calls, reference="plain", rounds=rounds, clock=clock)
    figures["samples_per_s"] = {
        name: round(1e3 * num_envs * num_steps / ms) for name, ms in figures.get("ms", {}).items()
    }
    sizes = {"num_lstms": num_lstms, "num_envs": num_envs, "num_steps": num_steps, "hidden": hidden}
    return {**sizes, **figures, "lstm_passes": passes}


def table(results: list[dict]) -> str:
    rows = [
        "| LSTMs | N | | samples/s | x plain | range | LSTM passes | bootstrap inside a window |",
        "|--|--|--|--|--|--|--|--|",
    ]
    for result in results:
        for name, ratio in result.get("ratios", {}).items():
            of = CONTESTANTS.get(name)
            rows.append(
                f"| {result['num_lstms']} | {result['num_envs']} | {name} | {result['samples_per_s'][name]:,} | "
                f"{ratio['median']:.2f} | {ratio['min']:.2f}-{ratio['max']:.2f} | "
                f"{result['lstm_passes'].get(name, '')} | {of.bootstraps if of else 'none'} |"
            )
    return "\n".join(rows)


def draw(results: list[dict], path: Path) -> None:
    """Bars of samples a second, a panel for each number of envs."""
    sizes = sorted({result["num_envs"] for result in results})
    figure, axes = plt.subplots(1, len(sizes), figsize=(5.5 * len(sizes), 3.2), squeeze=False)
    for axis, num_envs in zip(axes[0], sizes, strict=True):
        bars = [
            (f"{name} ({result['num_lstms']} LSTM)" if name == "plain" else name, speed, name)
            for result in results
            if result["num_envs"] == num_envs
            for name, speed in result["samples_per_s"].items()
        ]
        colours = {"plain": "#999999", "ours": "#2a7ab9", "ours, 2 LSTMs": "#2a7ab9"}
        axis.barh(
            [bar[0] for bar in bars], [bar[1] for bar in bars], color=[colours.get(b[2], "#c8803c") for b in bars]
        )
        axis.invert_yaxis()
        axis.set_title(f"{num_envs} envs x {results[0]['num_steps']} steps", fontsize=10)
        axis.set_xlabel("samples/s of a learning phase")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, nargs="+", default=[64], help="envs N")
    parser.add_argument("--steps", type=int, default=32, help="window length T, steps")
    parser.add_argument("--hidden", type=int, default=256, help="hidden and embedding units H")
    parser.add_argument("--lstms", type=int, nargs="+", choices=[1, 2], default=[1, 2], help="contestants by LSTMs")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: processor time, for one thread")
    parser.add_argument("--output", type=Path, help="JSON file for the results; the picture goes beside it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    versions = {package: version(package) for package in sorted(PACKAGES)}
    document = {"environment": environment() | versions, "results": []}
    if args.output and args.output.exists():
        document["results"] = json.loads(args.output.read_text())["results"]
    for num_envs in args.envs:
        for num_lstms in args.lstms:
            names = [name for name in args.contestants if CONTESTANTS[name].num_lstms == num_lstms]
            sizes = {"num_lstms": num_lstms, "num_envs": num_envs, "num_steps": args.steps, "hidden": args.hidden}
            new = measure(names, **sizes, rounds=args.rounds, clock=args.clock)
            print(json.dumps(new), flush=True)
            key = {**sizes, "clock": args.clock}
            others = [old for old in document["results"] if not key.items() <= old.items()]
            document["results"] = sorted([*others, new], key=lambda result: (result["num_envs"], result["num_lstms"]))
            if args.output:
                args.output.write_text(json.dumps(document, indent=1) + "\n")
    print(table(document["results"]))
    if args.output:
        draw([result for result in document["results"] if result["samples_per_s"]], args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
