#!/usr/bin/env bash
# Time to a return of 4.5 on Isaac-Cartpole beside rsl_rl: benchmarks/results/training.json, ten minutes. On a machine of one's own: --threads 2.
set -euo pipefail
cd "$(dirname "$0")/.."
uv sync --quiet
OMP_NUM_THREADS=1 uv run --no-sync python benchmarks/training.py run rsl_rl ours ours-async --seeds 3 4 5 --threads 1 --iterations 45 --output benchmarks/results/training.json
