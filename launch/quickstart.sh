#!/usr/bin/env bash
# The quickstart: make a small model and an arithmetic task, train it with GRPO on two processes, show the result.
#
#   bash launch/quickstart.sh [--seed N] [flags for the run ...]
#
# Works from any folder, on a CPU, without any download of a model or data. Everything is written to quickstart/.
# Flags given here come last and so win over the quickstart's own: --max-steps 20, -lr 5e-4, -a DAPO, -t 2 -zero 3 ... A
# run that was stopped goes on with --resume auto; without, everything is made anew. --dry-run shows the plan and trains
# nothing.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/install.sh"

main() {
    local seed=0 dry_run="" flags=() defaults=() num_ranks
    while [ $# -gt 0 ]; do
        case "$1" in
        --seed)
            [ $# -gt 1 ] || fail "--seed needs a number"
            seed="$2"
            shift 2
            ;;
        --seed=*) seed="${1#--seed=}" && shift ;;
        -h | --help)
            sed -n '2,/^[^#]/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
            echo "All flags: $VENV/bin/python -m zbgrpo.launch --help, once this has installed it."
            return
            ;;
        --dry-run) dry_run=yes && flags+=("$1") && shift ;;
        *) flags+=("$1") && shift ;;
        esac
    done
    [[ "$seed" =~ ^[0-9]+$ ]] || fail "--seed needs a number, not '$seed'"

    prepare_environment tensorboard
    stay_offline
    cd "$REPOSITORY"
    mapfile -t defaults < <("$VENV/bin/python" -c "$PRINT_FLAGS")
    [ ${#defaults[@]} -gt 0 ] || fail "the flags of the quickstart could not be read"
    flags=(-m quickstart/model -d quickstart/train.jsonl -ed '{"heldout": "quickstart/heldout.jsonl"}'
        -t 1 -i 1 -p quickstart --resume never --seed "$seed"
        -sd quickstart/model_out -esd quickstart/eval -rsd quickstart/rollouts --log-dir quickstart/logs
        "${defaults[@]}" ${flags[@]+"${flags[@]}"})
    num_ranks="$("$VENV/bin/python" -c "$CHECK_FLAGS" "${flags[@]}")" || exit 2
    SECONDS=0
    "$VENV/bin/python" -m zbgrpo.bench.quickstart quickstart --seed "$seed"
    local made_seconds="$SECONDS"
    if [ -n "$dry_run" ]; then
        "$VENV/bin/python" -m zbgrpo.launch "${flags[@]}"
        return
    fi
    "$VENV/bin/torchrun" --signals-to-handle "$SIGNALS" --standalone --nproc-per-node "$num_ranks" \
        -m zbgrpo.launch "${flags[@]}"
    echo "quickstart: ${SECONDS} s (task and model ${made_seconds} s, run $((SECONDS - made_seconds)) s)"
    local bin="${VENV#"$REPOSITORY/"}/bin"
    cat <<END
quickstart: the trained model is in quickstart/model_out/quickstart, the figures of every step in
            quickstart/logs/quickstart/metrics.jsonl. What to do next, in $REPOSITORY:
              $bin/zbgrpo rollouts quickstart/rollouts/quickstart/step-0.jsonl    # read responses
              $bin/zbgrpo check-ledger quickstart/logs/quickstart                 # what became of each group
              $bin/zbgrpo report quickstart/logs/quickstart                       # all of it as one HTML page
              bash launch/quickstart.sh -a DAPO    # another algorithm
            Your own model and data: README.md
END
}

PRINT_FLAGS='
from zbgrpo.bench.quickstart import RUN_FLAGS
print("\n".join(RUN_FLAGS))
'

# Before the model is made, so that a mistake costs no time. Prints how many processes the roles need.
CHECK_FLAGS='
import sys
from zbgrpo.config.load import load_config
from zbgrpo.errors import UserError
try:
    print(load_config(sys.argv[1:]).config.world_size)
except UserError as error:
    sys.exit(f"zbgrpo: {error}")
'

main "$@"
