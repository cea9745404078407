#!/usr/bin/env bash
# Checks on a machine with one GPU what needs one: a real run with weights by CUDA IPC, numerics, attention, rates.
#
#   bash tests/gpu/check.sh [--device cpu] [--size tiny | 135m] [--parts run,...]    see tests/gpu/check.py
#   bash tests/gpu/check.sh --collect [VERSION]
#
# Takes less than eight minutes, and needs no network where the packages of setup.py are there. The last line is one JSON
# object; the exit status is 0 only if everything holds that is checked.
#
# The first Python of these that has torch with a GPU is taken: $PYTHON, .venv in the repository, python3, python, and
# python3.13 down to python3.10. If it lacks packages, they are installed in an environment of this script's own
# (tests/gpu/.venv, or the folder ZBGRPO_GPU_VENV), which sees that Python's packages, its torch among them: from the
# wheels in tests/gpu/wheels, else from the package index.
#
# --collect, on a machine with a network, fills tests/gpu/wheels with all that is needed but torch, for Linux on x86-64
# and the given version of Python (3.12 and the like; this one's if left out). The folder is ignored by git.
set -uo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
REPOSITORY="$(cd "$HERE/../.." && pwd)"
WHEELS="$HERE/wheels"
MAX_WHEELS_KIB=$((64 * 1024))
NEWEST_GLIBC=39 # minor version of the newest manylinux tag that is asked for; pip takes the tags that it is told only
VENV="${ZBGRPO_GPU_VENV:-$HERE/.venv}"

say() {
    echo "check.sh: $*" >&2
}

# Standard output ends with one JSON object, however this ends.
fail() {
    say "$*"
    local text="${*//\\/\\\\}"
    printf '{"ok": false, "reason": "%s"}\n' "${text//\"/\\\"}"
    exit 1
}

candidates() {
    local name
    [ -z "${PYTHON:-}" ] || command -v "$PYTHON"
    [ ! -x "$REPOSITORY/.venv/bin/python" ] || echo "$REPOSITORY/.venv/bin/python"
    for name in python3 python python3.13 python3.12 python3.11 python3.10; do
        command -v "$name"
    done
    [ -z "${PYTHON:-}" ] || command -v "$PYTHON" >/dev/null || say "PYTHON: there is no $PYTHON"
}

# The first candidate for which a Python statement holds.
find_python() {
    local python
    while read -r python; do
        if "$python" -c "$1" >/dev/null 2>&1; then
            echo "$python"
            return
        fi
    done < <(candidates)
    return 1
}

find_torch() {
    local recent="import sys; assert sys.version_info >= (3, 10)"
    if [ "$1" = cuda ]; then
        find_python "$recent; import torch; assert torch.version.cuda and torch.cuda.is_available()" && return
        say "no Python here has a torch that sees a GPU"
    fi
    find_python "$recent; import torch"
}

# An interpreter that has pip, for `pip --python`; the environment itself needs none.
find_pip() {
    if "$1" -m pip --version >/dev/null 2>&1; then
        echo "$1"
    else
        find_python "import pip"
    fi
}

# Prints the interpreter that has everything: this one, or that of an environment made from it.
complete() {
    local python="$1" missing site pip
    missing="$("$python" "$HERE/packages.py" missing)" || return 1
    if [ -z "$missing" ]; then
        echo "$python"
        return
    fi
    say "$python lacks $(echo "$missing" | tr '\n' ' ')"
    "$python" -m venv --clear --without-pip --system-site-packages "$VENV" >&2 || return 1
    site="$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || return 1
    "$python" "$HERE/packages.py" behind >"$site/behind.pth" || return 1
    "$python" "$HERE/packages.py" constraints >"$VENV/constraints.txt" || return 1
    pip="$(find_pip "$python")" || { say "no Python here has pip"; return 1; }
    mapfile -t missing < <(echo "$missing")
    install "$pip" "${missing[@]}" || return 1
    missing="$("$VENV/bin/python" "$HERE/packages.py" missing)" || return 1
    [ -z "$missing" ] || { say "still missing: $missing"; return 1; }
    echo "$VENV/bin/python"
}

install() {
    local pip="$1"
    shift
    local command=("$pip" -m pip --python "$VENV/bin/python" --disable-pip-version-check install --quiet
        --constraint "$VENV/constraints.txt")
    if compgen -G "$WHEELS/*.whl" >/dev/null; then
        "${command[@]}" --no-index --find-links "$WHEELS" "$@" >&2 && return
        # The pinned versions are those of the wheels, unless the folder is older than constraints.txt.
        say "$WHEELS does not have what is needed; asking the package index"
    fi
    "${command[@]}" --timeout 10 --retries 1 "$@" >&2 && return
    say "the package index cannot be reached, or lacks something; on a machine with a network" \
        "run tests/gpu/check.sh --collect $("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    return 1
}

collect() {
    local python version="$1" glibc size pins command
    python="$(find_python "import pip")" || { say "no Python here has pip"; return 1; }
    version="${version:-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}"
    [[ "$version" =~ ^3\.1[0-9]$ ]] || { say "--collect: $version is no version of Python that is supported"; return 1; }
    pins="$(mktemp)" || return 1
    "$python" "$HERE/packages.py" pins "$version" >"$pins" || return 1
    command=("$python" -m pip download --quiet --disable-pip-version-check --only-binary=:all: --dest "$WHEELS"
        --constraint "$pins" --python-version "$version" --implementation cp --platform manylinux1_x86_64
        --platform manylinux2010_x86_64 --platform manylinux2014_x86_64)
    for glibc in $(seq 5 "$NEWEST_GLIBC"); do
        command+=(--platform "manylinux_2_${glibc}_x86_64")
    done
    mapfile -t wanted < <("$python" "$HERE/packages.py" wanted)
    mkdir -p "$WHEELS"
    "${command[@]}" "${wanted[@]}" >&2
    local status=$?
    rm -f "$pins"
    [ "$status" -eq 0 ] || return 1
    size="$(du -sk "$WHEELS" | cut -f 1)"
    say "$(find "$WHEELS" -name '*.whl' | wc -l) wheels for Python $version in $WHEELS, $((size / 1024)) MiB"
    [ "$size" -le "$MAX_WHEELS_KIB" ] || { say "that is more than $((MAX_WHEELS_KIB / 1024)) MiB"; return 1; }
}

main() {
    local device=cuda previous="" argument python
    if [ "${1:-}" = --collect ]; then
        collect "${2:-}"
        exit
    fi
    for argument in "$@"; do
        case "$previous$argument" in --device=cpu | --devicecpu) device=cpu ;; esac
        [ "$argument" = --device ] && previous=--device || previous=""
    done
    python="$(find_torch "$device")" || fail "no Python with torch was found; name one in PYTHON"
    say "torch is that of $python"
    python="$(complete "$python")" || fail "packages of setup.py are missing, and could not be installed"
    exec "$python" "$HERE/check.py" "$@"
}

main "$@"
