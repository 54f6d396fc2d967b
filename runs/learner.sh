#!/usr/bin/env bash
# A learning phase beside the other libraries: benchmarks/results/learner.json. On a machine of one's own: --threads 2 --clock wall --envs 64 512.
set -euo pipefail
cd "$(dirname "$0")/.."
uv sync --quiet --group peers
export PYTHONPATH=tests OMP_NUM_THREADS=1
uv run --no-sync python benchmarks/learner.py --envs 64 --lstms 1 --threads 1 --clock cpu --rounds 7 --output benchmarks/results/learner.json
uv run --no-sync python benchmarks/learner.py --envs 64 --lstms 2 --threads 1 --clock cpu --rounds 12 --output benchmarks/results/learner.json
