"""The graphs of a model: those of its steps, and those of several draft steps at once."""

from __future__ import annotations

from collections.abc import Mapping

from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey, ModelOutput
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, GraphMemory, Replay
from sglang.srt.model_executor.draft_passes import Drafts
from sglang.srt.model_executor.draft_tree_passes import DraftedTrees
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.step.draft_shapes import DraftShape, num_steps_of


class RunnerGraphs:
    """Replays steps for which there is a graph. The next replay overwrites the results.

    Args:
        steps: of a model's forward pass.
        drafts: runners of draft graphs, by the shape of their drafts.
        all_rows: the last layer computes all rows (`HiddenCapture.all_rows`).
        memory: memory of all graphs.
    """

    def __init__(
        self,
        steps: CudaGraphRunner[ModelOutput],
        drafts: Mapping[DraftShape, CudaGraphRunner[Drafts | DraftedTrees]],
        all_rows: bool,
        memory: GraphMemory,
    ) -> None:
        self._steps = steps
        self._drafts = drafts
        self._all_rows = all_rows
        self.memory = memory

    @property
    def keys(self) -> GraphKeys:
        """Returns the keys of the graphs of steps."""
        return self._steps.keys

    @property
    def draft_keys(self) -> dict[DraftShape, GraphKeys]:
        """Returns the keys of the graphs of several draft steps each."""
        return {shape: graphs.keys for shape, graphs in self._drafts.items()}

    @property
    def num_graphs(self) -> int:
        return self._steps.num_graphs + sum(each.num_graphs for each in self._drafts.values())

    def capture(self) -> None:
        """Captures all graphs."""
        self._steps.capture()
        for graphs in self._drafts.values():
            graphs.capture()

    def rehearse(self) -> None:
        """Computes a step of each shape, but no draft steps, whose tokens come from steps."""
        self._steps.rehearse()

    def forward(self, batch: ForwardBatch) -> ModelOutput | None:
        """Replays a step and returns the model's output; None if no graph fits it."""
        key = self._steps.key_of(batch)
        return None if key is None else self._wanted_rows(key, batch, self._steps.run(key, batch))

    def draft(self, first: ForwardBatch, shape: DraftShape) -> Drafts | DraftedTrees | None:
        """Replays draft steps and returns their drafts, see `DraftPass` and `DraftTreePass`; None
        if no graph fits them."""
        graphs = self._drafts.get(shape)
        key = None if graphs is None else graphs.key_of(first)
        if graphs is None or key is None:
            return None
        return graphs.run(key, first).results.of_first(len(first.q_lens))

    def _wanted_rows(
        self, key: GraphKey, batch: ForwardBatch, replay: Replay[ModelOutput]
    ) -> ModelOutput:
        """Picks the results that the step would have without a graph from those of the graph."""
        hidden, taps = replay.results
        num_tokens, wanted = batch.input_ids.shape[0], batch.read_index
        if taps is not None:
            taps = replay.rows(taps, num_tokens)
        if wanted is None or self._all_rows:
            return ModelOutput(replay.rows(hidden, num_tokens), taps)
        if key.skips_unread_rows:
            return ModelOutput(hidden[: len(wanted)], taps)
        return ModelOutput(hidden[wanted if replay.places is None else replay.places[wanted]], taps)


def keys_of_draft_steps(config: ExecutionConfig, hidden_width: int) -> dict[DraftShape, GraphKeys]:
    """Returns the keys of the graphs of several draft steps each.

    Args:
        hidden_width: width of the hidden input of each row of draft steps.
    """
    most = config.max_running_requests
    return {
        shape: GraphKeys.of_draft_steps(most, hidden_width, num_steps_of(shape), sizes)
        for shape, sizes in config.draft_steps.items()
    }


def plan_nothing(batch: ForwardBatch) -> None:
    """Plans nothing: for a callable that plans each of its steps itself."""
