"""Does SGLang's own benchmark client work, as it is, with a server of this runtime?

    python test/clients/check_sglang_bench_client.py

In an environment of its own (six gigabytes: the client's module imports the whole package) it sends
the same requests in each of several ways (WAYS). All must complete, and give as many tokens in each
way; the last one lets the server write a profile. Writes
benchmark/results/sglang_bench_client.json, and exits with 1 if something is missing.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from _client_checks import (
    BUILD,
    DEMO_MODEL,
    client_python,
    demo_server,
    installed_version,
    plain_environ,
)

from benchmark.command import make_parser, store
from benchmark.environment import describe_environment

SGLANG = "sglang==0.5.23"
# What its client imports, without the kernels for GPUs that its package asks for.
IMPORTED = (
    *("torch==2.14.1", "torchvision", "transformers==5.19.0", "triton", "numpy", "datasets"),
    *("aiohttp", "requests", "tqdm", "pillow", "pybase64", "pydantic", "orjson", "psutil"),
    *("starlette", "msgspec", "pyzmq", "IPython", "apache-tvm-ffi", "sentencepiece"),
    *("compressed-tensors", "gguf"),
)
SIZES = (
    *("--dataset-name", "random-ids", "--random-input-len", "64", "--random-output-len", "32"),
    *("--max-concurrency", "16", "--seed", "1", "--disable-tqdm", "--flush-cache"),
)
# Backends and flags of the client.
WAYS = {
    "native": ("sglang",),
    "native, with log-probabilities": ("sglang", "--return-logprob"),
    "native, whole answers": ("sglang", "--disable-stream"),
    "completions": ("sglang-oai",),
    "completions, whole answers": ("sglang-oai", "--disable-stream"),
    "chats": ("sglang-oai-chat",),
    "chats, whole answers": ("sglang-oai-chat", "--disable-stream"),
    "with a profile": ("sglang", "--profile"),
}
KEYS = (
    *("backend", "completed", "total_input_tokens", "total_output_tokens"),
    *("total_output_tokens_retokenized", "output_throughput", "mean_ttft_ms", "mean_tpot_ms"),
)


def main() -> int:
    parser = make_parser(__doc__, "sglang_bench_client")
    environment = BUILD / "sglang-bench"
    parser.add_argument("--environment", type=Path, default=environment, help="its folder")
    parser.add_argument("--requests", type=int, default=200, help="in each way")
    arguments = parser.parse_args()
    result = describe_environment()
    client_python(arguments.environment, "--no-deps", SGLANG)
    python = client_python(arguments.environment, *IMPORTED)
    result["client"] = f"sglang {installed_version(python, 'sglang')}, sglang.bench_serving"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        traces = folder / "traces"
        with demo_server(environ={"SGLANG_TORCH_PROFILER_DIR": str(traces)}) as url:
            runs = [
                run_client(python, url, folder, traces, way, arguments.requests) for way in WAYS
            ]
        num_events = count_events(traces)
    result |= {"requests": arguments.requests, "runs": runs, "profiled_events": num_events}
    store(arguments.out, result)
    problems = [
        run["way"]
        for run in runs
        if run["completed"] != arguments.requests
        or run["total_output_tokens"] != runs[0]["total_output_tokens"]
    ]
    if num_events == 0:
        problems.append("the profile has no events")
    print(f"Wrong: {', '.join(problems) or 'none'}")
    return 1 if problems else 0


def run_client(
    python: Path, url: str, folder: Path, traces: Path, way: str, num_requests: int
) -> dict[str, Any]:
    """One run of the client: what it says of it.

    Raises:
        SystemExit: with what the client has written, if it ends with an error.
    """
    backend, *flags = WAYS[way]
    out = folder / f"{way}.jsonl"
    command = [str(python), "-m", "sglang.bench_serving", "--backend", backend, *flags]
    command += ["--base-url", url, "--model", str(DEMO_MODEL), "--tokenizer", str(DEMO_MODEL)]
    command += [*SIZES, "--num-prompts", str(num_requests), "--output-file", str(out)]
    environ = {**plain_environ(), "SGLANG_TORCH_PROFILER_DIR": str(traces)}
    ended = subprocess.run(command, env=environ, cwd=folder, text=True, capture_output=True)
    if ended.returncode != 0 or not out.exists():
        raise SystemExit(f"{way}: the client ended with {ended.returncode}:\n{ended.stderr}")
    found = json.loads(out.read_text().splitlines()[-1])
    run = {"way": way, "flags": " ".join(flags), **{key: found.get(key) for key in KEYS}}
    print(json.dumps(run), flush=True)
    return run


def count_events(folder: Path) -> int:
    """Events in all traces under a folder."""
    files = list(folder.rglob("*.json.gz"))
    return sum(len(json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]) for file in files)


if __name__ == "__main__":
    raise SystemExit(main())
