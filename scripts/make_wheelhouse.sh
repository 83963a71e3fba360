#!/usr/bin/env bash
# Downloads, as wheels, what the package and its tests need beyond a PyTorch image, for a GPU host
# that has no network. scripts/run_gpu_suite.sh installs them there.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: bash scripts/make_wheelhouse.sh [DIR] [options]
  DIR                where the wheels go (default .wheelhouse); other wheels in it are removed
  --python X.Y       Python of the GPU host (default 3.12)
  --platform TAG     newest manylinux tag that the host takes (default manylinux_2_34_x86_64:
                     glibc 2.34; all older tags are taken too)
  --with-flashinfer  add FlashInfer and what it needs beyond torch
PYTHON=/path/to/python names the Python (3.11 or newer, with pip) that runs this; pip's own
configuration says where it downloads from.
TEXT
}

# What the repository or a PyTorch image has (with all that only these need), and tools that no GPU
# host needs.
EXCLUDED="torch triton numpy transformers huggingface-hub setuptools ruff mypy pre-commit schemathesis"
# Of what FlashInfer asks for, what the kernels used here run without: compilers of other kernels.
EXCLUDED="$EXCLUDED nvidia-cutlass-dsl nvidia-cudnn-frontend cuda-python cuda-bindings"
FLASHINFER="flashinfer-python==0.6.14 apache-tvm-ffi==0.1.11"

# shellcheck source=scripts/_setup_venv.sh
source "$(dirname "${BASH_SOURCE[0]}")/_setup_venv.sh"

DIR=""
EXTRA=""
declare -A GIVEN=([python]=3.12 [platform]=manylinux_2_34_x86_64)
while [ $# -gt 0 ]; do
    case "$1" in
        --python | --platform)
            [ $# -ge 2 ] || misused "$1 needs a value."
            GIVEN["${1#--}"]="$2"
            shift ;;
        --with-flashinfer) EXTRA="$FLASHINFER" ;;
        -h | --help) usage; exit 0 ;;
        -*) misused "Unknown argument: $1" ;;
        *)
            [ -z "$DIR" ] || misused "One folder only, not '$DIR' and '$1'."
            DIR="$1" ;;
    esac
    shift
done
TARGET_PYTHON="${GIVEN[python]}" PLATFORM="${GIVEN[platform]}"
DIR="${DIR:-$ROOT/.wheelhouse}"
[[ "$TARGET_PYTHON" =~ ^3\.[0-9]+$ ]] || misused "--python takes X.Y, for example 3.12, not '$TARGET_PYTHON'."
[[ "$PLATFORM" =~ ^manylinux_2_([0-9]+)_(x86_64|aarch64)$ ]] ||
    misused "--platform takes a tag like manylinux_2_28_x86_64, not '$PLATFORM'."
GLIBC_MINOR="${BASH_REMATCH[1]}"
MACHINE="${BASH_REMATCH[2]}"

# pip takes no tag that is not named, so all that such a host can run are.
PIP_TARGET=(--only-binary=:all: --implementation cp --python-version "$TARGET_PYTHON")
for ((minor = GLIBC_MINOR; minor >= 5; minor--)); do
    PIP_TARGET+=(--platform "manylinux_2_${minor}_$MACHINE")
    case "$minor" in
        17) PIP_TARGET+=(--platform "manylinux2014_$MACHINE") ;;
        12) PIP_TARGET+=(--platform "manylinux2010_$MACHINE") ;;
        5) PIP_TARGET+=(--platform "manylinux1_$MACHINE") ;;
    esac
done

PYTHON="$(find_python)"
"$PYTHON" -m pip --version >/dev/null 2>&1 ||
    fail "$PYTHON has no pip. Name a Python that has it: PYTHON=/path/to/python bash $0"
TMP="$(mktemp -d)"
trap 'rm -rf "$TMP"' EXIT

# Asks pip, round by round, for all packages known so far and reads what those need, until nothing
# new appears. So pip never looks at an excluded package: torch alone would be gigabytes. The
# conditions of requirements are judged for the GPU host, not for the Python that runs this.
cat >"$TMP/resolve.py" <<'PYTHON_TEXT'
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from pip._vendor.packaging.markers import default_environment
from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

pyproject, python, platform, excluded, extra, scratch, *pip_target = sys.argv[1:]
EXCLUDED = {canonicalize_name(name) for name in excluded.split()}
HOST = {
    **default_environment(),
    "implementation_name": "cpython",
    "implementation_version": f"{python}.0",
    "os_name": "posix",
    "platform_machine": platform.split("_", 3)[3],
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": f"{python}.0",
    "python_version": python,
    "sys_platform": "linux",
}


def wanted(texts, extras=frozenset()):
    """The requirements among `texts` that hold on the host and are not excluded."""
    requirements = [Requirement(text) for text in texts]
    environments = [{**HOST, "extra": extra} for extra in ("", *sorted(extras))]
    return [
        found
        for found in requirements
        if canonicalize_name(found.name) not in EXCLUDED
        and (found.marker is None or any(map(found.marker.evaluate, environments)))
    ]


def ask_pip(requirements):
    """pip's choice for the requirements, without what they need: (name, version, its needs)."""
    report = Path(scratch, "report.json")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps"]
    command += ["--ignore-installed", "--disable-pip-version-check", "--report", str(report)]
    command += ["--target", str(Path(scratch, "target")), *pip_target]
    result = subprocess.run([*command, *requirements], capture_output=True, text=True)
    if result.returncode != 0:
        missing = re.search(r"No matching distribution found for (.+)", result.stderr)
        if missing:
            sys.exit(f"there is no wheel of {missing[1].strip()} for Python {python} on {platform}")
        errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        sys.exit(f"pip: {(errors or ['no reason given'])[-1]}")
    return [entry["metadata"] for entry in json.loads(report.read_text())["install"]]


project = tomllib.loads(Path(pyproject).read_text())["project"]
roots = [*project["dependencies"], *project["optional-dependencies"]["dev"], *extra.split()]
requirements = {str(found): found for found in wanted(roots)}
while True:
    extras = {}
    for found in requirements.values():
        extras.setdefault(canonicalize_name(found.name), set()).update(found.extras)
        found.marker = None
    chosen = ask_pip([str(found) for found in requirements.values()])
    known = len(requirements)
    for package in chosen:
        needs = wanted(package.get("requires_dist", []), extras[canonicalize_name(package["name"])])
        for found in needs:
            found.marker = None
            requirements.setdefault(str(found), found)
    if len(requirements) == known:
        break
for package in sorted(chosen, key=lambda package: canonicalize_name(package["name"])):
    print(f"{package['name']}=={package['version']}")
PYTHON_TEXT

printf 'Choosing wheels for Python %s, %s and older\n' "$TARGET_PYTHON" "$PLATFORM"
"$PYTHON" "$TMP/resolve.py" "$ROOT/pyproject.toml" "$TARGET_PYTHON" "$PLATFORM" "$EXCLUDED" \
    "$EXTRA" "$TMP" "${PIP_TARGET[@]}" >"$TMP/wanted" 2>"$TMP/reason" ||
    fail "$(tail -n 1 "$TMP/reason")"

mkdir -p "$DIR" "$TMP/new"
OTHERS="$(find "$DIR" -mindepth 1 -maxdepth 1 ! -name '*.whl' -print -quit)"
[ -z "$OTHERS" ] || fail "$DIR holds more than wheels ($OTHERS). Choose another folder."
"$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps "${PIP_TARGET[@]}" \
    --find-links "$DIR" -d "$TMP/new" -r "$TMP/wanted" 2>"$TMP/reason" ||
    fail "pip download: $(grep -m 1 '^ERROR' "$TMP/reason" || tail -n 1 "$TMP/reason")"
find "$DIR" -maxdepth 1 -name '*.whl' -delete
mv "$TMP"/new/*.whl "$DIR"/

printf 'Wheelhouse: %s, %s\n' "$DIR" "$(du -sh "$DIR" | cut -f 1)"
