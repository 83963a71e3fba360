"""Measures what it costs the first rank to send a step to another one.

    python -m benchmark.measure.rank_frames

Decode steps of 1, 32 and 128 requests: encoding and handing to the socket, which the first rank
does before each step, and until the other rank has read it.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable

from benchmark.command import make_parser, store
from benchmark.environment import describe_environment
from sglang.srt.distributed.channel import FrameReceiver, FrameSender
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.step.step_ops import StepCounts
from sglang.srt.step.worker import BatchRequest, ScheduleBatch
from sglang.srt.workers.step_frames import StepFrame, decoded, encoded

REPEATS = 1000


def frame_of(num_requests: int) -> StepFrame:
    batch = ScheduleBatch([BatchRequest(row, kv_len_before=500) for row in range(num_requests)])
    return StepFrame(batch, StepPlan(counts=StepCounts.plain(batch)))


def median_us(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def main() -> None:
    arguments, rows = make_parser(__doc__, "rank_frames").parse_args(), []
    with tempfile.TemporaryDirectory() as folder:
        receiver = FrameReceiver(f"ipc://{folder}/rank1")
        sender = FrameSender([f"ipc://{folder}/rank1"])
        for count in (1, 32, 128):
            frame = frame_of(count)
            send = median_us(lambda frame=frame: sender.send(encoded(frame)))  # type: ignore[misc]
            for _ in range(REPEATS):
                decoded(receiver.receive())
            data = encoded(frame)
            read = median_us(lambda data=data: decoded(data))  # type: ignore[misc]
            print(f"{count} requests, {len(data)} bytes: sent in {send:.0f} us, read in {read:.0f}")
            times = {"sent_us": round(send, 1), "read_us": round(read, 1)}
            rows.append({"requests": count, "bytes": len(data), **times})
    store(arguments.out, {**describe_environment(), "rows": rows})


if __name__ == "__main__":
    main()
