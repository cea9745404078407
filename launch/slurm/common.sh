# Common part of the batch scripts in this folder, to be sourced by them. Slurm 22.05 or newer.
#
#   run_job SRUN_ARGUMENTS ... -- FLAGS ...   the run, as a step of the job; ends the script with the job's exit status
#   rendezvous                                sets FIRST_NODE, SECOND_NODE and RDZV_ENDPOINT for a job of several nodes
#
# When the job has to go (its time is nearly up, or another job is preferred), the run saves its state and the job goes
# back into the queue. The next start goes on from there, since --resume auto is the default. Who asks, and how:
#
#   - `#SBATCH --signal=B:USR1@300`: Slurm sends SIGUSR1 to the batch script 300 seconds before the time limit. The
#     script hands it on to srun, and srun to the processes of the step.
#   - Preemption with a grace time: Slurm sends SIGTERM to the processes of the step, and nothing to the script.
#
# The status of srun does not tell whether the run has failed or was asked to stop: torchrun makes 1 of the ranks' 85.
# So when it is not 0, this decides:
#
#   asked to stop   the script has caught a signal, or the run has written a summary.json in this start that says so
#   new state       `latest` in the folder of the states is not the file that was there when this start began
#
#   | asked to stop | new state | the job                                                                            |
#   |---------------|-----------|------------------------------------------------------------------------------------|
#   | no            |           | has failed                                                                         |
#   | yes           | yes       | goes back into the queue                                                           |
#   | yes           | no        | goes back too, since start-up has nothing to save, but fails when MAX_IDLE_STARTS  |
#   |               |           | starts in a row were like that                                                     |
#
# So a run that fails is not started again, and one that is always cut off before it gets anywhere is given up. A job
# that was cancelled gets SIGTERM too, but is no longer RUNNING for Slurm, and is left alone; so is one that Slurm puts
# back itself: after a failed node (`#SBATCH --requeue`), or a preemption without a grace time.
#
# MAX_IDLE_STARTS  3 if unset; 0 for a job that never goes back
# SRUN_OPTIONS     further options for srun, separated by spaces

source "$ZBGRPO_REPOSITORY/launch/install.sh"

MAX_IDLE_STARTS="${MAX_IDLE_STARTS:-3}"
FIRST_PORT=15000
NUM_PORTS=15000 # they end below those that Linux gives to outgoing connections

# A task of an array is named like this: its number alone may mean the whole array.
JOB="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
JOB="${JOB:-$SLURM_JOB_ID}"
# Two lines for the next start: how many starts in a row were without a new state, and what `latest` was at first.
NOTE="$PWD/.zbgrpo-job-$SLURM_JOB_ID"

STEP="" ASKED=""
# Slurm sends SIGTERM to the step as well, and torchrun would not stand a second one: only SIGUSR1 is handed on.
trap 'ASKED=SIGUSR1; [ -z "$STEP" ] || kill -USR1 "$STEP" 2>/dev/null || true' USR1
trap 'ASKED=SIGTERM' TERM

run_job() {
    local srun_arguments=() idle=0 first summary latest state
    while [ "$1" != -- ]; do srun_arguments+=("$1") && shift; done
    shift
    find_folders "$@"
    summary="$(mark_of "$LOG_FOLDER/summary.json")" latest="$(mark_of "$SAVE_FOLDER/latest")" first="$latest"
    if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -e "$NOTE" ]; then
        { read -r idle && read -r first; } <"$NOTE" || true # cut short, if the node has failed just then
        # With --resume never or --resume FOLDER, this start would throw away what this job has done so far.
        [ "$latest" = "$first" ] || set -- "$@" --resume auto
    fi
    printf "%s\n" "$idle" "$first" >"$NOTE"

    run_step "${srun_arguments[@]}" "$@"

    [ "$STATUS" != 0 ] || leave 0
    if [ -z "$ASKED" ] && [ "$(mark_of "$LOG_FOLDER/summary.json")" != "$summary" ] &&
        grep -q '"exit_reason": "stopped' "$LOG_FOLDER/summary.json"; then
        ASKED="a signal to its ranks"
    fi
    [ -n "$ASKED" ] || leave "$STATUS" "the run has failed; job $JOB does not go back into the queue"
    idle=$((idle + 1))
    [ "$(mark_of "$SAVE_FOLDER/latest")" = "$latest" ] || idle=0
    [ "$idle" -lt "$MAX_IDLE_STARTS" ] ||
        leave "$STATUS" "stopped by $ASKED, the start number $idle without a new state; job $JOB is given up"
    printf "%s\n" "$idle" "$first" >"$NOTE"
    state="$(squeue --noheader --jobs "$JOB" --format %T || true)"
    if [ "$state" = RUNNING ]; then
        echo "zbgrpo: stopped by $ASKED; job $JOB goes back into the queue" >&2
        scontrol requeue "$JOB" || leave "$STATUS" "Slurm refuses to put job $JOB back into the queue"
    else
        echo "zbgrpo: stopped by $ASKED; Slurm has job $JOB as ${state:-gone}, and it is left alone" >&2
    fi
    exit "$STATUS" # Slurm may end this script before
}

# run_step ARGUMENTS_OF_SRUN ...: sets STATUS to that of srun.
run_step() {
    # srun takes this from its own variable only. The ranks divide the cores of their node themselves.
    [ -z "${SLURM_CPUS_PER_TASK-}" ] || export SRUN_CPUS_PER_TASK="${SRUN_CPUS_PER_TASK:-$SLURM_CPUS_PER_TASK}"
    # A node on which the run has ended leaves the others time to save, whatever the site's default, but not for ever.
    # shellcheck disable=SC2086
    srun --label --cpu-bind none --kill-on-bad-exit=0 --wait 1800 ${SRUN_OPTIONS-} "$@" &
    STEP=$!
    [ "$ASKED" != SIGUSR1 ] || kill -USR1 "$STEP" 2>/dev/null || true
    while :; do
        STATUS=0
        wait "$STEP" || STATUS=$?
        # A signal to this script ends `wait` as well, while srun goes on.
        kill -0 "$STEP" 2>/dev/null || break
    done
    STEP=""
}

# The nodes by the names that Slurm lists or, where these mean nothing to the network, by their addresses. The port is
# one of this job's own, since jobs may share a node.
rendezvous() {
    local nodes
    mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    FIRST_NODE="$(address_of "${nodes[0]}")" SECOND_NODE="$(address_of "${nodes[1]:-${nodes[0]}}")"
    RDZV_ENDPOINT="${RDZV_ENDPOINT:-$FIRST_NODE:$((FIRST_PORT + SLURM_JOB_ID % NUM_PORTS))}"
    export FIRST_NODE SECOND_NODE RDZV_ENDPOINT
}

address_of() {
    if getent ahostsv4 "$1" >/dev/null; then
        echo "$1"
    else
        scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'
    fi
}

# find_folders FLAGS ...: sets SAVE_FOLDER and LOG_FOLDER to what the flags, and the files that they name, make them.
find_folders() {
    local python found
    python="$(dirname "$(torchrun_path)")/python"
    found="$(PYTHONPATH="$ZBGRPO_REPOSITORY${PYTHONPATH:+:$PYTHONPATH}" \
        "$python" "$ZBGRPO_REPOSITORY/launch/slurm/folders.py" "$@")" || exit $?
    { read -r SAVE_FOLDER && read -r LOG_FOLDER; } <<<"$found"
}

# mark_of FILE: one line that is another one when the file has been written anew, be it on another node: listing a folder
# has NFS ask the server what is in it.
mark_of() {
    ls "${1%/*}" >/dev/null 2>&1 || true
    stat --format "%i %y" "$1" 2>/dev/null || echo none
}

# leave STATUS [MESSAGE]: the end of the job.
leave() {
    [ $# -lt 2 ] || echo "zbgrpo: $2" >&2
    rm -f "$NOTE"
    exit "$1"
}
