#!/usr/bin/env bash
# Frames and time to a return, beside rsl_rl: benchmarks/results/training.json, ten minutes for Isaac-Cartpole and forty for Recall. On a machine of one's own: --threads 2.
set -euo pipefail
cd "$(dirname "$0")/.."
uv sync --quiet
OMP_NUM_THREADS=1 uv run --no-sync python benchmarks/training.py run rsl_rl ours ours-async --seeds 3 4 5 --threads 1 --iterations 45 --output benchmarks/results/training.json
OMP_NUM_THREADS=1 uv run --no-sync python benchmarks/training.py run rsl_rl ours --task Isaac-Cartpole-Recall --steps 64 --seeds 0 1 2 --threads 1 --iterations 110 --output benchmarks/results/training.json
