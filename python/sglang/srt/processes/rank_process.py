"""The process of a rank beside the first one: `python -m sglang.srt.processes.rank_process`,
started by the launcher like the scheduler's, which has the first rank. It runs its part of every
step that the scheduler's process sends, and draws the same tokens."""

from __future__ import annotations

import logging
import sys

import msgspec

from sglang.srt.distributed.channel import FrameReceiver
from sglang.srt.messages.ipc import Sender
from sglang.srt.messages.requests import ProcessFailed, ProcessReady
from sglang.srt.processes.child_process import (
    configure_logging,
    start_beats,
    start_child_process,
)
from sglang.srt.processes.model_parts import ends_at_once, join_ranks, make_model_parts
from sglang.srt.processes.rank_calls import calls_of
from sglang.srt.processes.tokenizer_flags import tokenizer_from_flags
from sglang.srt.server_args import ServerArgs
from sglang.srt.workers.broadcast_worker import follow

logger = logging.getLogger(__name__)


def main() -> int:
    """Loads its part of the model, says ready, follows until the launcher goes away."""
    child = start_child_process()
    args = msgspec.convert(child.server_args, ServerArgs)
    role = f"rank {child.rank}"
    configure_logging(args.log_level, role)
    launcher: Sender[ProcessReady | ProcessFailed] = Sender(child.addresses.launcher)
    receiver = FrameReceiver(child.addresses.of_rank(child.rank))
    try:
        ranks = join_ranks(args, child.addresses, child.rank)
        assert ranks is not None, "A rank beside the first one."
        cache = child.addresses.private_cache
        parts = make_model_parts(args, tokenizer_from_flags(args), cache, ranks)
    except (ValueError, MemoryError, RuntimeError, OSError) as error:
        logger.debug("The rank cannot start.", exc_info=True)
        launcher.send(ProcessFailed(role=role, message=" ".join(str(error).split())))
        launcher.close()
        return 1
    start_beats(child, receiver, args.watchdog_timeout)
    launcher.send(ProcessReady(role=role))
    with ends_at_once():
        follow(parts.worker, receiver.receive, calls_of(parts.runners, ranks))
    return 1


if __name__ == "__main__":
    sys.exit(main())
