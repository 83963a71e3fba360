"""The tables of attention apart from a model are what results give."""

from __future__ import annotations

from typing import Any

from benchmark.report import attention_tables

WAYS = ("ours", "ours, gathering", "ours, attention", "triton", "cudnn", "flashinfer")
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
RESULT: dict[str, Any] = {"heads": HEADS, "dtype": "bfloat16", "copy_gb_s": 2960.4}


def times(burst_ms: float, speed: float) -> dict[str, Any]:
    """Sustained, everything takes twice as long."""
    return {
        "first_ms": 47.6,
        "burst_ms": burst_ms,
        "burst_tflop_s": speed,
        "sustained_ms": 2 * burst_ms,
        "sustained_tflop_s": speed / 2,
    }


def prompts(**changes: dict[str, Any]) -> dict[str, Any]:
    ways = {name: times(0.1 + index, 1000.0) for index, name in enumerate(WAYS)}
    row = {"rows": 2048, "prefix": 30000, "ways": {**ways, **changes}}
    return {**RESULT, "prompts": [row], "decodes": []}


def decodes(is_swept: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"requests": 8, "kv_len": 8192, "planned_us": 95.04, "floor_us": 90.66}
    row["tiles_and_splits"] = "16x64, splits 4"
    if is_swept:
        row["variants"] = [{"name": "best", "us": 93.0}, {"name": "other", "us": 99.0}]
    return {**RESULT, "prompts": [], "decodes": [row]}


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_prompt_has_two_lines_with_every_way_in_its_column() -> None:
    text = attention_tables.attention_prompts([prompts()])
    assert text.startswith("ms of a layer (TFLOP/s); 32/8 heads of 128, bfloat16:\n\n| rows over")
    head, _, burst, sustained = text.splitlines()[2:]
    assert cells(head) == [
        "rows over prefix",
        "load",
        "ours, gathering included",
        "gathering",
        "ours, gathered before",
        "cuDNN, gathered before",
        "FlashInfer, gathered before",
        "Triton, paged",
        "cuDNN's first call, ms",
    ]
    shape, in_order = "2,048 over 30,000", ("0.100", "2.100", "4.100", "5.100", "3.100")
    figures = [f"{figure} (1,000)" for figure in in_order]
    assert cells(burst) == [shape, "burst", figures[0], "1.100", *figures[1:], "48"]
    doubled = ("0.200", "4.200", "8.200", "10.200", "6.200")
    figures = [f"{figure} (500)" for figure in doubled]
    assert cells(sustained) == [shape, "sustained", figures[0], "2.200", *figures[1:], ""]


def test_what_could_not_be_measured_is_named_below_with_its_reason() -> None:
    refused = {"not_here": "refused: no such heads"}
    result = prompts(flashinfer={"not_here": "not installed"}, cudnn=refused)
    text = attention_tables.attention_prompts([result])
    _, _, burst, sustained = text.splitlines()[2:6]
    for line in (burst, sustained):
        assert cells(line)[5:7] == ["-", "not installed"]
    assert cells(burst)[8] == "-"
    assert text.endswith(
        "\ncuDNN, gathered before: refused: no such heads.\n"
        "\nFlashInfer, gathered before: not installed.\n"
    )


def test_decodes_stand_beside_their_floor_and_what_is_planned() -> None:
    assert attention_tables.attention_decodes([decodes(is_swept=False)]) == (
        "A layer of a decode step; floor: K and V at 2,960 GB/s, as of a large copy;"
        " 32/8 heads of 128, bfloat16:\n\n"
        "| requests x KV | µs | floor, µs | planned |\n"
        "| --- | --- | --- | --- |\n"
        "| 8 x 8,192 | 95.0 | 90.7 | 16x64, splits 4 |\n"
    )


def test_the_best_of_a_sweep_is_shown_where_there_was_one() -> None:
    text = attention_tables.attention_decodes([decodes(is_swept=True)])
    assert "| planned | best of sweep, µs | by |\n" in text
    assert "| 16x64, splits 4 | 93.0 | best |\n" in text


def test_what_was_left_out_is_said() -> None:
    assert attention_tables.attention_prompts([decodes(True)]) == attention_tables.NONE
    assert attention_tables.attention_decodes([prompts()]) == attention_tables.NONE
