"""Tables of streams and lists under several bounds are what results give."""

from __future__ import annotations

from benchmark.report import stream_tables


def test_ways_to_bound_steps_show_their_rounds() -> None:
    runs = [
        {"tok_s": 6000.0 + n, "first_token_p50_ms": 40, "gap_p50_ms": 19, "gap_p99_ms": 20 + n}
        for n in (0, 2)
    ]
    ways = ["30", "together 30", "chunks 512"]
    row = {"tok_s": 6001.0, "first_token_p50_ms": 40, "gap_p50_ms": 19, "gap_p99_ms": 21}
    result = {
        "clients": 128,
        "input_len": 512,
        "output_len": 128,
        "streams": [{"way": way, **row, "runs": runs} for way in ways],
    }
    text = stream_tables.streams_by_bound(result)
    figures = "6,001 (6,000 to 6,002) | 40 (40 to 40) | 19.0 (19.0 to 19.0) | 21.0 (20.0 to 22.0)"
    assert f"| steps of 30 ms | {figures} |" in text
    assert "| steps of 30 ms, all prompts that fit at once |" in text
    assert "| 512 prompt tokens in each step |" in text


def test_lists_show_what_one_stream_beside_them_takes() -> None:
    row = {
        "name": "16 x (8,192, 129)",
        "alone_s": [4.0, 5.0],
        "unbounded_s": [4.5, 4.7],
        "beside_s": [5.0, 6.0],
        "beside_over_alone": [1.25, 1.2],
    }
    text = stream_tables.lists_beside({"lists": [row]})
    assert "| 16 x (8,192, 129) | 4.50 | 4.60 | 5.50 | 1.225 |" in text
