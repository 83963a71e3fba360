"""The models of a process: loaded, then given one KV memory, then made ready for steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Protocol

import torch

from sglang.srt.distributed.group import RankGroup
from sglang.srt.garbage import paused_collections
from sglang.srt.layers.sampling_ops import prepare_sampling_ops
from sglang.srt.mem_cache.kv_memory import KVMemory
from sglang.srt.mem_cache.kv_sizing import KVSizing
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool, hand_back_unused
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.loaded_model import LoadedModel
from sglang.srt.model_executor.model_runner import LESS_STATIC_MEMORY, ModelRunner
from sglang.srt.observability.start_log import start_phase
from sglang.srt.platform import memory_for, static_bytes_left
from sglang.srt.registry import HEADS, OPERATIONS, load

FEW_LAYERS = 2  # the first and the last; layers between them launch the same kernels


def make_runners(
    config: ExecutionConfig, *others: ExecutionConfig, ranks: RankGroup | None = None
) -> RunnerGroup:
    """Makes runners of the target (`config`) and of other models, ready for steps. The memory that
    the weights of all models leave is divided among the pools by `config`.

    Args:
        ranks: that hold the target together; None: this process holds it all.

    Raises:
        ModelPathError: if weights cannot be loaded.
        ValueError: if an attention backend or the KV memory cannot be had; the text says why.
        MemoryError: if the device has too little memory; the text says for what.
    """
    for other in others:
        assert (other.device, other.page_size) == (config.device, config.page_size)
        assert other.row_width == config.row_width
        assert other.max_running_requests == config.max_running_requests
    if config.model.architecture in HEADS.names:
        raise config.model.refusal(
            f"{config.model.architecture} only drafts for another model; serve that one"
        )
    if config.device != "cpu":
        prepare_sampling_ops(torch.device(config.device))
    kernels = compile_ahead(config, *others, ranks=ranks)
    models = [_load(each) for each in (config, *others)]
    with start_phase("Allocating the KV pool"):
        group = _put_together(config, models, ranks)
    if kernels is not None:
        kernels.wait()
    group.prepare()
    return group


class CompilesAhead(Protocol):
    """Compiles the kernels of steps before they are launched."""

    def noting(self) -> AbstractContextManager[None]:
        """In this block kernels are noted instead of launched, so the results of steps are
        arbitrary and must not be used as addresses."""

    def start(self) -> None:
        """Starts to compile the noted kernels in the background."""

    def wait(self) -> None:
        """Waits until all kernels are compiled."""


def compile_ahead(
    config: ExecutionConfig, *others: ExecutionConfig, ranks: RankGroup | None = None
) -> CompilesAhead | None:
    """Starts to compile what steps will launch, before there are weights: models of the same sizes
    and few layers launch the same. None where that cannot be told."""
    place = OPERATIONS[config.ops].ahead
    if not place or config.device == "cpu" or not config.capabilities.captures_plans:
        return None
    kernels: CompilesAhead = load(place)()
    with start_phase("Rehearsing steps"):
        configs = [_with_few_layers(each) for each in (config, *others)]
        group = _put_together(configs[0], [LoadedModel(each) for each in configs], ranks)
        with kernels.noting(), paused_collections(), group.target.alone():
            for runner in group.runners:
                runner.rehearse()
        del group, runner
        hand_back_unused(torch.device(config.device))
    kernels.start()
    return kernels


def _with_few_layers(config: ExecutionConfig) -> ExecutionConfig:
    """Makes a model with the same first and last layer, random weights and one page of KV."""
    model, capture = config.model, config.capture
    num_layers = min(FEW_LAYERS, model.num_layers)
    return replace(
        config,
        model=model.with_layers(num_layers),
        load_format="dummy",
        max_total_tokens=config.page_size,
        capture=replace(capture, layers=(0,) * len(capture.taps), returned=()),
    )


def _load(config: ExecutionConfig) -> LoadedModel:
    with start_phase(f"Loading the weights of {config.model.path}"):
        return LoadedModel(config)


def _put_together(
    config: ExecutionConfig, models: Sequence[LoadedModel], ranks: RankGroup | None = None
) -> RunnerGroup:
    """Makes runners of models over one memory."""
    for model in models[1:]:
        model.attach(models[0], ranks)
    memory = make_memory(config, models, ranks)
    runners = [ModelRunner(model, memory, index, ranks) for index, model in enumerate(models)]
    return RunnerGroup(runners, ranks)


def make_memory(
    config: ExecutionConfig, models: Sequence[LoadedModel], ranks: RankGroup | None = None
) -> KVMemory:
    """Makes the page table, and a pool for each model, with as many pages as fit for all models, on
    every rank."""
    budget = config.kv_budget_bytes
    if budget is None:
        budget = static_bytes_left(config.device, config.static_memory_share)
    sizing = KVSizing(
        available_bytes=budget,
        bytes_per_token=sum(model.geometry.bytes_per_token for model in models),
        page_size=config.page_size,
        wished_tokens=config.max_total_tokens,
        max_useful_tokens=config.max_running_requests * config.row_width,
    )
    num_pages = sizing.num_pages()
    if ranks is not None:
        num_pages = ranks.least(num_pages)
    with memory_for("the KV pool", f"{LESS_STATIC_MEMORY} or --max-running-requests."):
        table = ReqToTokenPool(
            config.max_running_requests, config.row_width, config.device, config.poisons_graphs
        )
        pools = [
            model.geometry.make_pool(num_pages, config.page_size, config.device) for model in models
        ]
    for model, pool in zip(models, pools, strict=True):
        if model.config.may_rest:
            pool.track_starts(table.num_rows + 1)
    return KVMemory(table, pools, sizing.reason)


class GraphOwner(Protocol):
    """Captures graphs in which runners are parts (`ModelRunner.as_part_of_graph`)."""

    def capture(self) -> None:
        """Captures the graphs; none if a runner cannot be a part of one."""

    def drop(self) -> None:
        """Gives their memory back."""


class RunnerGroup:
    """Runners over one KV memory, the target's first. Their memory is given back and taken again
    together.

    Attributes:
        memory: page table and pools of all of them.
    """

    def __init__(self, runners: Sequence[ModelRunner], ranks: RankGroup | None = None) -> None:
        self.runners = tuple(runners)
        self._ranks = ranks
        self.memory = runners[0].memory
        self._graph_owners: list[GraphOwner] = []
        assert all(runner.memory is self.memory for runner in runners)

    @property
    def target(self) -> ModelRunner:
        return self.runners[0]

    @property
    def max_prompt_rows(self) -> int:
        """Prompt tokens that a step of every runner may feed."""
        return self.target.max_prompt_rows

    def prepare(self) -> None:
        """Prepares the first step: captures graphs, then runs the largest steps. Graphs come first,
        since their memory is fixed and that of a step is not."""
        for runner in self.runners:
            runner.capture_graphs()
        self._warm_up()

    def _warm_up(self) -> None:
        if self.target.device.type != "cpu":
            with start_phase("Running the largest steps once"):
                self.target.warm_up(drafting=self.runners[1:])
            if self._ranks is not None:
                rows = self._ranks.least(self.target.max_prompt_rows)
                self.target.max_prompt_rows = rows

    def capture_with(self, owner: GraphOwner) -> None:
        """Has `owner` capture its graphs now, and again whenever the runners' are captured. Then
        the largest step must fit beside them, so `max_prompt_rows` may become less.

        Raises:
            MemoryError: if the device has too little memory; the text says for what.
        """
        self._graph_owners.append(owner)
        owner.capture()
        self._warm_up()

    @property
    def has_graphs(self) -> bool:
        """Tells whether graphs are captured now."""
        return any(runner.num_graphs for runner in self.runners)

    def release_graphs(self) -> None:
        """Gives the memory of all graphs back."""
        self._drop_graphs()
        hand_back_unused(self.target.device)

    def restore_graphs(self) -> None:
        """Captures graphs anew, if there are none now and all other memory is there.

        Raises:
            RuntimeError: if there is not enough memory for them; then there are none.
        """
        if not self.has_graphs:
            self._resume_steps(lambda: None)

    def _drop_graphs(self) -> None:
        for each in self._graph_owners:
            each.drop()
        for runner in self.runners:
            runner.drop_graphs()

    @contextmanager
    def as_parts_of_graph(self) -> Iterator[None]:
        """`ModelRunner.as_part_of_graph` of all runners."""
        with ExitStack() as stack:
            for runner in self.runners:
                stack.enter_context(runner.as_part_of_graph())
            yield

    def release_weights(self) -> None:
        """Gives the memory of all weights back; their values are kept.

        Raises:
            WeightUpdateError: if that cannot be done; then nothing is released.
        """
        with ExitStack() as undo:
            for runner in self.runners:
                runner.weights.release()
                undo.callback(runner.weights.restore)
            undo.pop_all()

    def restore_weights(self) -> None:
        """Takes the memory of all weights again, and that of graphs and steps.

        Raises:
            WeightUpdateError, RuntimeError: if there is not enough memory; then all stay released.
        """
        with ExitStack() as undo:
            for runner in self.runners:
                runner.weights.restore()
                undo.callback(runner.weights.release)
            undo.pop_all()
        self._resume_steps(self.release_weights)

    def restore_kv(self) -> None:
        """Takes the pools' memory again, and that of graphs and steps.

        Raises:
            RuntimeError: if there is not enough memory; then the pools stay released.
        """
        self.memory.restore()
        self._resume_steps(self.memory.release)

    def _resume_steps(self, give_back: Callable[[], None]) -> None:
        """Prepares the next step, unless other memory is still released. The planner counts on
        `max_prompt_rows`, so there must be room for as many rows as before."""
        self._drop_graphs()
        try:
            for runner in self.runners:
                runner.capture_graphs()
            for owner in self._graph_owners:
                owner.capture()
            if self.target.is_whole and self.target.device.type != "cpu":
                self.target.warm_up(self.target.max_prompt_rows, self.runners[1:])
        except MemoryError as error:
            self._drop_graphs()
            give_back()
            raise RuntimeError(str(error)) from error
