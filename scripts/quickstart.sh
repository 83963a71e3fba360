#!/usr/bin/env bash
# Sets up .venv, starts the server with the bundled demo model, streams one completion to the
# terminal and keeps serving until Ctrl-C.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash scripts/quickstart.sh [--once] [--port N]
  --once     stop the server after the first completion and exit 0
  --port N   port to listen on (default 30000, or a free one if that is taken)
TEXT
}

ONCE=0
PORT=""
while [ $# -gt 0 ]; do
    case "$1" in
        --once) ONCE=1 ;;
        --port) PORT="${2:-}"; shift ;;
        --port=*) PORT="${1#--port=}" ;;
        -h | --help) usage; exit 0 ;;
        *) printf 'Unknown argument: %s\n' "$1" >&2; usage >&2; exit 2 ;;
    esac
    shift || true
done

# shellcheck source=scripts/_setup_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_setup_venv.sh"
CLIENT="$ROOT/scripts/_quickstart_client.py"
READY_TIMEOUT_S=180
STEPS=4

choose_port() {
    if [ -n "$PORT" ]; then
        case "$PORT" in *[!0-9]*) fail "--port takes a number, not '$PORT'." ;; esac
        PORT="$("$VENV_PYTHON" "$CLIENT" port "$PORT" --must)" || fail "choose another --port."
        return
    fi
    PORT="$("$VENV_PYTHON" "$CLIENT" port 30000)"
    [ "$PORT" = 30000 ] || printf '      port 30000 is taken, so this server uses %s\n' "$PORT"
}

server_failed() { # <what happened>
    printf '      last lines of the server:\n' >&2
    tail -n 20 "$LOG" | sed 's/^/      | /' >&2
    fail "$1. Whole log: $LOG"
}

start_server() {
    printf '[3/%s] Server\n' "$STEPS"
    choose_port
    URL="http://127.0.0.1:$PORT"
    LOG="$ROOT/.venv/server-$PORT.log"
    : >"$LOG"
    printf '      python -m sglang.launch_server --model-path demo --port %s\n' "$PORT"
    start_child "$LOG" "$VENV_PYTHON" -m sglang.launch_server --model-path demo --port "$PORT"
    "$VENV_PYTHON" "$CLIENT" ready "$URL" "$CHILD" "$READY_TIMEOUT_S" ||
        server_failed "the server did not get ready"
}

stream_once() {
    printf '[4/%s] One completion, as it is generated (POST /generate)\n\n' "$STEPS"
    "$VENV_PYTHON" "$CLIENT" stream "$URL" || server_failed "the completion"
}

show_how_to_go_on() {
    cat <<TEXT

The server answers at $URL. Try:

  curl -N $URL/generate -H 'Content-Type: application/json' \\
    -d '{"text": "import os\n\ndef ", "sampling_params": {"max_new_tokens": 64, "temperature": 0}, "stream": true}'

Its log: $LOG
TEXT
}

serve_until_stopped() {
    local stop_wanted=0 status=0
    trap 'stop_wanted=1' INT TERM HUP
    printf 'Serving. Ctrl-C stops it.\n'
    wait "$CHILD" || status=$?
    if [ "$stop_wanted" = 0 ]; then
        server_failed "the server ended by itself (exit status $status)"
    fi
    printf '\n'
    stop_server
}

stop_server() {
    local status=0
    stop_child || status=$?
    [ "$status" = 0 ] || server_failed "the server did not stop cleanly (exit status $status)"
    printf 'The server has stopped. Goodbye.\n'
}

setup_venv 1 "$STEPS"
start_server
stream_once
if [ "$ONCE" = 1 ]; then
    stop_server
else
    show_how_to_go_on
    serve_until_stopped
fi
