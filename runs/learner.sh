#!/usr/bin/env bash
# A learning phase beside the other libraries: benchmarks/results/learner.json, fifteen minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
uv sync --quiet --group peers
export PYTHONPATH=tests OMP_NUM_THREADS=2
uv run --no-sync python benchmarks/learner.py --envs 64 --lstms 1 --rounds 18 --output benchmarks/results/learner.json
uv run --no-sync python benchmarks/learner.py --envs 64 --lstms 2 --rounds 24 --output benchmarks/results/learner.json
uv run --no-sync python benchmarks/learner.py --envs 512 --rounds 7 --output benchmarks/results/learner.json
