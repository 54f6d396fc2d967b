#!/usr/bin/env bash
# Time to a return of 4.5 on Isaac-Cartpole beside rsl_rl: benchmarks/results/training.json, about 10 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
OMP_NUM_THREADS=2 uv run python benchmarks/training.py run rsl_rl ours ours-async --seeds 0 1 2 --iterations 60 --output benchmarks/results/training.json
