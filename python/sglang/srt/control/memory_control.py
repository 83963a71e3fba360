"""Releases and resumes device memory by tag."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.control.engine_state import BetweenStepsQueue, EngineState
from sglang.srt.messages.control import ControlReply, MemoryOccupationReq
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle

logger = logging.getLogger(__name__)

KV_TAG = "kv_cache"
WEIGHTS_TAG = "weights"
GRAPH_TAG = "cuda_graph"  # no part has this tag where the server has no graphs
NOTHING = "nothing; graphs, if there are any, come and go with all other memory"


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """Memory that can be given back and taken again."""

    release: Callable[[], None]
    restore: Callable[[], None]


class MemoryControl:
    """Handles release and resume. A call that cannot be carried out as a whole is refused. If
    memory turns out to be short, the answer says which parts are released.

    Args:
        parts: all parts, by tag.
        reply: sends a message to the front end.
    """

    def __init__(
        self,
        parts: Mapping[str, MemoryPart],
        state: EngineState,
        lifecycle: RequestLifecycle,
        between_steps: BetweenStepsQueue,
        reply: Callable[[Any], None],
    ) -> None:
        self._parts = parts
        self._state = state
        self._lifecycle = lifecycle
        self._reply = reply
        self.handlers: dict[type, Callable[[Any], None]] = {
            MemoryOccupationReq: lambda message: between_steps.add(lambda: self._change(message))
        }

    def _change(self, message: MemoryOccupationReq) -> None:
        releases, tags = message.action == "release", message.tags
        if tags is None:
            tags = [tag for tag in self._parts if (tag in self._state.released) != releases]
        others = [tag for tag in dict.fromkeys(tags) if tag != GRAPH_TAG]
        problem = "" if set(tags) == {GRAPH_TAG} else self._problem(others, releases)
        tags = self._with_graphs(others, releases)
        problem = problem or (self._kv_problem(tags) if releases else "")
        if not problem:
            problem = self._change_parts(tags, releases)
        verb = "released" if releases else "resumed"
        self._answer(message, tags, problem, f"Memory {verb}: {', '.join(tags) or NOTHING}.")

    def _with_graphs(self, others: list[str], releases: bool) -> list[str]:
        """Returns all parts that change, in their order; `others` are those that are no graphs.
        Graphs hold addresses of all other memory. So they are released before any other part and
        come back after the last one, named in the call or not. They are left alone if they already
        are as asked for, or cannot come back yet."""
        released = self._state.released
        if GRAPH_TAG not in self._parts or (GRAPH_TAG in released) == releases:
            return others
        if releases:
            return [GRAPH_TAG, *others]
        return others if released - {GRAPH_TAG, *others} else [*others, GRAPH_TAG]

    def _answer(
        self, message: MemoryOccupationReq, tags: list[str], problem: str, text: str
    ) -> None:
        self._state.publish()
        self._reply(
            ControlReply(
                call_id=message.call_id,
                success=not problem,
                message=problem or text,
                fields={"tags": tags, "released": sorted(self._state.released)},
            )
        )

    def _change_parts(self, tags: list[str], releases: bool) -> str:
        """Changes the parts; returns why that failed, or an empty text."""
        for tag in tags:
            try:
                self._change_part(tag, releases)
            except (RuntimeError, ValueError, OSError) as error:
                logger.exception("The memory of %s cannot be changed.", tag)
                return f"tags: {tag!r}: {str(error).splitlines()[0]}"
        return ""

    def _change_part(self, tag: str, releases: bool) -> None:
        if not releases:
            self._parts[tag].restore()
            self._state.released.discard(tag)
            return
        if tag == KV_TAG:
            self._lifecycle.ledger.flush()
        self._parts[tag].release()
        self._state.released.add(tag)

    def _problem(self, tags: list[str], releases: bool) -> str:
        """Returns why the call cannot be carried out; empty if it can."""
        if not tags:
            return "Everything is released already." if releases else "Nothing is released."
        for tag in tags:
            if tag not in self._parts:
                return f"tags: {tag!r} is not held here; there are {', '.join(self._parts)}."
            if releases and tag in self._state.released:
                return f"tags: {tag!r} is released already; resume it first."
            if not releases and tag not in self._state.released:
                return f"tags: {tag!r} is not released."
        return ""

    def _kv_problem(self, tags: list[str]) -> str:
        lifecycle = self._lifecycle
        if not lifecycle.holds_kv:
            return ""
        counts = f"{len(lifecycle.running)} requests hold KV"
        if KV_TAG in tags:
            return f"tags: {counts}; pause with mode retract or abort first."
        if self._state.may_launch:
            return f"tags: {counts} and run; pause generation first."
        return ""
