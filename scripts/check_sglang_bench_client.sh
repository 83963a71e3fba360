#!/usr/bin/env bash
# Does SGLang's own benchmark client work with our server? In an environment of its own it sends 200
# requests by each of two routes, and all must complete. Writes benchmark/results/sglang_bench_client.json.
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VERSION=0.5.23
PORT="${PORT:-30123}"
WORK="$(mktemp -d)"
CLIENT="${SGLANG_CLIENT_VENV:-$WORK/venv}"
SERVER=""
trap '[ -z "$SERVER" ] || kill "$SERVER" 2>/dev/null; rm -rf "$WORK"' EXIT

if [ ! -x "$CLIENT/bin/python" ]; then
    echo "[1/3] Client environment (a gigabyte or so: its module imports the whole package)"
    python3 -m venv "$CLIENT"
    "$CLIENT/bin/pip" install -q --no-deps "sglang==$VERSION"
    "$CLIENT/bin/pip" install -q torch==2.13.0 numpy aiohttp requests tqdm pillow pybase64 \
        transformers pydantic datasets orjson psutil triton starlette msgspec pyzmq IPython \
        torchvision apache-tvm-ffi sentencepiece compressed-tensors gguf
fi

echo "[2/3] Server"
"$ROOT/.venv/bin/python" -m sglang.launch_server --model-path demo --port "$PORT" &
SERVER=$!
until curl -sf "http://127.0.0.1:$PORT/ready" >/dev/null; do
    kill -0 "$SERVER" || { echo "The server ended; see above." >&2; exit 1; }
    sleep 0.2
done

echo "[3/3] 200 requests by each route"
MODEL="$ROOT/python/sglang/demo_models/tiny-code"
for backend in sglang sglang-oai; do
    (cd "$WORK" && "$CLIENT/bin/python" -m sglang.bench_serving --backend "$backend" \
        --base-url "http://127.0.0.1:$PORT" --model "$MODEL" --tokenizer "$MODEL" \
        --dataset-name random-ids --num-prompts 200 --random-input-len 64 --random-output-len 32 \
        --max-concurrency 16 --disable-tqdm --output-file "$WORK/$backend.jsonl")
done
"$ROOT/.venv/bin/python" - "$WORK" "$VERSION" "$ROOT" <<'PY'
import json, sys
from pathlib import Path

work, version, root = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
keys = ("backend", "completed", "total_input_tokens", "total_output_tokens",
        "total_output_tokens_retokenized", "output_throughput", "mean_ttft_ms", "mean_tpot_ms")
runs = []
for name in ("sglang", "sglang-oai"):
    run = json.loads((work / f"{name}.jsonl").read_text().splitlines()[-1])
    runs.append({key: run.get(key) for key in keys})
sys.path.insert(0, str(root))
from benchmark.environment import describe_environment

result = {**describe_environment(), "client": f"sglang {version}, sglang.bench_serving",
          "command": "bash scripts/check_sglang_bench_client.sh", "runs": runs}
path = root / "benchmark/results/sglang_bench_client.json"
path.write_text(json.dumps(result, indent=1) + "\n")
print(json.dumps(runs, indent=1))
sys.exit(0 if all(run["completed"] == 200 for run in runs) else 1)
PY
