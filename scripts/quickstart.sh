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

for argument in "$@"; do
    case "$argument" in
        -h | --help) usage; exit 0 ;;
        --once | --port | --port=* | [0-9]*) ;;
        *) printf 'Unknown argument: %s\n' "$argument" >&2; usage >&2; exit 2 ;;
    esac
done

# shellcheck source=scripts/_setup_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_setup_venv.sh"
setup_venv 1 4
exec "$VENV_PYTHON" "$ROOT/scripts/_quickstart.py" "$@"
