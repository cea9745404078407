#!/usr/bin/env bash
# One node's part of a run on several nodes. Start it on every node with the same variables and the same flags.
#
#   RDZV_ENDPOINT=HOST:PORT NNODES=N [NPROC=N] [RDZV_ID=NAME] bash launch/multinode.sh [flags for the run ...]
#
#   RDZV_ENDPOINT  one of the nodes, and a port that is free there; the same on every node
#   NNODES         number of nodes; under Slurm that of the job if unset
#   NPROC          processes on each node: one per GPU if unset, or 1 where there is no GPU
#   RDZV_ID        name of the run among those that meet at this endpoint; under Slurm the job's number if unset
#
# Under Slurm, one task per node (launch/slurm/several_nodes.sbatch does this and more):
#
#   export RDZV_ENDPOINT="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):29500"
#   srun --ntasks-per-node 1 bash launch/multinode.sh -m MODEL -d train.jsonl ...
#
# Where a node's name does not resolve to an address that the others reach, torchrun must be told: PET_LOCAL_ADDR (its
# --local-addr) on every node, and PET_RDZV_CONF=is_host=1 on the one of RDZV_ENDPOINT, is_host=0 on the others. Gloo and
# NCCL use the interface on the way there, unless GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is set.
#
# The folders of the run (-sd, -esd, -rsd, --log-dir), the model and the data must be on a file system that all nodes see.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

: "${RDZV_ENDPOINT:?is not set; HOST:PORT of one of the nodes, the same on every node}"
nodes="${NNODES:-${SLURM_NNODES:-}}"
: "${nodes:?NNODES is not set; the number of nodes}"

torchrun="$(torchrun_path)"
exec "$torchrun" --signals-to-handle "$SIGNALS" --nnodes "$nodes" --nproc-per-node "${NPROC:-$(count_gpus 1)}" \
    --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "${RDZV_ID:-${SLURM_JOB_ID:-zbgrpo}}" \
    -m zbgrpo.launch "$@"
