"""Load on a running server: `python -m sglang.bench_serving --backend sglang --num-prompts 100`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from typing import Any

import httpx
from tqdm import tqdm

from sglang.benchmark.client import BACKENDS, RequestOptions, send
from sglang.benchmark.datasets import BenchPrompt, DatasetError, add_dataset_args, load_prompts
from sglang.benchmark.metrics import RequestResult, report_rows, summarize

REQUEST_TIMEOUT_S = 6 * 3600.0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglang.bench_serving", description=__doc__)
    add = parser.add_argument
    add("--backend", choices=sorted(BACKENDS), default="sglang")
    add("--base-url", help="Instead of --host and --port.")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000)
    add("--model", help="Name in the requests; default: the first that the server lists.")
    add("--vocab-size", type=int, help="For made-up prompts; default: the server's.")
    add("--request-rate", type=float, default=float("inf"), help="Requests per second, Poisson.")
    add("--max-concurrency", type=int, help="Requests in flight at most.")
    add("--warmup-requests", type=int, default=1)
    add("--disable-stream", action="store_true")
    add("--disable-ignore-eos", action="store_true")
    add("--disable-tqdm", action="store_true")
    add("--extra-request-body", type=json.loads, default={}, help="JSON object.")
    add("--flush-cache", action="store_true", help="Empty the prefix cache first.")
    add("--profile", action="store_true", help="Have the server profile its steps meanwhile.")
    add("--output-file", help="Gets one JSON line per run.")
    add("--output-details", action="store_true", help="Put each request into that line.")
    add_dataset_args(parser)
    return parser


def auth_headers() -> dict[bytes, bytes]:
    """`OPENAI_API_KEY` as a bearer token, or else `API_KEY` as the header's whole value."""
    if key := os.environ.get("OPENAI_API_KEY"):
        return {b"Authorization": f"Bearer {key}".encode()}
    if value := os.environ.get("API_KEY"):
        return {b"Authorization": value.encode()}
    return {}


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """One run; returns its figures.

    Raises:
        DatasetError: if there are no prompts.
        httpx.HTTPError: if the server does not answer.
    """
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=base_url, headers=auth_headers(), timeout=REQUEST_TIMEOUT_S, limits=limits
    ) as client:
        info = await _get_json(client, "/model_info")
        models = await _get_json(client, "/v1/models")
        name = args.model or models.get("data", [{}])[0].get("id") or info.get("model_path", "")
        prompts = load_prompts(args, args.vocab_size or info.get("vocab_size") or 32_000)
        stream, ignore_eos = not args.disable_stream, not args.disable_ignore_eos
        options = RequestOptions(name, stream, ignore_eos, args.extra_request_body)
        for prompt in prompts[: args.warmup_requests]:
            warm = await send(client, args.backend, prompt, options)
            if warm.error:
                raise DatasetError(f"The warm-up request failed: {warm.error}")
        if args.flush_cache:
            (await client.post("/flush_cache")).raise_for_status()
        if args.profile:
            await _profile(client, "start")
        start = time.perf_counter()
        results = await _send_all(client, args, prompts, options)
        summary = summarize(results, time.perf_counter() - start)
        if args.profile:
            print(f"The profile is in {(await _profile(client, 'stop'))['path']}.")
        server_info = await _get_json(client, "/server_info")
    state = (server_info.get("internal_states") or [{}])[0]
    summary = {
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": args.request_rate if args.request_rate != float("inf") else "inf",
        "max_concurrency": args.max_concurrency,
        **summary,
        "accept_length": state.get("avg_spec_accept_length"),
        "server_info": server_info,
    }
    if args.output_details:
        summary["errors"] = [result.error for result in results]
        summary["ttfts"] = [result.ttft for result in results]
        summary["itls"] = [result.itl for result in results]
        summary["output_lens"] = [result.output_len for result in results]
        summary["generated_texts"] = [result.text for result in results]
    return summary


async def _send_all(
    client: httpx.AsyncClient,
    args: argparse.Namespace,
    prompts: list[BenchPrompt],
    options: RequestOptions,
) -> list[RequestResult]:
    """Sends the prompts at the request rate, never more at once than the concurrency allows."""
    slots = asyncio.Semaphore(args.max_concurrency or len(prompts))
    chooser = random.Random(args.seed)
    progress = tqdm(total=len(prompts), disable=args.disable_tqdm)

    async def one(prompt: BenchPrompt) -> RequestResult:
        async with slots:
            result = await send(client, args.backend, prompt, options)
        progress.update()
        return result

    tasks = []
    for prompt in prompts:
        tasks.append(asyncio.create_task(one(prompt)))
        if args.request_rate != float("inf"):
            await asyncio.sleep(chooser.expovariate(args.request_rate))
    results = await asyncio.gather(*tasks)
    progress.close()
    return results


async def _profile(client: httpx.AsyncClient, verb: str) -> dict[str, Any]:
    """Starts or stops a profile of the server.

    Raises:
        DatasetError: with the server's reason, if it has none.
    """
    response = await client.post(f"/{verb}_profile", json={})
    if response.status_code != 200:
        raise DatasetError(f"--profile: HTTP {response.status_code}: {response.text[:300]}")
    return response.json()


async def _get_json(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """An answer, or nothing where the server has no such route."""
    response = await client.get(path)
    return response.json() if response.status_code == 200 else {}


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        summary = asyncio.run(run(args))
    except (DatasetError, httpx.HTTPError) as error:
        print(f"bench_serving: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{' Serving Benchmark Result ':=^50}")
    print("{:<40} {:<10}".format("Backend:", args.backend))
    print("{:<40} {:<10}".format("Traffic request rate:", str(summary["request_rate"])))
    print("{:<40} {:<10}".format("Max request concurrency:", str(args.max_concurrency)))
    print("\n".join(report_rows(summary)))
    print("=" * 50)
    if args.output_file:
        with open(args.output_file, "a", encoding="utf-8") as file:
            file.write(json.dumps(summary) + "\n")
    return 0 if summary["completed"] else 1


if __name__ == "__main__":
    sys.exit(main())
