# Common part of the scripts in this folder, to be sourced.
#
#   prepare_environment EXTRA  make the virtual environment VENV and install zbgrpo[EXTRA] there with the pinned versions
#   stay_offline               nothing asks a hub for a model or data from here on
#   torchrun_path              the torchrun of VENV, or else of the PATH
#   count_gpus DEFAULT         number of GPUs, or DEFAULT where there is none
#   SIGNALS                    for torchrun's --signals-to-handle
#   fail MESSAGE               say what is wrong and exit with 2
#
# PYTHON       interpreter to make it with; python3 if unset
# ZBGRPO_VENV  folder of the environment; .venv in the repository if unset

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${ZBGRPO_VENV:-$REPOSITORY/.venv}"

# Keeps torchrun from a notice about threads. Each rank sets its own number before it loads torch.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# A rank that is asked to stop saves its state first; torchrun would kill it after 30 seconds.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-300}"
# What torchrun hands on to its ranks. Without SIGUSR1 among them, that signal would end torchrun and leave them behind.
SIGNALS=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1

fail() {
    echo "zbgrpo: $*" >&2
    exit 2
}

stay_offline() {
    export HF_HUB_OFFLINE=1
}

torchrun_path() {
    if [ -x "$VENV/bin/torchrun" ]; then
        echo "$VENV/bin/torchrun"
    else
        command -v torchrun || fail "no torchrun in $VENV or on the PATH; launch/README.md says how to install"
    fi
}

count_gpus() {
    local found
    found="$(nvidia-smi --list-gpus 2>/dev/null | grep -c "^GPU" || true)"
    [ "${found:-0}" -gt 0 ] || found="$1"
    echo "$found"
}

prepare_environment() {
    local extra="$1" stamp="$VENV/.zbgrpo-installed" digest
    [ -x "$VENV/bin/python" ] || make_environment
    check_version "$VENV/bin/python"
    # The installation is editable, so only these files and the place of the repository decide whether it is current.
    digest="$(cd "$REPOSITORY" && { pwd && cat setup.py pyproject.toml constraints.txt; } | sha256sum | cut -d " " -f 1)"
    case "$(cat "$stamp" 2>/dev/null)" in
    "$digest $extra" | "$digest dev") return ;;
    esac
    rm -f "$stamp"
    echo "zbgrpo: installing into $VENV (some minutes the first time)" >&2
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        --constraint "$REPOSITORY/constraints.txt" --editable "$REPOSITORY[$extra]" >&2 ||
        fail "the installation failed; what to do on a machine without a network or without a GPU: launch/README.md"
    echo "$digest $extra" >"$stamp"
}

make_environment() {
    local python="${PYTHON:-python3}"
    command -v "$python" >/dev/null || fail "no $python on the PATH; install Python 3.10 or newer, or set PYTHON"
    check_version "$python"
    "$python" -c "import venv, ensurepip" 2>/dev/null ||
        fail "$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
    "$python" -m venv "$VENV" || fail "$python -m venv $VENV failed"
}

check_version() {
    "$1" -c "import sys; sys.exit(sys.version_info < (3, 10))" ||
        fail "$1 is $("$1" --version 2>&1); Python 3.10 or newer is needed, set PYTHON to one"
}
