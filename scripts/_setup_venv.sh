# shellcheck shell=bash
# Sourced by quickstart.sh, test.sh and .ci/run: makes .venv in the repository root and installs the
# package with its test tools. Needs `set -euo pipefail`. Sets ROOT and VENV_PYTHON.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV_PYTHON="$ROOT/.venv/bin/python"

fail() {
    printf '\nFAILED: %s\n' "$*" >&2
    exit 1
}

misused() { # <what is wrong with the arguments>; of a script with `usage`
    printf '%s\n' "$*" >&2
    usage >&2
    exit 2
}

find_python() { # prints a Python of at least 3.11
    local name
    for name in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s' "$name"
            return
        fi
    done
    fail "Python 3.11 or newer is needed; found: $(python3 --version 2>&1 || true)." \
        "Install one, or name it: PYTHON=/path/to/python3.11 bash $0"
}

# A hash of all that decides what is installed; the root too, since the install points to it.
install_stamp() {
    (printf '%s\n' "$ROOT" && cat "$ROOT/pyproject.toml" "$ROOT/constraints.txt") |
        "$VENV_PYTHON" -c 'import hashlib, sys
print(sys.version_info[:2], hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

# Not so after `pip install .`, which puts a copy into .venv.
finds_this_checkout() {
    local found
    found="$(cd / && env -u PYTHONPATH "$VENV_PYTHON" -c 'import sglang; print(sglang.__file__)')" || return 1
    [ "$found" -ef "$ROOT/python/sglang/__init__.py" ]
}

setup_venv() { # <number of the first step> <number of steps>
    local first="$1" last="$2" stamp="$ROOT/.venv/install-stamp" python
    printf '[%s/%s] Python environment %s\n' "$first" "$last" "$ROOT/.venv"
    if "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        printf '      found, used again\n'
    else
        python="$(find_python)"
        "$python" -m venv --clear "$ROOT/.venv" ||
            fail "$python -m venv. On Debian and Ubuntu: apt install python3-venv"
        printf '      made with %s\n' "$("$VENV_PYTHON" --version)"
    fi
    printf '[%s/%s] Packages (torch is large: some minutes on a slow line)\n' "$((first + 1))" "$last"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$(install_stamp)" ] && finds_this_checkout; then
        printf '      up to date, nothing to install\n'
        return
    fi
    rm -f "$stamp"
    "$VENV_PYTHON" -m pip install --disable-pip-version-check -c "$ROOT/constraints.txt" -e "$ROOT[dev]" ||
        fail "pip install (exit status $?)"
    install_stamp >"$stamp"
}
