#!/usr/bin/env bash
# One training run, as srun starts it: seed, folder, caches and resume for this task of the job; with RANKS one node's
# part of the job's only run. Arguments go to train.py.
#   PYTHON    what runs Python (default: python); may be several words: "apptainer exec --nv image.sif python"
#   RUNS      where runs go; must survive a requeue, so on a shared file system (default: runs)
#   CACHES    folder on the node's own disk for compiled kernels (default: TMPDIR, else /tmp)
#   SEED      seed of the first task (default: 0)
#   RANKS     data-parallel ranks that torchrun starts on this node (default: none, and every task is a run of its own)
#   HEAD      with RANKS: host:port where the nodes meet; several_nodes.sbatch sets it
#   RESTARTS  with RANKS: how often torchrun starts all ranks again when one dies (default: 3)
set -euo pipefail

read -ra python <<<"${PYTHON:-python}"
seed=${SEED:-0}
launch=(-m)
if [ -n "${RANKS:-}" ]; then
    launch=(-m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node "$RANKS" --rdzv-backend c10d
        --rdzv-endpoint "$HEAD" --rdzv-id "$SLURM_JOB_ID" --max-restarts "${RESTARTS:-3}" -m)
    # A store for each start of the ranks: in the shared one a restarted rank finds addresses of those that died.
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((SLURM_CPUS_PER_TASK / RANKS))}
else
    seed=$((seed + SLURM_PROCID))
fi
runs=${RUNS:-runs}/$SLURM_JOB_ID/seed_$seed
caches=${CACHES:-${TMPDIR:-/tmp}}/rnn-ppo-$(id -u)
export TORCHINDUCTOR_CACHE_DIR=$caches/inductor TRITON_CACHE_DIR=$caches/triton WARP_CACHE_PATH=$caches/warp
mkdir -p "$caches"

# A requeued job keeps its id: go on where its newest checkpoint is.
newest=$(find "$runs" -name 'iteration_*.pt' -printf '%T@ %p\n' 2>/dev/null | sort -n | tail -n 1 | cut -d ' ' -f 2-) || true
resume=()
if [ -n "$newest" ]; then
    resume=(--resume "$(dirname "$(dirname "$newest")")")
fi
exec "${python[@]}" "${launch[@]}" isaaclab_rnn_ppo.train --seed "$seed" --log-dir "$runs" "${resume[@]}" "$@"
