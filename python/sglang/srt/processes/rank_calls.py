"""Control calls on a model that several ranks hold: each does its part, between the same steps.

The first rank sends the call, then all do it. They tell each other what went wrong, so a call is
carried out by all of them or by none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from sglang.srt.control.control import ModelResources
from sglang.srt.control.memory_control import MemoryPart
from sglang.srt.control.weight_control import ModelWeights
from sglang.srt.distributed.group import RankGroup
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.resources import make_resources
from sglang.srt.sent_tensors import WeightSelector
from sglang.srt.shard import Cut
from sglang.srt.weight_sync.serving_weights import ServingWeights
from sglang.srt.weight_sync.weight_reader import StagedWeights, WeightReader, WeightUpdateError
from sglang.srt.workers.step_frames import CallFrame, encoded

RELEASE, RESTORE, APPLY, JOIN = "release", "restore", "apply", "join"

Send = Callable[[bytes], None]


def resources_of_ranks(own: ModelResources, ranks: RankGroup, send: Send) -> ModelResources:
    """Makes what control calls change, on the first rank, for all ranks.

    Args:
        own: of the first rank.
        send: to all others.
    """
    assert isinstance(own.weights, ServingWeights)
    memory = {tag: _part_of_ranks(part, tag, ranks, send) for tag, part in own.memory.items()}
    return replace(own, weights=RankedWeights(own.weights, ranks, send), memory=memory)


def calls_of(runners: RunnerGroup, ranks: RankGroup) -> Mapping[str, Callable[..., None]]:
    """The same calls on another rank, by name; see `follow`."""
    own = make_resources(runners)
    assert isinstance(own.weights, ServingWeights)
    weights = RankedWeights(own.weights, ranks)

    def release(tag: str) -> None:
        _change(own.memory[tag].release, own.memory[tag].restore, ranks)

    def restore(tag: str) -> None:
        _change(own.memory[tag].restore, own.memory[tag].release, ranks)

    return {RELEASE: release, RESTORE: restore, APPLY: weights.take, JOIN: weights.joined}


def _part_of_ranks(part: MemoryPart, tag: str, ranks: RankGroup, send: Send) -> MemoryPart:
    def on_all(name: str, do: Callable[[], None], undo: Callable[[], None]) -> None:
        send(encoded(CallFrame(name, [tag])))
        if problem := _change(do, undo, ranks):
            raise RuntimeError(problem)

    return MemoryPart(
        lambda: on_all(RELEASE, part.release, part.restore),
        lambda: on_all(RESTORE, part.restore, part.release),
    )


def _change(do: Callable[[], None], undo: Callable[[], None], ranks: RankGroup) -> str:
    """Does it on this rank, and takes it back if another one could not; returns the reason."""
    problem = _problem(do)
    others = [text for text in ranks.texts(problem) if text]
    if others and not problem:
        undo()
    return others[0] if others else ""


def _in_order(columns: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Returns all ranks' parts side by side, [S, whole], in the order of the whole."""
    if not cut.parts:
        return columns
    sizes = [size for _, size in cut.pieces]
    by_part = columns.view(len(columns), -1, cut.size).split(sizes, dim=2)
    return torch.cat([part.flatten(1) for part in by_part], dim=1)


def _problem(do: Callable[[], None]) -> str:
    """Tells what went wrong; empty if nothing did."""
    try:
        do()
    except (RuntimeError, ValueError, OSError) as error:
        return str(error).splitlines()[0]
    return ""


class RankedWeights(ModelWeights):
    """The weights of all ranks together. What is read and staged is whole; each rank takes its part
    of it.

    Args:
        own: this rank's parts.
        send: from the first rank to all others; None: this is another one.
    """

    def __init__(self, own: ServingWeights, ranks: RankGroup, send: Send | None = None) -> None:
        self._own = own
        self._ranks = ranks
        self._send = send

    @property
    def has_draft(self) -> bool:
        return self._own.has_draft

    def reader(self, selector: WeightSelector) -> WeightReader:
        return self._own.reader(selector)

    def names(self) -> list[str]:
        return self._own.names()

    def apply(self, staged: StagedWeights) -> None:
        """Copies staged weights into place on all ranks, or on none."""
        names = sorted(staged)
        self._call(APPLY, *names)
        dtypes = {name: self._own.empty(name).dtype for name in names}
        whole = {name: staged[name].to("cpu", dtypes[name]).contiguous() for name in names}
        if problem := self._take(whole):
            raise WeightUpdateError(problem)

    def take(self, *names: str) -> None:
        """`apply` on another rank."""
        self._take({name: self._own.empty(name) for name in names})

    def value_of(self, name: str) -> torch.Tensor | None:
        """The whole of a weight, which no step reads; None if there is no such weight."""
        part = self._own.value_of(name)
        if part is not None and (names := self._own.stacked_in(name)):
            values = [value for each in names if (value := self.value_of(each)) is not None]
            return torch.cat([value.cpu() for value in values]).view(
                len(part), -1, values[0].shape[1]
            )
        if part is None or self._own.cut_of(name) is None:
            return part
        self._call(JOIN, name)
        return self._joined(name)

    def joined(self, name: str) -> None:
        """`value_of` on another rank."""
        self._joined(name)

    def _joined(self, name: str) -> torch.Tensor:
        part, cut = self._own.value_of(name), self._own.cut_of(name)
        assert part is not None
        assert cut is not None
        part = part.detach().cpu()  # steps may leave a GPU no memory for the whole
        columns = part[None] if part.dim() == 1 else part
        if cut.dim == 0 and part.dim() == 2:
            columns = columns.t()
        whole = _in_order(self._ranks.join(columns, cut.whole), cut)
        return whole[0] if part.dim() == 1 else whole.t() if cut.dim == 0 else whole

    def _take(self, staged: StagedWeights) -> str:
        """Takes the first rank's tensors; returns why not, if some rank cannot."""
        for tensor in staged.values():
            self._ranks.tensor_from_first(tensor)
        problem = _problem(lambda: self._own.check(staged))
        problems = [text for text in self._ranks.texts(problem) if text]
        if not problems:
            self._own.apply(staged)
        return problems[0] if problems else ""

    def _call(self, name: str, *arguments: str) -> None:
        assert self._send is not None, "The first rank calls."
        self._send(encoded(CallFrame(name, list(arguments))))
