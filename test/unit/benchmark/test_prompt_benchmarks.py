"""The pure parts of the benchmarks of long prompts, of streams beside them, and of loading."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmark import http_load
from benchmark.measure import long_prompts, step_gaps, stream_bounds
from benchmark.measure.kernel_times import Event, flop, kind_of, sums
from benchmark.measure.long_prompts import CASES, Case
from benchmark.random_model import GEOMETRIES, LLAMA_8B, random_model
from benchmark.sse_client import StreamClient, StreamedAnswer, StreamError, last_event
from priced_server import h100
from sglang.srt.lookahead.prompt_budget import PromptBudget
from sglang.srt.step.price_table import StepShape

TINY = GEOMETRIES["tiny"]


# ---------------------------------------------------------------- loads of long prompts


def test_a_load_fits_into_the_context() -> None:
    assert all(case.input_len + case.output_len <= long_prompts.CONTEXT_LEN for case in CASES)


def test_prompts_of_a_load_share_what_they_are_to_share_and_no_run_repeats_another() -> None:
    case = Case("x", 3, 20, 4, shared_len=12)
    first, again, other = case.prompts(500, 1), case.prompts(500, 1), case.prompts(500, 2)
    assert first == again
    assert [len(prompt) for prompt in first] == [20] * 3
    assert len({tuple(prompt[:12]) for prompt in first}) == 1
    assert len({tuple(prompt[12:]) for prompt in first}) == 3
    assert len({tuple(prompt[:8]) for prompt in first + other}) == 2


@pytest.mark.parametrize(
    ("unit", "expected"), [("s", 4.0), ("all tokens/s", 45.0), ("output tokens/s", 15.0)]
)
def test_a_figure_counts_what_its_unit_says(unit: str, expected: float) -> None:
    assert Case("x", 6, 20, 10, unit).figure(4.0, prefill_s=9.0) == expected


def test_a_decode_step_is_what_all_tokens_but_the_first_take() -> None:
    assert Case.decode(8, "8").figure(3.55, prefill_s=1.0) == pytest.approx(10.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_warm_up_is_short_and_of_the_same_kind(case: Case) -> None:
    warm_up = case.warm_up()
    assert (warm_up.input_len, warm_up.shared_len) == (case.input_len, case.shared_len)
    own = warm_up.input_len - warm_up.shared_len
    assert warm_up.num_prompts * own <= long_prompts.WARM_PROMPT_TOKENS
    assert warm_up.output_len == min(case.output_len, long_prompts.WARM_OUTPUT_LEN)
    small = case.divided(64)
    assert 1 <= small.num_prompts <= case.num_prompts
    assert small.unit != "ms/step" or small.output_len > 1


def test_a_load_is_measured_by_its_median_on_prompts_that_are_always_fresh() -> None:
    seen: list[tuple[int, ...]] = []
    seconds = iter([100.0, 5.0, 1.0, 9.0, 1.0, 6.0, 1.0])  # warm-up, then with and without tokens

    def wall_s(prompts: list[list[int]], num_new: int) -> float:
        seen.extend(map(tuple, prompts))
        return next(seconds)

    case = replace(Case.decode(2, "8", input_len=30), output_len=5)
    row = long_prompts.measure(case, wall_s, 3, 500, itertools.count())
    assert row["values"] == [1000.0, 2000.0, 1250.0]
    assert row["value"] == 1250.0
    assert len(seen) == len(set(seen)) == 2 * 7


# ---------------------------------------------------------------- profiles


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_gather_kv_kernel", "KV gather"),
        ("_prompt_gather_kv_kernel", "KV gather"),
        ("_prompt_attention_kernel", "attention"),
        ("_prompt_merge", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("_extend_kernel", "attention"),
        ("void flashinfer::norm::RMSNormKernel", "other"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_TNT", "matrix products"),
        ("_few_rows_kernel", "matrix products"),
        ("_add_rms_norm_kernel", "norm"),
        ("_rotate_and_store_kernel", "rope and KV write"),
        ("_silu_and_mul_kernel", "activation"),
        ("_round_rows_kernel", "rounding to 8 bits"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("vectorized_elementwise_kernel", "other"),
    ],
)
def test_kernels_are_told_apart_by_their_names(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_every_moment_of_a_profile_counts_once() -> None:
    events = [
        Event(10.0, 20.0, "nvjet_a"),
        Event(15.0, 26.0, "_prompt_b"),  # waits beside the one before it until 20
        Event(16.0, 18.0, "Memcpy"),  # while both run
        Event(30.0, 34.0, "nvjet_a"),
    ]
    found = sums(events, num_steps=2)
    assert found["kinds_us"] == {"attention": 3.0, "copies": 0.0, "matrix products": 7.0}
    assert (found["idle_us"], found["profiled_us"]) == (2.0, 12.0)
    assert sum(found["kinds_us"].values()) + found["idle_us"] == found["profiled_us"]


def test_operations_of_a_prefill_are_those_of_its_weights_and_of_its_pairs_of_tokens() -> None:
    found = flop(LLAMA_8B, 100)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA_8B.hf_config()))
    matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() == 2}
    layers = sum(weight.numel() for name, weight in matrices.items() if ".layers." in name)
    assert found["matrix products"] == 2 * (100 * layers + 4096 * 128256)
    pairs = sum(key <= query for query in range(100) for key in range(100))
    assert found["attention"] == 32 * 32 * pairs * (2 * 128 + 2 * 128)


def test_a_geometry_of_experts_has_the_weights_of_the_model_of_its_name() -> None:
    """A prefill multiplies by those of the chosen experts alone; those of the router are few."""
    with random_model("qwen3-30b-a3b") as folder, torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    assert sum(sizes.values()) == 30_532_122_624
    active = sum(sizes.values()) - experts * (128 - 8) // 128
    embedding = sizes["model.embed_tokens.weight"]
    products = flop(GEOMETRIES["qwen3-30b-a3b"], 1)["matrix products"]
    assert products == pytest.approx(2 * (active - embedding), rel=0.01)


# ---------------------------------------------------------------- gaps beside a long prompt


def test_gaps_are_those_that_touch_the_wait_for_a_first_token() -> None:
    arrivals = [1.0, 1.5, 2.5, 4.0, 4.25]
    assert step_gaps.gaps_ms(arrivals, 2.0, 3.0) == [1000.0, 1500.0]
    assert step_gaps.gaps_ms(arrivals, 2.6, 2.7) == [1500.0]
    assert step_gaps.gaps_ms(arrivals, 5.0, 6.0) == []


def test_gaps_of_all_streams_and_prompts_are_described_together() -> None:
    streams = [[0.0, 1.0, 3.0, 4.0], [0.0, 1.5, 2.0, 4.0]]
    found = step_gaps.describe(streams, [(0.5, 0.6), (2.5, 3.5)])
    assert found == {"p50_ms": 1500.0, "p99_ms": 2000.0, "max_ms": 2000.0}
    assert step_gaps.describe(streams, [(9.0, 9.5)])["max_ms"] == 0.0


# ---------------------------------------------------------------- streams over HTTP

EVENTS = [{"text": "a\n\nb", "meta_info": {"completion_tokens": number}} for number in range(1, 4)]
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(event: bytes) -> bytes:
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


def whole_answer() -> bytes:
    events = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in EVENTS]
    return HEAD + b"".join(map(chunked, [*events, b"data: [DONE]\n\n", b""]))


def answers_of(respond: Callable[[bytes], list[bytes]], num_requests: int) -> list[StreamedAnswer]:
    """Returns what a client gets from a server that writes these pieces, on one connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(num_requests):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.partition(b"Content-Length: ")[2].partition(b"\r\n")[0])
            pieces = respond(await reader.readexactly(length))
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.002)
            if not b"".join(pieces).endswith(b"0\r\n\r\n"):
                break  # as a server that fails in mid-answer
        writer.close()

    async def run() -> list[StreamedAnswer]:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = await StreamClient.connect(server.sockets[0].getsockname()[1])
        try:
            return [await client.generate(b'{"a": 1}') for _ in range(num_requests)]
        finally:
            client.close()
            server.close()

    return asyncio.run(run())


@pytest.mark.parametrize("place", range(13, len(whole_answer()), 9))
def test_events_are_counted_wherever_the_network_cuts_them(place: int) -> None:
    answer = whole_answer()
    found = answers_of(lambda body: [answer[:place], answer[place:]], num_requests=2)
    for one in found:
        assert len(one.events_s) == len(EVENTS)
        assert one.last == EVENTS[-1]
        assert one.sent_s < one.events_s[0] <= one.events_s[-1]
        assert one.first_token_s > 0
        assert len(one.gaps_s) == len(EVENTS) - 1
    assert found[0].events_s[-1] < found[1].sent_s


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        ([b'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "no such thing"}'], "no such thing"),
        ([HEAD + b"5\r\ndata:"], "closed the connection"),
        ([HEAD + chunked(b"data: [DONE]\n\n") + chunked(b"")], "no last event"),
    ],
)
def test_an_answer_that_is_none_is_an_error(pieces: list[bytes], reason: str) -> None:
    with pytest.raises(StreamError, match=reason):
        answers_of(lambda body: pieces, num_requests=1)


def test_an_error_in_a_stream_is_no_answer() -> None:
    with pytest.raises(StreamError, match="broken"):
        last_event(b'data: {"error": "broken"}\n\ndata: [DONE]\n\n')


def test_figures_of_streams_are_of_their_tokens_and_their_waits() -> None:
    last = {"meta_info": {"completion_tokens": 3}}
    answers = [
        StreamedAnswer(1.0, [1.5, 1.75, 2.0], last),
        StreamedAnswer(2.0, [2.25, 2.25, 3.25], last),
    ]
    found = http_load.summarize(answers, seconds=2.0)
    assert found["tok_s"] == 3.0
    assert found["first_token_p50_ms"] == 375.0
    assert found["gap_p50_ms"] == 250.0


# ---------------------------------------------------------------- bounds of streams and lists


def test_ways_to_bound_steps_are_what_their_names_say() -> None:
    made = stream_bounds.budgets(["20", "together 20", "chunks 64"], 8192, h100(), PromptBudget(7))
    switched = stream_bounds.SwitchedBudget(made)
    rooms = {}
    for name in made:
        switched.current = made[name]
        allowance = switched.open(StepShape(64, 1, 64, 64, 6400, 6400), True)
        first = allowance.room_for(0, 5000)
        rooms[name] = first, allowance.room_for(0, 5000, comes_along=True)
    assert (rooms["default"], rooms["0"], rooms["chunks 64"]) == ((7, 7), (5000, 5000), (64, 64))
    assert rooms["20"][0] == rooms["together 20"][0] == rooms["together 20"][1]
    assert rooms["20"][1] < rooms["20"][0] < 1000


def test_fields_of_server_args_have_values_as_in_json() -> None:
    words = ["quantization=fp8", "tp_size=2", "disable_radix_cache=true"]
    expected = {"quantization": "fp8", "tp_size": 2, "disable_radix_cache": True}
    assert long_prompts.server_arguments(words) == expected
