#!/usr/bin/env bash
# Runs the CPU suite, three files at a time, after the set-up if that is needed. Extra arguments go to
# pytest; a path or a test id among them replaces the whole suite, and runs in one process:
# bash scripts/test.sh test/unit/test_code_shape.py -x
# Of long matrices the suite takes a part, a path all; TEST_TURN=NUMBER, more-of-NUMBER or all chooses.
set -euo pipefail
# shellcheck source=scripts/_setup_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_setup_venv.sh"
setup_venv 1 3

TARGETS=(test/unit test/e2e sgl-kernel/tests -n 3 --dist loadfile)
cd "$ROOT"
for argument in "$@"; do
    case "$argument" in
        -*) ;;
        *) if [ -e "${argument%%::*}" ]; then TARGETS=(); fi ;;
    esac
done
[ "${#TARGETS[@]}" -eq 0 ] || export TEST_TURN="${TEST_TURN:-$RANDOM}"

# Three files keep two cores busy while servers start and tests wait. So torch computes in one thread
# of each process; models of tests are so small that a second one costs more than it gives.
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE KMP_BLOCKTIME=0 TOKENIZERS_PARALLELISM=false
# Each of them, and each server, would compile all modules of this repository again.
unset PYTHONDONTWRITEBYTECODE

printf '[3/3] CPU suite%s\n' "${TEST_TURN:+, TEST_TURN=$TEST_TURN}"
status=0
"$VENV_PYTHON" -m pytest ${TARGETS[@]+"${TARGETS[@]}"} -q --durations=10 "$@" || status=$?
case "$status" in
    0) ;;
    5) fail "pytest found no test to run" ;;
    *) printf '\nFAILED: the CPU suite (pytest exit status %s). The lines that begin with FAILED or ERROR
above name the tests. One test again: bash scripts/test.sh PATH::NAME\n' "$status" >&2 ;;
esac
exit "$status"
