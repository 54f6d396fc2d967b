#!/usr/bin/env bash
# Installs this suite with everything it needs into a folder, checks the machine, and trains for two iterations.
#
#   install.sh [--isaacsim] [--skip-run] [--device auto|cpu|cuda] [TARGET]
#
# TARGET (default: the current folder) gets venv/ (about 7.5 GB), and runs/ from the short run. Needs Python 3.12 with
# headers, and either uv or pip; no root, and no ensurepip. The Dockerfile and the Apptainer definition call it too.
set -euo pipefail

UV_VERSION=0.13.9
ISAACLAB_VERSION=3.0.0
SOURCE=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

isaacsim=0
short_run=1
device=auto
target=$PWD
while [ $# -gt 0 ]; do
    case $1 in
        --isaacsim) isaacsim=1 ;;
        --skip-run) short_run=0 ;;
        --device) device=${2:?--device needs a value}; shift ;;
        -h | --help) sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        -*) echo "install.sh: unknown option $1" >&2; exit 2 ;;
        *) target=$1 ;;
    esac
    shift
done
mkdir -p "$target"
target=$(cd "$target" && pwd)

step() { printf '\n== %s\n' "$*"; }

step "Python 3.12"
python=
for candidate in "${PYTHON:-python3.12}" python3 python; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then
        python=$(command -v "$candidate")
        break
    fi
done
if [ -z "$python" ]; then
    echo "install.sh: no Python 3.12 found; Isaac Lab $ISAACLAB_VERSION has wheels for no other. Set PYTHON=/path/to/python3.12" >&2
    exit 1
fi
"$python" --version

step "uv"
if uv=$(command -v uv) && "$uv" --version; then
    :
else
    # Beside the environment and not in it: a venv would need ensurepip, and some CUDA images ship Python without.
    "$python" -m pip install --quiet --target "$target/uv" "uv==$UV_VERSION"
    uv=$target/uv/bin/uv
    "$uv" --version
fi

step "environment"
"$uv" venv --quiet --clear --python "$python" "$target/venv"
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
"$python" - "$SOURCE/pyproject.toml" >"$constraints" <<'PYTHON'
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["tool"]["uv"]["constraint-dependencies"], sep="\n")
PYTHON
packages=("$SOURCE")
if [ "$isaacsim" = 1 ]; then
    # Isaac Sim comes from NVIDIA's own package index: name it in UV_EXTRA_INDEX_URL.
    packages+=("isaaclab[isaacsim]==$ISAACLAB_VERSION")
fi
"$uv" pip install --python "$target/venv/bin/python" --constraint "$constraints" "${packages[@]}"

step "preflight"
cd "$target"
"$target/venv/bin/python" -m isaaclab_rnn_ppo.preflight --device "$device"

if [ "$short_run" = 1 ]; then
    step "two iterations of Isaac-Cartpole"
    "$target/venv/bin/python" -m isaaclab_rnn_ppo.train --task Isaac-Cartpole --num-envs 32 --iterations 2 \
        --log-dir "$target/runs"
fi

step "done: $target/venv/bin/python -m isaaclab_rnn_ppo.train --help"
