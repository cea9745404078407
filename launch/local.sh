#!/usr/bin/env bash
# A run on this machine.
#
#   [NPROC=N] bash launch/local.sh [flags for the run ...]
#
# NPROC is the number of processes: one per GPU if unset, or 2 where there is no GPU. Paths in the flags are relative to
# the current folder. The rendezvous takes a free port, so several runs may share a machine.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

torchrun="$(torchrun_path)"
exec "$torchrun" --signals-to-handle "$SIGNALS" --standalone --nproc-per-node "${NPROC:-$(count_gpus 2)}" -m zbgrpo.launch "$@"
