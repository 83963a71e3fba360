"""The process that works on grammars: `python -m sglang.srt.constrained.grammar_process`.

A grammar comes from a client. Compiling it, or finding what may come next, is native code that no
thread can be stopped in; some grammars take minutes, and some all of the stack. So that happens
here, under limits of the system, and the parent ends a process that does not answer.

Front ends have such processes for checks (`grammar_check.py`), a scheduler has one for masks
(`grammar_sessions.py`). All of it has low priority but masks that are quick.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import BinaryIO

import msgspec

from sglang.srt.constrained.grammar_messages import (
    MAX_SLOW_MASKS,
    CheckGrammar,
    CloseGrammar,
    GrammarSetup,
    Masks,
    Opened,
    OpenGrammar,
    Reply,
    Request,
    Verdict,
    WantedMasks,
)
from sglang.srt.constrained.matchers import (
    GrammarCompiler,
    GrammarError,
    LibraryPanic,
    Matcher,
)
from sglang.srt.framed_process import (
    MIB,
    limit_memory,
    limit_time,
    lower_priority,
    read,
    resident_mib,
    write,
)
from sglang.srt.sampling.grammar import Grammar
from sglang.srt.tokenizer import TokenizerError, read_tokenizer_json

NUM_KEPT = 64  # compiled grammars, those used last
KEPT_SHARE = 0.25  # of the memory limit; beyond, none is kept: they grow while they are used
NUM_QUICK_THREADS = 2  # a mask that takes long for the first time leaves one for the others
THREAD_STACK_BYTES = 64 * MIB  # more than a main thread's: what passed a check is sure to pass here


class GrammarWork:
    """Checks in the main thread, compiles for `OpenGrammar` in another one, and makes masks in
    further ones, so that none waits for what takes long: the library lets other threads run."""

    def __init__(self, setup: GrammarSetup, replies: BinaryIO) -> None:
        self._setup = setup
        self._replies = replies
        self._writing = threading.Lock()
        threading.stack_size(THREAD_STACK_BYTES)
        self._compiling = ThreadPoolExecutor(1, initializer=lower_priority)
        self._quick = ThreadPoolExecutor(NUM_QUICK_THREADS)
        self._slow = ThreadPoolExecutor(MAX_SLOW_MASKS, initializer=lower_priority)
        self._compiler: GrammarCompiler | None = None
        self._kept: OrderedDict[Grammar, Matcher] = OrderedDict()
        self._sessions: dict[int, Future[Matcher]] = {}

    def handle(self, request: Request) -> None:
        """Answers a request; but for a `CheckGrammar` later."""
        if isinstance(request, CheckGrammar):
            self._reply(self._check(request.grammar))
        elif isinstance(request, OpenGrammar):
            opened = self._compiling.submit(self._open, request)
            self._sessions[request.session] = opened
        elif isinstance(request, CloseGrammar):
            self._sessions.pop(request.session).cancel()
        else:
            threads = self._slow if request.is_slow else self._quick
            opened = self._sessions[request.session]
            done = threads.submit(lambda: self._reply(self._masks(request, opened)))
            done.add_done_callback(_end_on_error)

    def _check(self, grammar: Grammar) -> Verdict:
        lower_priority()
        try:
            compiler = self._get_compiler()
            limit_time(self._setup.max_check_seconds)
            compiler.check(grammar)
        except GrammarError as error:
            return Verdict(str(error), isinstance(error, LibraryPanic))
        except MemoryError:
            return Verdict(f"takes more than {self._setup.max_memory_mib} MiB of memory")
        return Verdict()

    def _open(self, request: OpenGrammar) -> Matcher:
        """In the compiling thread."""
        try:
            matcher = self._compiled(request.grammar).copy()
            matcher.consume(request.tokens)
            return matcher
        finally:
            self._reply(Opened(request.session))

    def _compiled(self, grammar: Grammar) -> Matcher:
        kept = self._kept.pop(grammar, None) or self._get_compiler().compile(grammar)
        if resident_mib() > self._setup.max_memory_mib * KEPT_SHARE:
            self._kept.clear()  # what no request uses is freed
        self._kept[grammar] = kept
        if len(self._kept) > NUM_KEPT:
            self._kept.popitem(last=False)
        return kept

    def _masks(self, wanted: WantedMasks, opened: Future[Matcher]) -> Masks:
        begin, bitmask = time.thread_time(), b""
        error, has_panicked = None, False
        try:
            matcher = opened.result()
            matcher.consume(wanted.tokens)
            bitmask = matcher.masks(wanted.drafts, wanted.parents)
        except GrammarError as found:
            error, has_panicked = str(found), isinstance(found, LibraryPanic)
        except MemoryError:
            error = f"it takes more than {self._setup.max_memory_mib} MiB of memory"
        seconds = time.thread_time() - begin
        return Masks(wanted.session, bitmask, error, has_panicked, seconds)

    def _get_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            setup = self._setup
            try:
                text = read_tokenizer_json(setup.tokenizer_path)
            except TokenizerError as error:
                raise GrammarError(f"the tokenizer cannot be used: {error}") from None
            self._compiler = GrammarCompiler(
                text, setup.vocab_size, setup.eos_token_ids, setup.never_allowed
            )
        return self._compiler

    def _reply(self, reply: Reply) -> None:
        with self._writing:
            write(self._replies, msgspec.msgpack.encode(reply))


def _end_on_error(work: Future[None]) -> None:
    """Ends the process if what a thread did failed: it would not be heard of."""
    error = work.exception()
    if error is not None:
        traceback.print_exception(error)
        os._exit(1)


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = msgspec.msgpack.decode(read(requests) or b"", type=GrammarSetup)
    limit_memory(setup.max_memory_mib)
    work = GrammarWork(setup, replies)
    decoder = msgspec.msgpack.Decoder(Request)
    while (raw := read(requests)) is not None:
        work.handle(decoder.decode(raw))


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
    os._exit(0)  # whatever is still compiled is no longer wanted
