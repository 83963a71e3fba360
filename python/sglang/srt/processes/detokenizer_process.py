"""The detokenizer's process: `python -m sglang.srt.processes.detokenizer_process`, started by the
launcher, which writes one line of JSON (`ChildConfig`) to its standard input."""

from __future__ import annotations

import sys

from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.managers.detokenizer_manager import DetokenizerManager, run_loop
from sglang.srt.messages.control import HealthPing
from sglang.srt.messages.ipc import Receiver, Sender
from sglang.srt.messages.requests import (
    BatchStrOutput,
    ProcessFailed,
    ProcessReady,
    ToDetokenizer,
)
from sglang.srt.model_config import ModelPathError
from sglang.srt.processes.child_process import (
    configure_logging,
    start_beats,
    start_child_process,
)
from sglang.srt.processes.tokenizer_flags import tokenizer_from_flags
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import TokenizerError


def main() -> int:
    """Loads the tokenizer, if there is one, says ready, serves until the launcher goes away."""
    child = start_child_process()
    args = ServerArgs(**child.server_args)
    configure_logging(args.log_level, "detokenizer")
    launcher: Sender[ProcessReady | ProcessFailed] = Sender(child.addresses.launcher)
    try:
        tokenizer = tokenizer_from_flags(args)
    except (TokenizerError, ModelPathError) as error:
        launcher.send(ProcessFailed(role="detokenizer", message=str(error)))
        launcher.close()
        return 1
    receiver: Receiver[ToDetokenizer] = Receiver(child.addresses.detokenizer, ToDetokenizer)
    frontend: Sender[BatchStrOutput | HealthPing] = Sender(child.addresses.frontend)
    keep_out_of_collections()
    start_beats(child, receiver, args.watchdog_timeout)
    launcher.send(ProcessReady(role="detokenizer"))
    run_loop(receiver, DetokenizerManager(tokenizer, frontend.send))
    return 0


if __name__ == "__main__":
    sys.exit(main())
