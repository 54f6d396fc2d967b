#!/usr/bin/env bash
# A learning phase beside the other libraries: benchmarks/results/learner.json, about 8 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
uv sync --quiet --group peers
PYTHONPATH=tests OMP_NUM_THREADS=2 uv run --no-sync python benchmarks/learner.py --envs 64 512 --rounds 11 --output benchmarks/results/learner.json
