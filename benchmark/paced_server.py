"""A server without a model: its scheduler gives each running request a random token at a fixed
pace, as a GPU would. What its other processes take is what HTTP and text cost.

    python -m benchmark.paced_server --step-ms 6.9 --model-path FOLDER ...     flags of the server
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.entrypoints.children import CHILD_MODULES, started_children
from sglang.srt.entrypoints.server_process import run_server
from sglang.srt.messages.control import AbortReq, HealthPing
from sglang.srt.messages.ipc import ChildConfig, Receiver, Sender
from sglang.srt.messages.requests import (
    BatchTokenIDOutput,
    DecodeOptions,
    FinishReason,
    ProcessReady,
    ReqOutput,
    SchedulerInfo,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from sglang.srt.model_config import ModelConfig, load_model_config
from sglang.srt.processes.child_process import start_child_process
from sglang.srt.server_args import ServerArgs, parse_cli

STEP_MS_VARIABLE = "PACED_STEP_MS"
FIRST_PLAIN_ID = 3
KV_TOKENS = 1 << 20  # said to be there; nothing is stored


@dataclass
class Running:
    """A request and how many tokens it has."""

    request: TokenizedGenerateReqInput
    num_tokens: int = 0

    def next_output(self, token_id: int) -> ReqOutput:
        """The news of a step: one more token, and the end with the last."""
        is_first = self.num_tokens == 0
        self.num_tokens += 1
        is_last = self.num_tokens >= self.request.sampling_params.max_new_tokens
        reason = FinishReason(type="length", length=self.num_tokens) if is_last else None
        return self._output([token_id], reason, is_first)

    def end(self) -> ReqOutput:
        """The news of an abort."""
        return self._output([], FinishReason(type="abort"), self.num_tokens == 0)

    def _output(
        self, token_ids: list[int], reason: FinishReason | None, is_first: bool
    ) -> ReqOutput:
        params = self.request.sampling_params
        options = DecodeOptions(params.skip_special_tokens, [], params.no_stop_trim)
        return ReqOutput(
            req_id=self.request.req_id,
            token_ids=token_ids,
            finish_reason=reason,
            prompt_tokens=len(self.request.input_ids),
            completion_tokens=self.num_tokens,
            cached_tokens=0,
            num_retractions=0,
            options=options if is_first else None,
            weight_spans=[("default", 0)] if is_first else [],
        )


class PacedScheduler:
    """Steps at fixed times, all requests in each.

    Args:
        step_s: from one step to the next.
        vocab_size: of the random tokens.
    """

    def __init__(self, step_s: float, vocab_size: int, inbox: Any, outbox: Any) -> None:
        self._step_s = step_s
        self._vocab_size = vocab_size
        self._inbox = inbox
        self._outbox = outbox
        self._chooser = random.Random(0)
        self._running: dict[int, Running] = {}

    def run(self) -> None:
        """Until the process ends."""
        due_s = time.perf_counter()
        while True:
            if not self._running:
                self._inbox.wait(None)
                due_s = time.perf_counter()
            due_s += self._step_s
            while (left_s := due_s - time.perf_counter()) > 0:
                self._inbox.wait(left_s)
                self.take_in()
            self.take_in()
            self.step()

    def take_in(self) -> None:
        """What the front end has sent."""
        for message in self._inbox.drain():
            if isinstance(message, TokenizedGenerateReqInput):
                self._running[message.req_id] = Running(message)
            elif isinstance(message, AbortReq):
                running = [self._running.pop(i) for i in message.req_ids if i in self._running]
                if running:
                    self._outbox.send(BatchTokenIDOutput(outputs=[one.end() for one in running]))
            elif isinstance(message, HealthPing):
                self._outbox.send(message)

    def step(self) -> None:
        """A token for each request."""
        last_id = self._vocab_size - 1
        outputs = [
            one.next_output(self._chooser.randint(FIRST_PLAIN_ID, last_id))
            for one in self._running.values()
        ]
        for output in outputs:
            if output.finish_reason is not None:
                del self._running[output.req_id]
        if outputs:
            self._outbox.send(BatchTokenIDOutput(outputs=outputs))


def _summary(args: ServerArgs, model: ModelConfig) -> dict[str, Any]:
    """What the start-up summary and `/server_info` say: there is no model and no memory."""
    return {
        **dict.fromkeys(("device", "dtype", "attention_backend"), "none"),
        **dict.fromkeys(("num_threads", "page_size", "num_draft_tokens", "draft_topk"), 1),
        **dict.fromkeys(("num_parameters", "kv_bytes_per_token", "num_draft_steps"), 0),
        **dict.fromkeys(("enable_overlap", "use_radix_cache"), False),
        "draft_models": [],
        "draft_tiers": [],
        "path": str(model.path),
        "architecture": model.architecture,
        "context_len": model.context_len,
        "max_total_num_tokens": KV_TOKENS,
        "kv_size_reason": "nothing is stored",
        "max_queued_requests": args.max_queued_requests,
        "schedule": {"splits_prompts": False},
    }


def run_as_child(child: ChildConfig) -> None:
    """The scheduler of a server that `main` has started."""
    args = msgspec.convert(child.server_args, ServerArgs)
    model = load_model_config(args.model_path)
    inbox: Receiver[Any] = Receiver(child.addresses.scheduler, ToScheduler)
    outbox: Sender[Any] = Sender(child.addresses.detokenizer)
    info = SchedulerInfo(
        vocab_size=model.vocab_size,
        context_len=model.context_len,
        max_total_num_tokens=KV_TOKENS,
        max_req_len=model.context_len,
        max_req_len_reason="the model's context length",
        max_running_requests=args.max_running_requests,
        eos_token_ids=list(model.eos_token_ids),
        resolved=_summary(args, model),
    )
    launcher: Sender[ProcessReady] = Sender(child.addresses.launcher)
    launcher.send(ProcessReady(role="scheduler", scheduler=info))
    step_s = float(os.environ[STEP_MS_VARIABLE]) / 1e3
    PacedScheduler(step_s, model.vocab_size, inbox, outbox).run()


def main(argv: list[str]) -> int:
    """Runs the server; returns its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], add_help=False)
    parser.add_argument("--step-ms", type=float, required=True)
    own, flags = parser.parse_known_args(argv)
    os.environ[STEP_MS_VARIABLE] = str(own.step_ms)
    modules = {**CHILD_MODULES, "scheduler": "benchmark.paced_server"}
    with started_children(0, modules) as waiting:
        return run_server(parse_cli(flags), waiting)


if __name__ == "__main__":
    # The launcher starts its children without arguments.
    if len(sys.argv) > 1:
        sys.exit(main(sys.argv[1:]))
    run_as_child(start_child_process())
