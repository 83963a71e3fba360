"""Tests what benchmark/measure/expert_model.py counts, and its arithmetic."""

from __future__ import annotations

import random

import pytest
import torch

from benchmark.measure.expert_model import (
    COPY_BYTES_PER_S,
    STEPS,
    Choices,
    ModelBytes,
    Running,
    decode_row,
)
from benchmark.random_model import GEOMETRIES, ExpertGeometry
from benchmark.report.document_tables import expert_model
from sglang.srt.layers.ops.chosen_experts import choose_experts

TINY = GEOMETRIES["tiny-experts"]
assert isinstance(TINY, ExpertGeometry)


def test_choices_are_counted_as_one_by_one() -> None:
    chooser, used = random.Random(0), list[int]()
    choices, uses = Choices(3, torch.zeros(2, 8)), [[0] * 8 for _ in range(2)]
    for layer in (0, 1, 0, 1):
        rows = [[chooser.randrange(4) for _ in range(8)] for _ in range(5)]  # with ties
        choices.add(layer, torch.tensor(rows).bfloat16())
        best = [sorted(range(8), key=lambda at: (-row[at], at))[:3] for row in rows]
        used.append(len({expert for row in best for expert in row}))
        for expert in (expert for row in best for expert in row):
            uses[layer][expert] += 1
    assert choices.uses.tolist() == uses
    assert choices.num_used == used
    shares = [count / 30 for layer in uses for count in layer]
    assert choices.shares() == pytest.approx(
        {"mean_share": 1 / 8, "least_share": min(shares), "largest_share": max(shares)}
    )


def test_choices_without_ties_are_those_of_the_layers() -> None:
    scores = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    choices = Choices(2, torch.zeros(1, 8))
    choices.add(0, scores)
    chosen = choose_experts(scores, 2, normalizes=True).experts
    assert choices.uses[0].tolist() == chosen.flatten().bincount(minlength=8).tolist()


def test_a_step_reads_chosen_experts_the_rest_and_kv() -> None:
    needed = ModelBytes(expert=10, rest=1000, kv_token=3, num_expert_layers=4)
    choices = Choices(2, torch.tensor([[3.0, 1.0], [2.0, 2.0]]), [2, 4, 2, 4])
    row = decode_row(32, [7.0, 9.0, 8.0], choices, needed, input_len=100)
    lengths = [100 + step for step in range(1, 3 * STEPS + 1)]  # of a request in each step
    parts = 4 * 10 * 3, 1000, 3 * 32 * sum(lengths) / len(lengths)
    assert row["read_ms"] == pytest.approx(sum(parts) / COPY_BYTES_PER_S * 1e3)
    assert row["ms"] == 8.0
    assert row["over_reading"] == pytest.approx(0.008 / (sum(parts) / COPY_BYTES_PER_S))
    assert (row["least_used"], row["most_used"], row["at_most"]) == (2, 4, 1.3)
    assert (row["least_share"], row["largest_share"]) == (0.25, 0.75)


def test_choices_of_a_running_model_are_those_of_all_rows_of_its_steps() -> None:
    assert isinstance(TINY, ExpertGeometry)
    running = Running("tiny-experts", "cpu", 2)
    choices = running.count(2, TINY)
    assert choices.uses.sum(1).tolist() == [2 * STEPS * TINY.num_chosen] * TINY.num_layers
    assert len(choices.num_used) == STEPS * TINY.num_layers
    needed, item_bytes = ModelBytes.of(running.runner), running.runner.kv_pool.kv[0].itemsize
    assert needed.expert == 3 * TINY.hidden_size * TINY.expert_size * item_bytes
    whole = sum(each.nbytes for each in running.runner.model.parameters())
    embedding = TINY.vocab_size * TINY.hidden_size * item_bytes
    assert needed.rest == whole - embedding - TINY.num_layers * TINY.num_experts * needed.expert
    kv_size = 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim
    assert needed.kv_token == kv_size * item_bytes


def test_the_table_has_a_line_for_each_batch_and_one_for_prompts() -> None:
    needed = ModelBytes(expert=10, rest=1000, kv_token=3, num_expert_layers=4)
    choices = Choices(2, torch.tensor([[3.0, 1.0], [2.0, 2.0]]), [2, 4, 2, 4])
    rows = [decode_row(size, [7.0], choices, needed, 100) for size in (1, 4)]
    rows[0]["over_reading"] = 1.6
    result = {
        "geometry": "of experts",
        "copy_tb_s": 2.96,
        "decodes": rows,
        "prompt_tokens": 4096,
        "prompts": [
            {"geometry": "of experts", "ms": 80.0, "tflop_s": 300.0},
            {"geometry": "dense", "ms": 90.0, "tflop_s": 600.0},
        ],
        "of_dense": 0.5,
        "at_least": 0.6,
    }
    lines = expert_model(result).split("\n")
    assert lines[2] == (
        "| decode step, batch of 1 | 7.00 ms | 3.0 (2 to 4) | 0.00 ms | 1.60 | <= 1.7 | yes |"
    )
    assert lines[3].endswith(" |  |  |")  # nothing is asked of 4
    assert lines[4].startswith(
        "| prompt of 4,096 tokens | 80.0 ms, 300 TFLOP/s |  | dense: 90.0 ms"
    )
    assert lines[4].endswith("| 0.50 | >= 0.6 | **no** |")
    assert "with a batch of 4 it is 25.00% to 75.00%." in lines[6]
