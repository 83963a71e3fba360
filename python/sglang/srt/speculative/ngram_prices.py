"""What searching for n-grams costs: it takes the place of a head in the prices of rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from sglang.srt.model_executor.cuda_graph_runner import capture_graph
from sglang.srt.model_executor.measured_times import Launch, gpu_times_ms, shortest
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.ngram_memory import NO_TAG, NOT_A_TOKEN, NgramMemory
from sglang.srt.step.price_table import FREE, Curve, DraftPrices, PriceTable, no_graphs
from sglang.srt.step.request_rows import RequestRows

SEARCH_REQUESTS = (1, 8, 32, 64, 128, 256, 512)
SEARCH_TOKENS = 2048  # of each request's own text, at most
NUM_TOKENS = 64  # different ones: a search stops where a token differs, so it may not be at once
REPEATS = 3
CPU_BUDGET_S = 0.2


def search_prices(search_ms: Curve, max_drafts: int) -> DraftPrices:
    """Prices of a head whose pass over the target's rows is free, whose first draft costs the
    search of so many requests, and whose others cost nothing."""
    extend = PriceTable(find=no_graphs, graphs_ms={}, eager=FREE, head=search_ms)
    return DraftPrices(extend, dict.fromkeys(range(1, max_drafts), FREE))


@torch.inference_mode()
def measure_search(
    runner: ModelRunner,
    state: RequestRows,
    memory: NgramMemory,
    search: Callable[[torch.Tensor], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Curve:
    """Milliseconds of a search by requests, in a full memory and texts of some length. Before there
    are any requests; what it writes for that is undone.

    Args:
        runner: of the target; has graphs that the search may be part of, or none.
        search: for rows [R] of the token table. It may overwrite their tokens.
    """
    device, most = state.tokens.device, state.num_rows
    generator = torch.Generator(device).manual_seed(0)
    tokens = torch.randint(NUM_TOKENS, state.tokens.shape, generator=generator, device=device)
    state.tokens.copy_(tokens)
    state.num_tokens[:most] = min(SEARCH_TOKENS, state.tokens.shape[1] - state.max_pending)
    slots = torch.randint(NUM_TOKENS, memory.tokens.shape, generator=generator, device=device)
    memory.tokens.copy_(slots)
    memory.tags.fill_(1)
    memory.row_tags.fill_(1)
    sizes = sorted({*(size for size in SEARCH_REQUESTS if size < most), most})
    try:
        return shortest(_times(runner, sizes, device, search, clock))
    finally:
        state.tokens.zero_()
        state.num_tokens[:most] = 1
        memory.tokens.fill_(NOT_A_TOKEN)
        memory.tags.fill_(NO_TAG)
        memory.row_tags.fill_(NO_TAG)


def _times(
    runner: ModelRunner,
    sizes: Sequence[int],
    device: torch.device,
    search: Callable[[torch.Tensor], None],
    clock: Callable[[], float],
) -> dict[int, list[float]]:
    """Milliseconds of each run, by requests. On a CPU larger sizes are left out once that has taken
    long enough."""
    times: dict[int, list[float]] = {}
    begin, graphs = clock(), runner.graph_memory
    for size in sizes:
        rows = torch.arange(size, device=device)
        if device.type == "cpu":
            if times and clock() - begin > CPU_BUDGET_S:
                break
            times[size] = [_once_ms(search, rows, clock) for _ in range(REPEATS)]
            continue
        launch: Launch = partial(search, rows)
        if graphs is not None:
            graph, _ = capture_graph(graphs, launch)
            launch = graph.replay
        times[size] = gpu_times_ms(launch, REPEATS)
    return times


def _once_ms(
    search: Callable[[torch.Tensor], None], rows: torch.Tensor, clock: Callable[[], float]
) -> float:
    start = clock()
    search(rows)
    return (clock() - start) * 1e3
