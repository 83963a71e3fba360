# shellcheck shell=bash
# Sourced by quickstart.sh, test.sh and .ci/run: makes .venv in the repository root and installs the
# package with its test tools. Needs `set -euo pipefail`. Sets ROOT and VENV_PYTHON, and owns CHILD:
# the process group of the one long command that runs now, ended by stop_child however we end.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV_PYTHON="$ROOT/.venv/bin/python"
CHILD=""

fail() {
    printf '\nFAILED: %s\n' "$*" >&2
    exit 1
}

# Starts a command in a process group of its own, so that Ctrl-C reaches this script alone and the
# script decides what happens to the command. Where Linux can, the command also gets SIGTERM when
# this script is killed outright.
start_child() { # <log file> <command...>
    local log="$1" on_death=()
    shift
    if command -v setpriv >/dev/null 2>&1 && setpriv --pdeathsig TERM true 2>/dev/null; then
        on_death=(setpriv --pdeathsig TERM)
    fi
    set -m
    ${on_death[@]+"${on_death[@]}"} "$@" </dev/null >>"$log" 2>&1 &
    CHILD=$!
    set +m
}

# Ends the child: SIGTERM to it, and after 20 s SIGKILL to its whole group. Returns its exit status.
stop_child() {
    [ -n "$CHILD" ] || return 0
    local pid="$CHILD" status=0 tenths=0
    CHILD=""
    kill -TERM "$pid" 2>/dev/null || true
    while kill -0 "$pid" 2>/dev/null && [ "$tenths" -lt 200 ]; do
        sleep 0.1
        tenths=$((tenths + 1))
    done
    wait_quietly "$pid" 0 || status=$?
    return "$status"
}

# Reaps a child whose time is over; what is left of its process group is killed.
wait_quietly() { # <pid>
    local status=0
    if kill -0 "$1" 2>/dev/null; then
        kill -KILL -- "-$1" 2>/dev/null || true
    fi
    wait "$1" 2>/dev/null || status=$?
    kill -KILL -- "-$1" 2>/dev/null || true
    return "$status"
}

# Runs a command, its output added to a log file, with the elapsed time on the terminal. Returns its
# exit status.
run_shown() { # <title> <log file> <command...>
    local title="$1" log="$2" start=$SECONDS pid status=0
    shift 2
    start_child "$log" "$@"
    pid="$CHILD"
    while kill -0 "$pid" 2>/dev/null; do
        show_progress "$title" "$((SECONDS - start))" "$("$PROGRESS_OF" "$log" | cut -c 1-60)"
        sleep 1
    done
    CHILD=""
    wait_quietly "$pid" || status=$?
    if [ -t 1 ]; then printf '\r\033[K'; fi
    return "$status"
}

# The same with a log of its own; a failure ends this script.
run_logged() { # <title> <log file> <command...>
    local title="$1" log="$2" start=$SECONDS status=0
    : >"$log"
    run_shown "$@" || status=$?
    if [ "$status" -ne 0 ]; then
        printf '      last lines of the log:\n' >&2
        tail -n 15 "$log" | sed 's/^/      | /' >&2
        fail "$title (exit status $status). Whole log: $log"
    fi
    printf '      done in %s s\n' "$((SECONDS - start))"
}

last_line() { # <log file>
    tail -n 1 "$1"
}
PROGRESS_OF=last_line # what run_shown shows of a log

# How far pip is: packages found, and what it downloads, builds or installs.
pip_progress() { # <log file>
    awk '/^ *Collecting |^Requirement already/ { found++ }
         /^ *Downloading / { name = $2; sub(/.*\//, "", name); sub(/-[^-]*-[^-]*-[^-]*$/, "", name)
                             doing = name " " $3 " " $4 }
         /^Progress [0-9]+ of [1-9]/ { doing = name sprintf(" %d of %d MB", $2 / 1e6, $4 / 1e6) }
         /^ *(Building|Installing|Preparing|Uninstalling) / { doing = $1 " " $2 " " $3 }
         END { printf "packages found: %d; %s\n", found, doing }' "$1"
}

show_progress() { # <title> <seconds> <last line>
    if [ -t 1 ]; then
        printf '\r\033[K      %s: %s s  %s' "$1" "$2" "$3"
    elif [ "$2" -gt 0 ] && [ $(($2 % 15)) -eq 0 ]; then
        printf '      %s: %s s  %s\n' "$1" "$2" "$3"
    fi
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
    local first="$1" last="$2" stamp="$ROOT/.venv/install-stamp" log="$ROOT/.venv/install.log" python bar
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
    # Bars are for terminals; pip 24.1 and newer write the bytes that are there and all.
    bar="$("$VENV_PYTHON" -c 'import pip
print("raw" if [*map(int, pip.__version__.split(".")[:2])] >= [24, 1] else "off")')"
    PROGRESS_OF=pip_progress
    run_logged "pip install" "$log" "$VENV_PYTHON" -m pip install \
        --disable-pip-version-check --progress-bar "$bar" \
        -c "$ROOT/constraints.txt" -e "$ROOT[dev]"
    PROGRESS_OF=last_line
    install_stamp >"$stamp"
}

trap 'stop_child || true' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP
