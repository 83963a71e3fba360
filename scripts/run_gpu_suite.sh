#!/usr/bin/env bash
# On a GPU host, without network, root or an installation: the GPU tests, the suites that compare tokens
# once per way to run them, and chosen tests, with wheels made by scripts/make_wheelhouse.sh.
# All of them run even if one fails; a table comes last, and the exit status is 0 only if all went well.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash scripts/run_gpu_suite.sh [options]
  --out DIR             logs, results and the table (default gpu_results)
  --wheelhouse DIR      wheels to install (default .wheelhouse; not there: nothing is installed)
  --site DIR            where they are installed, kept for the next run (default: a temporary folder)
  --gpu-tests PATH      tests that always run (default test/gpu, left out if it does not exist)
  --ways "NAMES"        ways to run the suites that compare tokens with transformers, with a CPU or with
                        each other, separated by ';': "triton; triton, no graphs; flashinfer, no overlap",
                        or "all", those of each attention backend with and without graphs and overlap
  --workers N           processes of one way (default 8)
  --tests "PATHS"       more tests, each path a run of its own, for example "test/e2e/test_mtp.py"
  --test-limit S        seconds for one run of tests (default 900)
PYTHON=/path/to/python names the Python that has PyTorch (default python3).
TEXT
}

# shellcheck source=scripts/_setup_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_setup_venv.sh"

PYTHON="${PYTHON:-python3}"
declare -A GIVEN=([out]="$ROOT/gpu_results" [wheelhouse]= [site]= [gpu-tests]=test/gpu [ways]= [workers]=8 [tests]= [test-limit]=900)
while [ $# -gt 0 ]; do
    case "$1" in -h | --help) usage; exit 0 ;; esac
    [[ "$1" = --* && -v "GIVEN[${1#--}]" ]] || misused "Unknown argument: $1"
    [ $# -ge 2 ] || misused "$1 needs a value."
    GIVEN["${1#--}"]="$2"
    shift 2
done
RESULTS="$(realpath -m -- "${GIVEN[out]}")" WHEELHOUSE="${GIVEN[wheelhouse]}" SITE="${GIVEN[site]}"
GPU_TESTS="${GIVEN[gpu-tests]}" WAYS="${GIVEN[ways]}" WORKERS="${GIVEN[workers]}" TEST_LIMIT_S="${GIVEN[test-limit]}"
[[ "$TEST_LIMIT_S" =~ ^[1-9][0-9]*$ ]] || misused "--test-limit takes a whole number of seconds, not '$TEST_LIMIT_S'."
[[ "$WORKERS" =~ ^[1-9][0-9]*$ ]] || misused "--workers takes a number of processes, not '$WORKERS'."
[ -z "$WHEELHOUSE" ] || [ -d "$WHEELHOUSE" ] ||
    fail "there is no wheelhouse $WHEELHOUSE. Make it where there is network: bash scripts/make_wheelhouse.sh DIR"
WHEELHOUSE="$(realpath -m -- "${WHEELHOUSE:-$ROOT/.wheelhouse}")"

# Suites of a way: those over the bundled model, and those over small ones, which FlashInfer, that has
# no float32 and no small heads, leaves out.
BUNDLED_SUITES=(
    test/e2e/test_{greedy_equality,mtp}.py
    test/e2e/test_engine_{determine_generation,pause_continue,flush_cache}.py
    test/unit/speculative/test_mtp_equality.py
)
SMALL_SUITES=(
    test/e2e/test_logprobs_and_penalties.py
    test/unit/speculative/test_{mtp_requests,pause_with_model,mtp_observability,ledger_matrix}.py
    test/unit/speculative/test_{second_model_drafter,toy_drafters}.py
)

suites_of() { # <way>
    printf '%s\n' "${BUNDLED_SUITES[@]}"
    [[ "$1" = flashinfer* ]] || printf '%s\n' "${SMALL_SUITES[@]}"
}

target_of() { # <way>: SGLANG_TEST_TARGET (test/support/target.py); fails if there is no such way
    local flags rest="$1,"
    [[ " ${BACKENDS[*]} " = *" ${rest%%,*} "* ]] || return 1
    flags="\"attention_backend\": \"${rest%%,*}\""
    [[ "$1" != flashinfer* ]] || flags+=', "dtype": "float16"'
    while rest="${rest#*,}" && [ -n "$rest" ]; do
        case "${rest%%,*}" in
            " no graphs") flags+=', "disable_cuda_graph": true' ;;
            " no overlap") flags+=', "disable_overlap_schedule": true' ;;
            *) return 1 ;;
        esac
    done
    printf '{%s}' "$flags"
}

command -v "$PYTHON" >/dev/null || fail "there is no $PYTHON. Name one: PYTHON=/path/to/python bash $0"
WAY_NAMES=() BACKENDS=()
if [ -n "$WAYS" ]; then
    read -r -a BACKENDS < <(PYTHONPATH="$ROOT/python" "$PYTHON" -c \
        'from sglang.srt.registry import ATTENTION_BACKENDS; print(*ATTENTION_BACKENDS.names)') ||
        fail "$PYTHON cannot read the names of attention backends."
fi
if [ "$WAYS" = all ]; then
    for backend in "${BACKENDS[@]}"; do
        WAY_NAMES+=("$backend"{,", no graphs"}{,", no overlap"})
    done
else
    IFS=';' read -r -d '' -a NAMED <<<"$WAYS" || true
    for way in ${NAMED[@]+"${NAMED[@]}"}; do
        way="$(sed 's/^[[:space:]]*//; s/[[:space:]]*$//' <<<"$way")"
        [ -z "$way" ] || WAY_NAMES+=("$way")
    done
fi

# Names that are wrong should not show up after an hour.
for way in ${WAY_NAMES[@]+"${WAY_NAMES[@]}"}; do
    target_of "$way" >/dev/null || fail "--ways: there is no '$way'."
done
read -r -a TEST_PATHS <<<"${GIVEN[tests]//$'\n'/ }"
cd "$ROOT"
for path in ${TEST_PATHS[@]+"${TEST_PATHS[@]}"}; do
    [ -e "${path%%::*}" ] || fail "--tests: there is no $path."
done

check_gpu() {
    "$PYTHON" - <<'PYTHON_TEXT' || exit 1
import sys

if sys.version_info < (3, 11):
    sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}; 3.11 or newer is needed: PYTHON=/path/to/python")
try:
    import torch
except ImportError as error:
    sys.exit(f"{sys.executable} cannot import torch ({error}). Name the Python that has it: PYTHON=/path/to/python")
if not torch.cuda.is_available():
    sys.exit(f"torch.cuda finds no CUDA GPU (torch {torch.__version__}, built for CUDA {torch.version.cuda}).\n"
             "Run this where nvidia-smi lists one. Without a GPU the CPU suite runs: bash scripts/test.sh")
names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
print(f"  {names}; Python {sys.version.split()[0]}, torch {torch.__version__}, CUDA {torch.version.cuda}")
PYTHON_TEXT
}

# The wheels that go in: all, less those whose version the host's torch or transformers forbids.
# Without pip's resolver nothing else would see that, and the host's own version does.
chosen_wheels() {
    "$PYTHON" - "$WHEELHOUSE" <<'PYTHON_TEXT'
import sys
from importlib.metadata import distributions, requires
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename

present = {canonicalize_name(found.name) for found in distributions() if found.name}
limits = {}
for host in present & {"torch", "triton", "transformers", "huggingface-hub"}:
    for found in map(Requirement, requires(host) or []):
        if found.marker is None or found.marker.evaluate({"extra": ""}):
            limits.setdefault(canonicalize_name(found.name), []).append((host, found.specifier))
for wheel in sorted(Path(sys.argv[1]).glob("*.whl")):
    name, version, _, _ = parse_wheel_filename(wheel.name)
    against = [
        f"{host} needs {specifier}"
        for host, specifier in limits.get(name, [])
        if not specifier.contains(version, prereleases=True)
    ]
    if against and name in present:
        print(f"      {name} {version} left out: {against[0]}", file=sys.stderr)
    else:
        print(wheel)
PYTHON_TEXT
}

install_wheels() {
    local wheels=()
    if ! compgen -G "$WHEELHOUSE/*.whl" >/dev/null; then
        printf '      no wheels in %s: what is installed here has to do\n' "$WHEELHOUSE"
        return
    fi
    "$PYTHON" -m pip --version >/dev/null 2>&1 ||
        fail "$PYTHON has no pip. Name a Python with torch and pip: PYTHON=/path/to/python bash $0"
    mkdir -p "$SITE"
    chosen_wheels >"$TMP/wheels" || fail "the names of the wheels in $WHEELHOUSE could not be read."
    mapfile -t wheels <"$TMP/wheels"
    "$PYTHON" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile \
        --no-cache-dir --upgrade --target "$SITE" "${wheels[@]}" >"$RESULTS/install.log" 2>&1 ||
        fail "$(grep -m 1 '^ERROR' "$RESULTS/install.log" || tail -n 1 "$RESULTS/install.log")" \
            "Make the wheelhouse for this Python: bash scripts/make_wheelhouse.sh --python" \
            "$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    printf '      %s wheels in %s\n' "${#wheels[@]}" "$SITE"
}

check_imports() {
    "$PYTHON" -c 'import sglang, fastapi, uvicorn, zmq, msgspec, regex, safetensors, tokenizers, tqdm
import psutil, pytest, pytest_timeout, hypothesis, httpx, transformers' 2>"$TMP/imports" ||
        fail "$(tail -n 1 "$TMP/imports"). Make a wheelhouse where there is network" \
            "(bash scripts/make_wheelhouse.sh DIR) and name it here: --wheelhouse DIR"
}

ROWS=()
FAILED=0
TESTS="" # that run now, ended however we end

run_step() { # <name> <command...>
    local name="$1" log status=0 verdict=ok start=$SECONDS last
    shift
    log="$RESULTS/$name.log"
    printf '\n=== %s (at most %s s, log %s)\n' "$name" "$TEST_LIMIT_S" "$log"
    printf '$ %s\n' "$*" >"$log"
    timeout --kill-after=30 "$TEST_LIMIT_S" "$@" </dev/null >>"$log" 2>&1 &
    TESTS=$!
    wait "$TESTS" || status=$?
    TESTS=""
    case "$status" in
        0) ;;
        124 | 137) verdict="TIME LIMIT" ;;
        *) verdict="FAILED ($status)" ;;
    esac
    if [ "$verdict" != ok ]; then
        FAILED=1
        tail -n 15 "$log" | sed 's/^/      | /'
    fi
    last="$(tail -n 1 "$log" | tr -d '\r' | cut -c 1-90)"
    ROWS+=("$(printf '%-32s %-12s %5d  %s' "$name" "$verdict" "$((SECONDS - start))" "$last")")
    printf '      %s\n' "$verdict: $last"
}

run_tests() { # <path>
    local name="${1#test/}"
    name="${name//[^A-Za-z0-9_.-]/-}"
    name="${name##-}"
    run_step "${name%.py}" "$PYTHON" -m pytest -q -p no:cacheprovider --durations=10 "$1"
}

run_way() { # <way>
    local suites=()
    if [[ "$1" = flashinfer* ]] && ! "$PYTHON" -c 'import flashinfer' 2>/dev/null; then
        printf '\n=== %s left out: flashinfer-python is not installed\n' "$1"
        return
    fi
    mapfile -t suites < <(suites_of "$1")
    run_step "$(tr -s ', ' '-' <<<"$1")" env SGLANG_TEST_TARGET="$(target_of "$1")" \
        "$PYTHON" -m pytest -q -p no:cacheprovider -n "$WORKERS" --dist loadfile "${suites[@]}"
}

printf '[1/3] Host\n'
HOST="$(check_gpu)" || exit 1
printf '%s\n' "$HOST"

TMP="$(mktemp -d)"
trap '[ -z "$TESTS" ] || kill -TERM "$TESTS"; rm -rf "$TMP"' EXIT
SITE="$(realpath -m -- "${SITE:-$TMP/site}")"
# A folder of results that is made here stays out of git, so that results do not say "dirty".
[ -d "$RESULTS" ] || { mkdir -p "$RESULTS" && printf '*\n' >"$RESULTS/.gitignore"; }

printf '[2/3] Packages\n'
install_wheels
export PYTHONPATH="$ROOT/python:$ROOT/sgl-kernel/python:$SITE${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
check_imports

printf '[3/3] Tests, logs in %s\n' "$RESULTS"
[ ! -e "$GPU_TESTS" ] || run_tests "$GPU_TESTS"
if [ "$GPU_TESTS" = test/gpu ]; then
    run_tests sgl-kernel/tests/test_kernels_gpu.py
    run_tests sgl-kernel/tests/test_tree_kernels_gpu.py
fi
for way in ${WAY_NAMES[@]+"${WAY_NAMES[@]}"}; do
    run_way "$way"
done
for path in ${TEST_PATHS[@]+"${TEST_PATHS[@]}"}; do
    run_tests "$path"
done

{
    printf '%s\n\n%-32s %-12s %5s  %s\n' "$HOST" name status s "last line"
    printf '%s\n' ${ROWS[@]+"${ROWS[@]}"}
} >"$RESULTS/summary.txt"
printf '\n'
cat "$RESULTS/summary.txt"
exit "$FAILED"
