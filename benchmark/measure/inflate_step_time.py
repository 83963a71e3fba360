"""Does a step of the inflated model take as long as one of random weights? (`inflate.py`)

Matrices of zeros can be multiplied faster than numbers. So what must contribute nothing is measured
as zeros and as very small numbers, beside dummy weights of the same geometry: forward passes of 1
and 128 decodes and of one prompt of 512 rows, with logits of the last rows, CUDA graphs where the
server has them, in alternating rounds. Asked: within 1 %.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmark.command import in_turn, make_parser, median_ratio, store
from benchmark.environment import describe_environment
from benchmark.inflate import CHECKED, Filling, inflated_tensors, plan_inflation, write_model
from benchmark.random_model import LLAMA_8B
from sglang.srt.environ import Environ
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_config import load_model_config, resolve_model_path
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.model_loader.loader import WeightPlaces
from sglang.srt.model_loader.weight_files import read_directory
from sglang.srt.platform import Platform
from sglang.srt.processes.runtime_config import resolve
from sglang.srt.server_args import ServerArgs

SHAPES = {1: [1], 128: [1] * 128, 512: [512]}  # rows of a step: rows of each request
ASKED = 0.01  # relative difference from dummy weights
PASSES = 10  # of a measurement
SILENT = {"zeros": 0.0, "1e-12": 1e-12}


def make_runner(folder: Path, silent_std: float | None, tiny: bool) -> ModelRunner:
    """A runner with dummy weights (None), or with the inflated ones."""
    small = load_model_config(str(resolve_model_path("demo")))
    plan = plan_inflation(small, CHECKED if tiny else LLAMA_8B)
    dtype = torch.float32 if tiny else torch.bfloat16
    device = Platform.probe().device
    filling = Filling(dtype=dtype, device=device, silent_std=silent_std or 0.0)
    write_model(small, folder, plan, filling, config_only=True)
    model = load_model_config(str(folder))
    args = ServerArgs(
        model_path=str(folder),
        load_format="dummy",
        dtype=str(dtype).removeprefix("torch."),
        max_running_requests=128,
        max_total_tokens=128 * 64,
        context_length=1024,
    )
    execution = resolve(args, Platform.probe(), model, Environ()).execution
    execution = replace(execution, max_graph_width=min(1, execution.max_graph_width))
    runner = make_runners(execution).target
    if silent_std is not None:
        places = WeightPlaces(runner.model, model)
        for name, tensor in inflated_tensors(dict(read_directory(small.path)), plan, filling):
            place = places.place_of(name, tensor.shape)
            assert place is not None
            place.copy_(tensor)
    return runner


def step_of(runner: ModelRunner, q_lens: list[int], vocab_size: int) -> ForwardBatch:
    """Random tokens that the small model knows, over KV that was never written."""
    device = runner.req_to_token_pool.req_to_token.device
    count, num_rows = sum(q_lens), len(q_lens)
    generator = torch.Generator().manual_seed(count)
    positions = torch.cat([torch.arange(q_len) for q_len in q_lens])
    return ForwardBatch(
        input_ids=torch.randint(3, vocab_size, (count,), generator=generator).to(device),
        positions=positions.to(device),
        slots=torch.arange(1, count + 1, device=device),
        rows=torch.arange(num_rows, device=device),
        q_lens=q_lens,
        kv_lens=torch.tensor(q_lens, device=device),
        kv_len_upper_bounds=q_lens,
        bounds_are_exact=True,
        read_index=torch.tensor(q_lens, device=device).cumsum(0) - 1,
    )


@torch.inference_mode()
def milliseconds(runner: ModelRunner, batch: ForwardBatch) -> float:
    """Of one pass, logits included."""
    start = time.perf_counter()
    for _ in range(PASSES):
        logits = runner.compute_logits(runner.forward(batch).hidden)
    logits[0, 0].item()  # waits for the device
    return (time.perf_counter() - start) / PASSES * 1e3


def measure(runners: dict[str, ModelRunner], rounds: int, vocab_size: int) -> list[dict[str, Any]]:
    """Medians by rows of a step, and of the ratios to dummy weights within a round."""
    rows = []
    for num_rows, q_lens in SHAPES.items():
        batches = {kind: step_of(runner, q_lens, vocab_size) for kind, runner in runners.items()}
        times: dict[str, list[float]] = {kind: [] for kind in runners}
        for number in tqdm(range(rounds + 2), desc=f"{num_rows} rows", unit="round"):
            for kind in in_turn(runners, number):
                found = milliseconds(runners[kind], batches[kind])
                if number > 1:
                    times[kind].append(found)
        ratios = {kind: median_ratio(found, times["dummy"]) for kind, found in times.items()}
        medians = {kind: round(statistics.median(found), 4) for kind, found in times.items()}
        rows.append({"rows": num_rows, "ms": medians, "ratio_to_dummy": ratios})
    return rows


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = make_parser(__doc__, "inflate_step_time")
    parser.add_argument("--tiny", action="store_true", help="a small target, for a trial on a CPU")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    kinds: dict[str, float | None] = {"dummy": None, **SILENT}
    with tempfile.TemporaryDirectory() as directory:
        runners = {
            kind: make_runner(Path(directory) / kind, std, arguments.tiny)
            for kind, std in tqdm(kinds.items(), desc="models", unit="model")
        }
        vocab_size = load_model_config(str(resolve_model_path("demo"))).vocab_size
        rows = measure(runners, arguments.rounds, vocab_size)
    for row in rows:
        cells = (
            f"{kind} {row['ms'][kind]:.3f} ms {row['ratio_to_dummy'][kind]:.4f}" for kind in kinds
        )
        print(f"{row['rows']:4d} rows: " + ", ".join(cells))
    within = {
        kind: all(abs(row["ratio_to_dummy"][kind] - 1) <= ASKED for row in rows) for kind in SILENT
    }
    print(f"within {ASKED:.0%} of dummy weights: {within}")
    result = {**describe_environment(), "asked": ASKED, "within": within, "rows": rows}
    store(arguments.out, result)


if __name__ == "__main__":
    main()
