#!/usr/bin/env bash
# Errors of the advantages of each library: benchmarks/results/bootstrap.json, a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
uv sync --quiet --group peers
PYTHONPATH=tests OMP_NUM_THREADS=1 uv run --no-sync python benchmarks/bootstrap.py --output benchmarks/results/bootstrap.json
