"""Weight updates and memory: read beside the running engine, taken over at rest, all or nothing.

Reading, checking and receiving happen in a thread, so the engine answers and generates meanwhile.
The weights that serve change only in `_take_over`, when running requests have finished or are kept
from running. So an update that fails leaves the old weights serving, and a session that is not
committed changes nothing.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from sglang.srt.managers.control_messages import (
    ControlReply,
    FromBytes,
    FromDirectory,
    FromGroup,
    InitWeightsUpdateGroupReqInput,
    UpdateWeightsReq,
    UpdateWeightVersionReq,
    WeightGroupReq,
    WeightSessionReq,
    WeightSource,
)
from sglang.srt.managers.engine_state import EngineState, RestQueue
from sglang.srt.managers.request_lifecycle import RequestLifecycle
from sglang.srt.model_executor.weight_group import TensorSpec, WeightGroup
from sglang.srt.model_executor.weight_store import StagedWeights, WeightUpdateError

logger = logging.getLogger(__name__)

POLL_S = 0.02  # how often a waiting scheduler looks whether reading is done
BROKEN = (
    "A weight update failed half-way; update all weights with update_weights_from_disk, or restart."
)


class ModelWeights(Protocol):
    """The weights of the running model; see `model_executor.weight_store.WeightStore`."""

    def from_directory(self, path: str) -> StagedWeights: ...

    def from_file(self, path: str) -> StagedWeights: ...

    def from_safetensors(self, data: bytes) -> StagedWeights: ...

    def from_tensors(self, tensors: Any) -> StagedWeights: ...

    def apply(self, staged: StagedWeights) -> None: ...


@dataclass(slots=True)
class _Job:
    """Reading that goes on in the thread, and what follows."""

    future: Future[Any]
    call_id: int
    then: Callable[[Any], None]


@dataclass(slots=True)
class _Session:
    """An update that has not been taken over, of one part or of several.

    Attributes:
        is_complete: it has all weights of the model.
    """

    staged: dict[str, torch.Tensor] = field(default_factory=dict)
    weight_version: str | None = None
    is_complete: bool = False


class WeightControl:
    """Handles everything that changes weights or their label.

    Args:
        reply: sends a message to the front end.
    """

    def __init__(
        self,
        weights: ModelWeights,
        state: EngineState,
        lifecycle: RequestLifecycle,
        rest: RestQueue,
        reply: Callable[[Any], None],
    ) -> None:
        self._weights = weights
        self._state = state
        self._lifecycle = lifecycle
        self._rest = rest
        self._reply = reply
        self._session: _Session | None = None
        self._groups: dict[str, WeightGroup] = {}
        self._jobs: deque[_Job] = deque()
        self._held: list[Callable[[], None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self.handlers: dict[type, Callable[[Any], None]] = {
            UpdateWeightsReq: self._update,
            WeightSessionReq: lambda message: self._in_turn(message, self._change_session),
            UpdateWeightVersionReq: lambda message: self._in_turn(message, self._relabel),
            WeightGroupReq: self._change_group,
        }

    @property
    def is_busy(self) -> bool:
        """Whether `tick` must be called again soon."""
        return bool(self._jobs or self._held)

    def tick(self) -> None:
        """Goes on with what has been read, in the order it was asked for, and with what has waited
        for requests to end."""
        while self._jobs and self._jobs[0].future.done():
            job = self._jobs.popleft()
            try:
                result = job.future.result()
            except WeightUpdateError as error:
                self._answer(job.call_id, str(error))
            except Exception as error:  # the old weights serve on
                logger.exception("A weight update failed.")
                self._answer(job.call_id, f"The update failed: {type(error).__name__}: {error}")
            else:
                self._rest.add(functools.partial(job.then, result))
        if self._held and not self._has_running:
            for work in self._held:
                self._rest.add(work)
            self._held = []

    # ---------------------------------------------------------------- updates

    def _update(self, message: UpdateWeightsReq) -> None:
        session = self._session
        self._start(
            message.call_id,
            functools.partial(self._read, message.source),
            lambda staged: self._finish_update(message, session, staged),
        )

    def _read(self, source: WeightSource) -> StagedWeights:
        """In the thread: the checked weights of a source."""
        if isinstance(source, FromDirectory):
            return self._weights.from_directory(source.path)
        if isinstance(source, FromBytes):
            return self._weights.from_safetensors(source.data)
        if isinstance(source, FromGroup):
            return self._receive(source)
        try:
            return self._weights.from_file(source.path)
        finally:
            if source.delete:
                Path(source.path).unlink(missing_ok=True)

    def _receive(self, source: FromGroup) -> StagedWeights:
        group = self._groups.get(source.group_name)
        if group is None:
            raise WeightUpdateError(
                f"There is no group {source.group_name!r}; call init_weights_update_group first."
            )
        parts = zip(source.names, source.dtypes, source.shapes, strict=True)
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in parts]
        return self._weights.from_tensors(group.receive(specs))

    def _finish_update(
        self, message: UpdateWeightsReq, session: _Session | None, staged: StagedWeights
    ) -> None:
        """At rest: stages for the session in which the update was asked for, or takes over."""
        is_complete = isinstance(message.source, FromDirectory)
        if session is None:
            update = _Session(staged, message.weight_version, is_complete)
            self._when_none_runs(lambda: self._take_over(message, update))
        elif session is not self._session:
            self._answer(message.call_id, "The weight update that this belongs to has ended.")
        else:
            session.staged.update(staged)
            session.weight_version = message.weight_version or session.weight_version
            session.is_complete |= is_complete
            text = f"{len(staged)} weights staged; commit_weight_update takes them over."
            self._answer(message.call_id, "", text, num_tensors=len(staged))

    def _when_none_runs(self, work: Callable[[], None]) -> None:
        """At rest: does it now or, so that no output mixes weights without a pause, as soon as
        running requests have finished."""
        if not self._has_running:
            work()
            return
        self._held.append(work)
        self._state.awaits_end = True
        self._state.publish()

    @property
    def _has_running(self) -> bool:
        return bool(self._lifecycle.running) and self._state.may_launch

    def _take_over(
        self,
        message: UpdateWeightsReq | WeightSessionReq,
        update: _Session,
    ) -> None:
        """At rest: the staged weights serve from here on."""
        self._state.awaits_end = bool(self._held)
        if self._state.broken and not update.is_complete:
            self._answer(message.call_id, self._state.broken)
            return
        try:
            self._weights.apply(update.staged)
        except WeightUpdateError as error:
            self._answer(message.call_id, str(error))
            return
        except Exception:
            logger.exception("Weights could not be taken over; generation stops.")
            self._state.broken = BROKEN
            self._lifecycle.ledger.begin_epoch()
            self._answer(message.call_id, BROKEN, status_code=500)
            return
        self._state.broken = ""
        self._lifecycle.ledger.begin_epoch()
        if update.weight_version is not None:
            self._lifecycle.set_weight_version(update.weight_version)
        fields = {"num_tensors": len(update.staged), **self._flush(message.flush_cache)}
        self._answer(message.call_id, "", "Weights updated.", **fields)

    def _flush(self, is_wanted: bool) -> dict[str, Any]:
        """Drops the old weights' prefixes. While requests hold KV they stay, but never match."""
        if not is_wanted:
            return {}
        if self._lifecycle.holds_kv:
            return {"flushed_items": 0, "flush_note": "Requests hold KV; old entries never match."}
        return {"flushed_items": self._lifecycle.ledger.flush()}

    def _change_session(self, message: WeightSessionReq) -> None:
        session = self._session
        if message.action == "begin":
            if session is not None:
                problem = "A weight update has begun already; commit it or roll it back."
                self._answer(message.call_id, problem)
                return
            self._set_session(_Session())
            self._lifecycle.ledger.begin_epoch()
            self._answer(message.call_id, "", "Weight update begun; the old weights serve on.")
        elif session is None:
            self._answer(message.call_id, "No weight update has begun; call begin_weight_update.")
        elif message.action == "rollback":
            self._set_session(None)
            self._lifecycle.ledger.begin_epoch()
            self._answer(message.call_id, "", "Weight update rolled back; the old weights serve.")
        elif not session.staged:
            self._answer(message.call_id, "Nothing has been staged; update weights or roll back.")
        else:
            self._set_session(None)
            session.weight_version = message.weight_version or session.weight_version
            self._when_none_runs(lambda: self._take_over(message, session))

    def _set_session(self, session: _Session | None) -> None:
        self._session = session
        self._state.in_weight_session = session is not None

    def _relabel(self, message: UpdateWeightVersionReq) -> None:
        self._lifecycle.set_weight_version(message.new_version)
        self._answer(
            message.call_id, "", "Weight version updated.", new_version=message.new_version
        )

    # ---------------------------------------------------------------- groups

    def _change_group(self, message: WeightGroupReq) -> None:
        work = functools.partial(self._swap_group, message.group_name, message.join)
        text = "Left the group." if message.join is None else "Joined the group."
        self._start(message.call_id, work, lambda _: self._answer(message.call_id, "", text))

    def _swap_group(self, name: str, join: InitWeightsUpdateGroupReqInput | None) -> None:
        """In the thread: leaves the group of that name, and joins it anew."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        elif join is None:
            raise WeightUpdateError(f"There is no group {name!r} to leave.")
        if join is not None:
            self._groups[name] = WeightGroup.join(
                master_address=join.master_address,
                master_port=join.master_port,
                rank=join.rank_offset,
                world_size=join.world_size,
                group_name=name,
                backend=join.backend,
                timeout_s=join.timeout_s,
            )

    # ---------------------------------------------------------------- replies

    def _in_turn(self, message: Any, work: Callable[[Any], None]) -> None:
        """Does it at rest, after everything that was asked for before it."""
        self._start(message.call_id, lambda: None, lambda _: work(message))

    def _start(self, call_id: int, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self._jobs.append(_Job(self._thread.submit(work), call_id, then))

    def _answer(
        self, call_id: int, problem: str, text: str = "", status_code: int = 400, **fields: Any
    ) -> None:
        self._state.publish()
        lifecycle = self._lifecycle
        fields = {
            "weight_version": lifecycle.weight_version,
            "weight_epoch": lifecycle.ledger.epoch,
            "num_paused_requests": len(lifecycle.running) + len(lifecycle.waiting),
            **fields,
        }
        self._reply(
            ControlReply(
                call_id=call_id,
                success=not problem,
                message=problem or text,
                status_code=status_code,
                fields=fields,
            )
        )
