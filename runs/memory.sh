#!/usr/bin/env bash
# Bytes a transition of each library, and the peak of a learning phase: benchmarks/results/memory.json, two minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
uv sync --quiet --group peers
PYTHONPATH=tests OMP_NUM_THREADS=1 uv run --no-sync python benchmarks/memory.py --peak --output benchmarks/results/memory.json
