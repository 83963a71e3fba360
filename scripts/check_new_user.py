"""Follows README.md by the letter, as a new user with a clean checkout and a bare Python would.

    python scripts/check_new_user.py

All blocks run in one shell, in their order. A block that serves goes on until another one serves at
its port. Of the test suite a small part is run. Then both wheels are made, and must hold what the
checkout holds. After each block nothing untracked may lie in the checkout.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from check_dockerfile import build_context

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "test/support")]

from benchmark.server_process import is_free  # noqa: E402
from page_blocks import Block, blocks_of  # noqa: E402

PORT = 30000  # of a server, where README names none
LIMIT_S = 900
SERVES = re.compile(r"^sglang serve (?:.*--port (\d+))?", re.M)
WHOLE_SUITE = "bash scripts/test.sh "
PART_OF_SUITE = (
    "test/unit/test_commands.py test/unit/test_flag_file.py test/unit/test_check_env.py"
    " sgl-kernel/tests/test_structs.py "
)
PLOT = "docs/adaptive_steps.svg"
FUNCTIONS = f"""
set -eo pipefail -m
declare -A SERVERS
stop_servers() {{ # <ports...>
    local port
    for port; do
        [ -n "${{SERVERS[$port]:-}}" ] || continue
        kill -TERM -- "-${{SERVERS[$port]}}" 2>/dev/null || true
        wait "${{SERVERS[$port]}}" || true
        unset "SERVERS[$port]"
    done
}}
trap 'stop_servers "${{!SERVERS[@]}}"' EXIT
curl() {{ command curl --fail-with-body "$@"; }}
wait_until_ready() {{ # <port>
    for ((tenths = 0; tenths < 1200; tenths++)); do
        if curl -s "http://127.0.0.1:$1/health" >/dev/null; then return; fi
        kill -0 "${{SERVERS[$1]}}" || return 1
        sleep 0.1
    done
    return 1
}}
check_clean() {{
    local left
    left="$(git status --porcelain -- . ':!{PLOT}')"
    [ -z "$left" ] || {{ printf 'FAILED: a block left in the checkout:\\n%s\\n' "$left"; exit 1; }}
}}
"""
# Where files of a checkout lie in the wheels.
PLACES = {
    "python/sglang/": "sglang/",
    "sgl-kernel/python/sgl_kernel/": "sgl_kernel/",
    "sgl-kernel/csrc/": "sgl_kernel/csrc/",
    "sgl-kernel/include/": "sgl_kernel/include/",
}


def shell_text(block: Block, checkout: Path) -> str:
    """Writes what the shell does for a block."""
    text = block.text.replace(
        "/path/to/checkpoint", f"{checkout}/python/sglang/demo_models/tiny-code"
    )
    text = text.replace(WHOLE_SUITE, WHOLE_SUITE + PART_OF_SUITE)
    if block.language == "python":
        text = f"python - <<'END_OF_BLOCK'\n{text}END_OF_BLOCK\n"
    if serves := SERVES.search(text):
        port = serves[1] or PORT
        text = f"stop_servers {port}\n{{\n{text}}} &\nSERVERS[{port}]=$!\nwait_until_ready {port}\n"
    return f"echo; echo '--- {block.place}'\n{text}check_clean\n"


def run_blocks(checkout: Path) -> str:
    """Runs all blocks that the page does not exclude; returns what they print.

    Raises:
        SystemExit: if one fails.
    """
    blocks = [
        block
        for block in blocks_of(ROOT / "README.md")
        if block.language in ("bash", "python") and block.reason is None
    ]
    script = FUNCTIONS + "".join(shell_text(block, checkout) for block in blocks)
    ours = ("PYTHONPATH", "VIRTUAL_ENV")
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    environ["PIP_CONSTRAINT"] = str(checkout / "constraints.txt")  # a torch for CPUs
    own_bin = f"{Path(sys.executable).parent}{os.pathsep}"
    environ["PATH"] = environ["PATH"].removeprefix(own_bin)
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=checkout,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert process.stdout is not None
    signal.signal(signal.SIGALRM, lambda *_: process.terminate())
    signal.alarm(LIMIT_S)
    printed = []
    for line in process.stdout:
        print(line, end="", flush=True)
        printed.append(line)
    if process.wait() != 0:
        sys.exit(f"FAILED: a block of README.md, exit status {process.returncode}")
    signal.alarm(0)
    return "".join(printed)


def check_wheels(checkout: Path, folder: Path) -> None:
    """Makes the wheels of both distributions, and compares them with the checkout.

    Raises:
        SystemExit: if a file is missing, or one is left in the checkout.
    """
    python = checkout / ".venv/bin/python"
    command = [str(python), "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, ".", "./sgl-kernel"], cwd=checkout, check=True)
    held = {
        wheel.name.partition("-")[0]: {*zipfile.ZipFile(wheel).namelist()}
        for wheel in folder.glob("*.whl")
    }
    tracked = git(checkout, "ls-files").splitlines()
    places = [
        place + name.removeprefix(start)
        for name in tracked
        for start, place in PLACES.items()
        if name.startswith(start)
    ]
    kernel_places = [place for place in places if place.startswith("sgl_kernel/")]
    for name, wanted in (("sglang_adaptive", places), ("sglang_adaptive_kernel", kernel_places)):
        missing = {*wanted} - held[name]
        if missing or not any(path.endswith("licenses/LICENSE") for path in held[name]):
            sys.exit(f"FAILED: the wheel {name} lacks {sorted(missing) or 'LICENSE'}")
        print(f"The wheel {name} holds the {len(wanted)} files of the checkout and its licence.")
    library = checkout / "sgl-kernel/python/sgl_kernel/lib/libsgl_kernel.so"
    library.parent.mkdir()
    library.write_text("stands for what sgl_kernel.build compiles")
    subprocess.run([*command, "."], cwd=checkout, check=True)
    bound = [wheel for wheel in folder.glob("*.whl") if "-py3-none-linux_" in wheel.name]
    if not bound or "sgl_kernel/lib/libsgl_kernel.so" not in zipfile.ZipFile(bound[0]).namelist():
        sys.exit("FAILED: the wheel with compiled kernels lacks them, or names no platform")
    if left := git(checkout, "status", "--porcelain", "--", ".", f":!{PLOT}"):
        sys.exit(f"FAILED: the wheels left in the checkout:\n{left}")


def git(checkout: Path, *words: str) -> str:
    """Runs git in the checkout; returns what it prints."""
    identity = ["-c", "user.name=new user", "-c", "user.email=new@user.invalid"]
    command = ["git", *identity, *words]
    return subprocess.run(command, cwd=checkout, check=True, capture_output=True, text=True).stdout


def main() -> int:
    if not is_free(PORT):
        sys.exit(f"FAILED: port {PORT}, which README.md uses, is taken. Stop what has it.")
    with tempfile.TemporaryDirectory() as name:
        checkout = build_context(Path(name, "checkout"))
        git(checkout, "init", "-q")
        git(checkout, "add", "-A")
        git(checkout, "commit", "-q", "-m", "checkout")
        printed = run_blocks(checkout)
        for text, what in (
            ("data: [DONE]", "no streamed answer"),
            (f"{PLOT} drawn", "no plot"),
            (" passed", "no green suite"),
        ):
            if text not in printed:
                sys.exit(f"FAILED: {what}: README.md's blocks did not print {text!r}")
        if not (checkout / "build/site/index.html").is_file():
            sys.exit("FAILED: no site of the documentation")
        check_wheels(checkout, Path(name, "wheels"))
    print("README.md by the letter: a streamed answer, a plot, a green suite, a site, two wheels.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
