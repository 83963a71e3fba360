"""Weight updates: read beside the running engine, taken over between steps, all or nothing.

Reading, checking and receiving happen in a thread, so the engine answers and generates meanwhile.
The weights that serve change only in `_take_over`, when running requests have finished or a pause
keeps them from running. So a failed update leaves the old weights serving, and a session that is
not committed changes nothing.
"""

from __future__ import annotations

import functools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from sglang.srt.control.engine_state import BetweenStepsQueue, EngineState
from sglang.srt.control.memory_control import WEIGHTS_TAG
from sglang.srt.control.staged_update import StagedUpdate, models_of
from sglang.srt.messages.control import (
    DEFAULT_GROUP,
    DRAFT_MODEL,
    TARGET_MODEL,
    ControlReply,
    FromBytes,
    FromDirectory,
    FromFile,
    FromGroup,
    GroupAddress,
    UpdateWeightsReq,
    UpdateWeightVersionReq,
    WeightGroupReq,
    WeightSessionReq,
)
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from sglang.srt.sent_tensors import SentTensors, WeightSelector
from sglang.srt.weight_sync.sent_memory import opened_tensors
from sglang.srt.weight_sync.weight_group import TensorSpec, WeightGroup
from sglang.srt.weight_sync.weight_reader import (
    DRAFT,
    StagedWeights,
    WeightUpdateError,
)

logger = logging.getLogger(__name__)

WeightMessage = UpdateWeightsReq | WeightSessionReq | UpdateWeightVersionReq | WeightGroupReq
WEIGHT_UPDATE_ABORT_MESSAGE = "The request was aborted for a weight update."
NO_SESSION = "No weight update has begun; call begin_weight_update."
POLL_S = 0.02  # interval at which a waiting scheduler checks whether reading is done
BROKEN = (
    "A weight update failed half-way; update all weights with update_weights_from_disk, or restart."
)


DRAFT_STAYS = (
    " The draft model keeps its own; selector draft changes it, and names that begin with 'draft.'"
    " do in updates of all."
)


class Reader(Protocol):
    """Reads new weights; see `weight_sync.weight_reader.WeightReader`."""

    def from_directory(self, path: str) -> StagedWeights: ...

    def from_file(self, path: str) -> StagedWeights: ...

    def from_safetensors(self, data: bytes) -> StagedWeights: ...

    def from_tensors(self, tensors: Any) -> StagedWeights: ...


class ModelWeights(Protocol):
    """The weights of the running models; see `weight_sync.serving_weights.ServingWeights`."""

    @property
    def has_draft(self) -> bool: ...

    def reader(self, selector: WeightSelector) -> Reader: ...

    def apply(self, staged: StagedWeights) -> None: ...

    def names(self) -> list[str]: ...

    def value_of(self, name: str) -> torch.Tensor | None: ...


@dataclass(slots=True)
class _Job:
    """One call: its work in the thread, and then its work between steps when its turn comes.

    Attributes:
        finish: gets the result of the future.
    """

    message: WeightMessage
    future: Future[Any]
    finish: Callable[[Any], None]


class WeightControl:
    """Handles everything that changes weights or their label, one call after the other.

    Args:
        abort_all: ends all requests, with the message given.
        reply: sends a message to the front end.
    """

    def __init__(
        self,
        weights: ModelWeights,
        state: EngineState,
        lifecycle: RequestLifecycle,
        between_steps: BetweenStepsQueue,
        abort_all: Callable[[str], None],
        reply: Callable[[Any], None],
    ) -> None:
        self._weights = weights
        self._state = state
        self._lifecycle = lifecycle
        self._between_steps = between_steps
        self._abort_all = abort_all
        self._reply = reply
        self._session: StagedUpdate | None = None
        self._half_written: set[str] = set()
        self._groups: dict[str, WeightGroup] = {}
        self._jobs: deque[_Job] = deque()
        self._first_is_due = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self.handlers: dict[type, Callable[[Any], None]] = {
            UpdateWeightsReq: self._update,
            WeightSessionReq: self._change_session,
            UpdateWeightVersionReq: self._relabel,
            WeightGroupReq: self._change_group,
        }

    @property
    def is_busy(self) -> bool:
        """Tells whether `tick` must be called again soon."""
        return bool(self._jobs)

    def tick(self) -> None:
        """Queues the end of the first call for the time between steps, once its weights are read
        and nothing else must come first."""
        if not self._jobs or self._first_is_due or not self._jobs[0].future.done():
            return
        if not (self._state.awaits_end and self._started_requests_run):
            self._first_is_due = True
            self._between_steps.add(self._finish_first)

    def _finish_first(self) -> None:
        self._first_is_due = False
        job = self._jobs[0]
        if job.future.exception() is None and self._must_wait(job):
            self._state.awaits_end = True
            self._lifecycle.mark_to_finish(waiting_too=True)
            self._state.publish()
            return
        self._jobs.popleft()
        self._state.awaits_end = False
        if not self._state.is_draining:
            self._lifecycle.unmark_to_finish()
        try:
            result = job.future.result()
        except WeightUpdateError as error:
            self._answer(job.message.call_id, str(error))
        except Exception as error:  # the old weights serve on
            logger.exception("A weight update failed.")
            self._answer(job.message.call_id, f"It failed: {type(error).__name__}: {error}")
        else:
            job.finish(result)

    def _must_wait(self, job: _Job) -> bool:
        """Tells whether running requests must finish first: without a pause no output may mix
        weights of the target. Those of a draft model choose no token."""
        message, session = job.message, self._session
        if not self._started_requests_run:
            return False
        if isinstance(message, UpdateWeightsReq) and session is None:
            staged, aborts = job.future.result(), message.abort_all_requests
        elif isinstance(message, WeightSessionReq) and message.action == "commit" and session:
            staged, aborts = session.staged, message.abort_all_requests or session.aborts
        else:
            return False
        return not aborts and TARGET_MODEL in models_of(staged)

    @property
    def _started_requests_run(self) -> bool:
        return self._state.may_launch and self._lifecycle.has_started_requests

    # ---------------------------------------------------------------- updates

    def _update(self, message: UpdateWeightsReq) -> None:
        def finish(staged: StagedWeights) -> None:
            update = self._session or StagedUpdate()
            update.add(message, staged)
            if update is not self._session:
                self._take_over(message, update)
                return
            text = f"{len(staged)} weights staged; commit_weight_update takes them over."
            self._answer(message.call_id, "", text, num_tensors=len(staged), staged=True)

        self._start(message, lambda: self._read(message), finish)

    def _read(self, message: UpdateWeightsReq) -> StagedWeights:
        """In the thread, reads and checks the weights of a source."""
        source = message.source
        try:
            reader = self._weights.reader(message.selector)
            if isinstance(source, FromDirectory):
                return self._read_directories(reader, source)
            if isinstance(source, FromBytes):
                return reader.from_safetensors(source.data)
            if isinstance(source, FromGroup):
                return reader.from_tensors(self._received(source))
            if isinstance(source, SentTensors):
                return reader.from_tensors(opened_tensors(source))
            return reader.from_file(source.path)
        finally:
            if isinstance(source, FromFile) and source.delete:
                Path(source.path).unlink(missing_ok=True)

    def _read_directories(self, reader: Reader, source: FromDirectory) -> StagedWeights:
        if not source.draft_path:
            return reader.from_directory(source.path)
        draft = self._weights.reader("draft").from_directory(source.draft_path)
        return reader.from_directory(source.path) | draft

    def _received(self, source: FromGroup) -> Iterator[tuple[str, torch.Tensor]]:
        group = self._groups[self._name_of_group(source.group_name)]
        parts = zip(source.names, source.dtypes, source.shapes, strict=True)
        specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in parts]
        return group.receive(specs)

    def _take_over(
        self, message: UpdateWeightsReq | WeightSessionReq, update: StagedUpdate
    ) -> bool:
        """Between steps, makes the staged weights serve. Returns whether that worked."""
        problem = "" if self._half_written <= update.complete else self._state.broken
        changed = models_of(update.staged)
        if WEIGHTS_TAG in self._state.released:
            problem = self._state.unusable
        if problem:
            self._answer(message.call_id, problem)
            return False
        try:
            self._weights.apply(update.staged)
        except WeightUpdateError as error:
            self._answer(message.call_id, str(error))
            return False
        except Exception:
            logger.exception("Weights could not be taken over; generation stops.")
            self._state.broken = BROKEN
            self._half_written |= changed
        else:
            self._state.broken = ""
            self._half_written.clear()
        if update.aborts or message.abort_all_requests:
            self._abort_all(WEIGHT_UPDATE_ABORT_MESSAGE)
        self._lifecycle.retract_unfed()
        self._lifecycle.ledger.begin_weight_epoch()
        if self._state.broken:
            self._answer(message.call_id, BROKEN, status_code=500)
            return False
        for model, version in update.versions.items():
            self._lifecycle.set_weight_version(version, model)
        logger.info(
            "Weights updated: %d tensors (%s), versions %s, epoch %d.",
            len(update.staged),
            " and ".join(sorted(changed, reverse=True)),
            self._lifecycle.weight_versions,
            self._lifecycle.ledger.weight_epoch,
        )
        fields = {**self._counts(update.staged), **self._flush(message.flush_cache)}
        stays = self._weights.has_draft and DRAFT_MODEL not in changed
        text = "Weights updated." + DRAFT_STAYS * stays
        self._answer(message.call_id, "", text, staged=False, **fields)
        return True

    def _counts(self, staged: StagedWeights) -> dict[str, int]:
        """Counts what was taken over, and who goes on with draft KV of weights from before."""
        counts = {"num_tensors": len(staged)}
        if self._weights.has_draft:
            num_drafts = sum(name.startswith(DRAFT) for name in staged)
            counts["num_draft_tensors"] = num_drafts
            counts["num_with_old_draft_kv"] = len(self._lifecycle.running) if num_drafts else 0
        return counts

    def _flush(self, is_wanted: bool) -> dict[str, Any]:
        """Drops the prefixes of the old weights. While requests hold KV the prefixes stay, but
        never match."""
        if not is_wanted:
            return {}
        if self._lifecycle.holds_kv:
            return {"flushed_items": 0, "flush_note": "Requests hold KV; old entries never match."}
        return {"flushed_items": self._lifecycle.ledger.flush()}

    def _change_session(self, message: WeightSessionReq) -> None:
        change = {"begin": self._begin, "commit": self._commit, "rollback": self._roll_back}
        self._start(message, lambda: None, lambda _: change[message.action](message))

    def _begin(self, message: WeightSessionReq) -> None:
        if self._session is not None:
            problem = "A weight update has begun already; commit it or roll it back."
            self._answer(message.call_id, problem)
            return
        self._set_session(StagedUpdate())
        self._lifecycle.ledger.begin_weight_epoch()
        self._answer(message.call_id, "", "Weight update begun; the old weights serve on.")

    def _commit(self, message: WeightSessionReq) -> None:
        session = self._session
        if session is None:
            self._answer(message.call_id, NO_SESSION)
            return
        if not session.staged:
            self._answer(message.call_id, "Nothing has been staged; update weights or roll back.")
            return
        session.label(models_of(session.staged), message.weight_version)
        self._set_session(None)
        if not self._take_over(message, session) and not self._state.broken:
            self._set_session(session)  # nothing has changed, so the client can try again
            self._state.publish()

    def _roll_back(self, message: WeightSessionReq) -> None:
        if self._session is None:
            self._answer(message.call_id, NO_SESSION)
            return
        self._set_session(None)
        self._lifecycle.ledger.begin_weight_epoch()
        self._answer(message.call_id, "", "Weight update rolled back; the old weights serve.")

    def _set_session(self, session: StagedUpdate | None) -> None:
        self._session = session
        self._state.in_weight_session = session is not None

    def _relabel(self, message: UpdateWeightVersionReq) -> None:
        def finish(_: None) -> None:
            if message.abort_all_requests:
                self._abort_all(WEIGHT_UPDATE_ABORT_MESSAGE)
            version = message.new_version
            self._lifecycle.set_weight_version(version)
            self._answer(message.call_id, "", "Weight version updated.", new_version=version)

        self._start(message, lambda: None, finish)

    # ---------------------------------------------------------------- groups

    def _change_group(self, message: WeightGroupReq) -> None:
        """Changes the group. Leaving ends a receipt in progress at once; everything else waits for
        its turn."""
        if message.join is None:
            with suppress(WeightUpdateError):  # the error is the answer once its turn comes
                self._groups[self._name_of_group(message.group_name)].close()
        work = functools.partial(self._swap_group, message.group_name, message.join)
        text = "Left the group." if message.join is None else "Joined the group."
        self._start(message, work, lambda _: self._answer(message.call_id, "", text))

    def _swap_group(self, name: str, join: GroupAddress | None) -> None:
        """Leaves the group of that name, or joins it anew; runs in the thread."""
        if join is None:
            self._groups.pop(self._name_of_group(name)).close()
            return
        if name in self._groups:
            self._groups.pop(name).close()
        self._groups[name] = WeightGroup.join(group_name=name, **msgspec.structs.asdict(join))

    def _name_of_group(self, name: str) -> str:
        """Finds a group; the default name also finds the only one, whatever its name.

        Raises:
            WeightUpdateError: if there is none.
        """
        names = [*self._groups]
        if name in names:
            return name
        if name == DEFAULT_GROUP and len(names) == 1:
            return names[0]
        raise WeightUpdateError(
            f"There is no group {name!r}; call init_weights_update_group first."
        )

    # ---------------------------------------------------------------- replies

    def _start(
        self, message: WeightMessage, work: Callable[[], Any], finish: Callable[[Any], None]
    ) -> None:
        self._jobs.append(_Job(message, self._thread.submit(work), finish))

    def _answer(
        self, call_id: int, problem: str, text: str = "", status_code: int = 400, **fields: Any
    ) -> None:
        self._state.publish()
        lifecycle = self._lifecycle
        fields = {
            **lifecycle.named_versions,
            "weight_epoch": lifecycle.ledger.weight_epoch,
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
