#!/usr/bin/env bash
# Bytes a transition of each library: benchmarks/results/memory.json, two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
uv sync --quiet --group peers
PYTHONPATH=tests OMP_NUM_THREADS=1 uv run --no-sync python benchmarks/memory.py --output benchmarks/results/memory.json
