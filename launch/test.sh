#!/usr/bin/env bash
# Checks and tests.
#
#   bash launch/test.sh [--fast | --all] [arguments for pytest ...]
#
#   (nothing)  format, lint, types, and every test
#   --fast     without the tests that are marked slow
#   --all      also the tiers in `further_tiers`
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
        *) break ;;
        esac
    done
    [ "$tier" != fast ] || select=(-m "not slow")

    prepare_environment dev
    stay_offline
    cd "$REPOSITORY"
    check
    [ "$tier" != all ] || further_tiers
    "$VENV/bin/python" -m pytest tests ${select[@]+"${select[@]}"} "$@"
}

check() {
    "$VENV/bin/ruff" format --check --quiet zbgrpo tests setup.py ||
        fail "not formatted; $VENV/bin/ruff format zbgrpo tests setup.py does it"
    "$VENV/bin/ruff" check --quiet zbgrpo tests setup.py
    "$VENV/bin/mypy" zbgrpo
}

# What takes longer than a test should, one command a line. A tier that fails ends the script.
further_tiers() {
    : # none yet
}

main "$@"
