"""Random control calls of the storm, and what they must do to weights and labels."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save

from sglang.srt.messages.control import (
    DEFAULT_WEIGHT_VERSION,
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    FlushCacheReqInput,
    FromBytes,
    FromDirectory,
    GetInternalStateReq,
    HealthPing,
    MemoryOccupationReq,
    PauseGenerationReq,
    UpdateWeightsReq,
    UpdateWeightVersionReq,
    WeightSessionReq,
    WeightSource,
)
from storm_oracle import DenseModel

MODES = ("abort", "retract", "retract", "in_place", "in_place", "drain", "drain")
Weights = dict[str, torch.Tensor]
WEIGHT_CALLS = (UpdateWeightsReq, WeightSessionReq, UpdateWeightVersionReq)


@dataclass
class WeightHistory:
    """Tells which weights must serve, by the calls that have been answered with success.

    Attributes:
        model: the oracle's model of the weights that serve.
        label: their `weight_version`.
        num_updates: how often weights were taken over.
        num_swaps: how often those of the draft model were.
    """

    model: DenseModel
    label: str = DEFAULT_WEIGHT_VERSION
    num_updates: int = 0
    num_swaps: int = 0
    _session: Weights | None = None
    _session_label: str | None = None

    def apply(self, message: Any, weights: Weights, reply: ControlReply) -> bool:
        """Follows one call; returns whether weights or label changed for the tokens to come."""
        if isinstance(message, UpdateWeightVersionReq):
            self.label = message.new_version
            return True
        if isinstance(message, UpdateWeightsReq) and self._session is not None:
            assert reply.fields["staged"], "an update in a session was taken over at once"
            self._session.update(weights)
            if weights:
                self._session_label = message.weight_version or self._session_label
            return False
        if isinstance(message, UpdateWeightsReq):
            return self._take_over(weights, message.weight_version, reply)
        if message.action == "commit":
            assert self._session is not None, "a commit without a session succeeded"
            staged, label = self._session, message.weight_version or self._session_label
            self._session = None
            return self._take_over(staged, label, reply)
        self._session = {} if message.action == "begin" else None
        self._session_label = None
        return False

    def _take_over(self, weights: Weights, label: str | None, reply: ControlReply) -> bool:
        """Follows new weights of the target; none: the draft model's alone have changed."""
        self.num_swaps += bool(reply.fields.get("num_draft_tensors"))
        if not weights:
            return False
        self.model = self.model.updated(weights)
        self.label = label or self.label
        self.num_updates += 1
        assert reply.fields["weight_version"] == self.label, "the reply names another label"
        return True


@dataclass
class Call:
    """A control call and its one reply."""

    message: Any
    weights: Weights = field(default_factory=dict)
    reply: Any = None


class ControlMaker:
    """Draws control calls.

    Args:
        checkpoints: directories of models that fit, and their weights.
        rates: how often each kind comes, beside the others.
    """

    def __init__(
        self, chooser: random.Random, checkpoints: dict[Path, Weights], rates: dict[str, float]
    ) -> None:
        self._random = chooser
        self._checkpoints = checkpoints
        self._kinds, self._shares = list(rates), list(rates.values())
        self._call_ids = itertools.count(1)

    @staticmethod
    def draw_rates(chooser: random.Random) -> dict[str, float]:
        """Rounds differ in what happens often."""
        rates = {
            "nothing": chooser.choice([10.0, 30.0, 100.0]),
            "abort": chooser.choice([0.3, 2.0]),
            "abort all": 0.03,
            "pause": chooser.choice([0.0, 0.3, 1.0]),
            "continue": chooser.choice([1.0, 4.0]),
            "flush": chooser.choice([0.2, 1.0]),
            "update": chooser.choice([0.0, 0.5]),
            "paused update": chooser.choice([0.0, 1.0, 3.0]),
            "bad update": 0.2,
            "session": chooser.choice([0.0, 0.5]),
            "label": chooser.choice([0.0, 0.3]),
            "memory": chooser.choice([0.0, 0.3]),
            "look": 0.5,
        }
        return rates

    def calls(self, live: dict[int, str]) -> list[Call]:
        """The next ones, to be sent one after the other; most often none.

        Args:
            live: rids of requests by req_id, those that have ended too.
        """
        kind = self._random.choices(self._kinds, self._shares)[0]
        makers: dict[str, Callable[[], Call]] = {
            "abort all": lambda: Call(AbortReq(abort_all=True)),
            "pause": self._pause,
            "continue": self._continue,
            "flush": self._flush,
            "update": self._update,
            "bad update": self._bad_update,
            "session": self._session,
            "label": self._label,
            "memory": self._memory,
            "look": self._look,
        }
        if kind == "abort":
            return [self._abort(live)] if live else []
        if kind == "pause" and self._random.random() < 0.8:
            return [self._pause(), self._continue()]
        if kind == "paused update":
            return [self._pause(["retract", "in_place"]), self._update(), self._continue()]
        if kind == "memory" and self._random.random() < 0.8:
            pause = [self._pause(["retract"])] if self._random.random() < 0.7 else []
            return [*pause, self._memory("release"), self._memory("resume"), self._continue()]
        return [makers[kind]()] if kind in makers else []

    def last_calls(self) -> list[Call]:
        """Returns the calls that let everything that waits go on."""
        return [
            Call(MemoryOccupationReq(call_id=next(self._call_ids), action="resume")),
            self._continue(),
        ]

    def flush_now(self) -> Call:
        return Call(FlushCacheReqInput(call_id=next(self._call_ids), timeout_s=0.0))

    def _abort(self, live: dict[int, str]) -> Call:
        """Aborts by number, as a client that hangs up; by rid; or by a beginning of rids, which the
        front end turns into numbers."""
        req_id = self._random.choice(list(live))
        how = self._random.choice(["number", "rid", "prefix"])
        if how == "rid":
            return Call(AbortReq(rid=live[req_id]))
        if how == "number":
            return Call(AbortReq(req_ids=[req_id]))
        named = [other for other, rid in live.items() if rid.startswith(live[req_id][:1])]
        return Call(AbortReq(req_ids=named))

    def _pause(self, modes: Sequence[str] = MODES) -> Call:
        choose = self._random.choice
        mode, lease_s = choose(modes), choose([None, None, 0.5, 2.0])
        return Call(
            PauseGenerationReq(
                call_id=next(self._call_ids),
                mode=mode,
                lease_s=lease_s,
                lease_end=choose(["continue", "continue", "abort"]),
                drain_timeout_s=choose([None, 0.5, 5.0]) if mode == "drain" else None,
            )
        )

    def _continue(self) -> Call:
        return Call(ContinueGenerationReq(call_id=next(self._call_ids)))

    def _flush(self) -> Call:
        timeout_s = self._random.choice([0.0, 0.0, 1.0])
        return Call(FlushCacheReqInput(call_id=next(self._call_ids), timeout_s=timeout_s))

    def _update(self) -> Call:
        """A checkpoint (perhaps the one that serves), or some of its weights."""
        path = self._random.choice(list(self._checkpoints))
        weights = self._checkpoints[path]
        source: WeightSource = FromDirectory(path=str(path))
        if self._random.random() < 0.6:
            names = self._random.sample(sorted(weights), self._random.randint(1, len(weights)))
            weights = {name: weights[name] for name in names}
            source = FromBytes(data=save(weights))
        return Call(self._update_message(source), weights)

    def swap(self, chooser: random.Random, heads: Sequence[bytes]) -> Call:
        """Changes the weights of the draft model; draws of `chooser` alone."""
        message = UpdateWeightsReq(
            call_id=next(self._call_ids),
            source=FromBytes(data=chooser.choice(heads)),
            selector="draft",
            weight_version=chooser.choice([None, "h1", "h2"]),
            flush_cache=chooser.choice([True, False]),
        )
        return Call(message)

    def _bad_update(self) -> Call:
        weights = next(iter(self._checkpoints.values()))
        name = self._random.choice(sorted(weights))
        bad = {name: torch.full_like(weights[name], float("nan"))}
        sources: list[WeightSource] = [
            FromBytes(data=b"no safetensors"),
            FromBytes(data=save(bad)),
            FromBytes(data=save({name: weights[name][:1].clone()[..., :1]})),
            FromDirectory(path="/nowhere"),
        ]
        return Call(self._update_message(self._random.choice(sources)))

    def _update_message(self, source: WeightSource) -> UpdateWeightsReq:
        choose = self._random.choice
        return UpdateWeightsReq(
            call_id=next(self._call_ids),
            source=source,
            weight_version=choose([None, "v1", "v2", "v3"]),
            flush_cache=choose([True, False]),
            abort_all_requests=self._random.random() < 0.1,
        )

    def _session(self) -> Call:
        choose = self._random.choice
        return Call(
            WeightSessionReq(
                call_id=next(self._call_ids),
                action=choose(["begin", "commit", "commit", "rollback"]),
                weight_version=choose([None, "s1"]),
                flush_cache=choose([True, False]),
                abort_all_requests=self._random.random() < 0.1,
            )
        )

    def _label(self) -> Call:
        choose = self._random.choice
        return Call(
            UpdateWeightVersionReq(
                call_id=next(self._call_ids),
                new_version=choose(["v1", "v4"]),
                abort_all_requests=self._random.random() < 0.1,
            )
        )

    def _memory(self, action: Literal["release", "resume"] = "resume") -> Call:
        choose = self._random.choice
        return Call(
            MemoryOccupationReq(
                call_id=next(self._call_ids),
                action=action,
                tags=choose([None, ["kv_cache"], ["weights"], ["weights", "cuda_graph"]]),
            )
        )

    def _look(self) -> Call:
        call_id = next(self._call_ids)
        kinds = [GetInternalStateReq(call_id=call_id), HealthPing(call_id=call_id)]
        return Call(self._random.choice(kinds))
