#!/usr/bin/env bash
# Create the virtual environment VENV from the pinned locks: install.sh PYTHON VENV
set -euo pipefail
python=$1 venv=$2
cd "$(dirname "$0")/.."

"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || {
    echo "error: '$python' is not a Python 3.11, which requirements/cpu.lock is made for; set PYTHON=/path/to/python3.11" >&2
    exit 2
}
echo "Installing $(grep -c == requirements/cpu.lock) pinned packages into $venv (about 4 GB; one to three minutes) ..."
"$python" -m venv --clear "$venv"
log=$venv/install.log
# --no-compile: Python compiles a module when it is first imported, and few of the installed ones are.
if ! "$venv/bin/python" -m pip install --quiet --no-deps --no-compile --disable-pip-version-check \
    -r requirements/cpu.lock -r requirements/dev.lock >"$log" 2>&1; then
    tail -n 5 "$log" >&2
    echo "error: pip could not install the locks (whole log: $log)." >&2
    echo "If it found no torch ...+cpu: those wheels are on PyTorch's own CPU index, named on its 'Get started' page" >&2
    echo "(Linux, Pip, CPU). Add that index with PIP_EXTRA_INDEX_URL and run again." >&2
    exit 1
fi
"$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --disable-pip-version-check -e . >>"$log" 2>&1 || {
    tail -n 5 "$log" >&2
    exit 1
}
