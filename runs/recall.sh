#!/usr/bin/env bash
# Does memory matter, and is it found: benchmarks/results/recall.csv, recall_runs.csv and recall.png. An hour for the nine runs.
set -euo pipefail
cd "$(dirname "$0")/.."
uv sync --quiet
OMP_NUM_THREADS=1 uv run --no-sync python benchmarks/recall.py run --seeds 0 1 2
uv run --no-sync python benchmarks/recall.py plot
