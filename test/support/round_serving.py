"""A scheduler with an EAGLE head, or a draft model, whose rounds are graphs (`RoundGraphs`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from draft_heads import EAGLE3
from drafted_serving import Drafted, params_of, prompts
from eagle_models import CONTEXT, eagle_config_for
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.processes.runtime_config import drafter_needs
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.speculative.drafter import ExtendedStep
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.step_ops import AcceptedTokens
from sglang.srt.step.worker import ScheduleBatch
from sglang.srt.workers.round_graphs import RoundGraphs, VerifiedStep
from utils import Setup, make_execution

NUM_STEPS = 3


class On(NamedTuple):
    """Device and settings of a run. On a CPU, graphs have up to as many rows as a full batch that
    verifies NUM_STEPS drafts."""

    device: str
    backend: str
    max_graph_rows: int = 64


ON_CPU = On("cpu", "ragged", 8 * (1 + NUM_STEPS))


def setup_of(page_size: int = 1, **changes: Any) -> Setup:
    fields = {"max_decode_rows": 1 + 2 * NUM_STEPS, "chunked_prefill_size": 40, **changes}
    return Setup(num_pages=1024 // page_size, page_size=page_size, context_len=CONTEXT, **fields)


def runners(
    paths: dict[str, Path],
    drafter: DrafterConfig | None,
    setup: Setup,
    on: On = ON_CPU,
    returned: tuple[int, ...] = (),
    **changes: Any,
) -> RunnerGroup:
    """`changes` are fields of the target's `ExecutionConfig`."""
    needs = drafter_needs(drafter)
    execution = make_execution(
        paths["target"],
        setup,
        setup.context_len,
        needs.max_rows,
        attention_backend=on.backend,
        device=on.device,
        max_graph_width=needs.max_rows if drafter else 0,
        row_width=setup.row_width,
        capture=replace(needs.capture, returned=returned),
        captures_trees=needs.has_trees,
        poisons_graphs=True,
    )
    num_rows = on.max_graph_rows if drafter else 0
    execution = replace(execution, max_graph_rows=num_rows, **changes)
    return make_runners(execution, *drafter_models(drafter, execution))


def copied(taken: VerifiedStep) -> VerifiedStep:
    """Copies what a graph gave, for a CPU: a GPU's results are on their way to the host before the
    next replay, and those of a CPU are not copied."""
    parts = [getattr(taken.run.accepted, name) for name in AcceptedTokens.__slots__]
    accepted = AcceptedTokens(*[None if part is None else part.clone() for part in parts])
    return taken._replace(run=taken.run._replace(accepted=accepted))


@dataclass
class Served:
    """A scheduler with a head, whose rounds are graphs.

    Attributes:
        rounds: requests and drafts of each of each step whose verification was a graph.
        num_pieces: steps whose verification was not.
        proposals: requests and drafts given to each of each proposal that was a graph.
        num_eager_proposals: that were not.
        num_rests: steps that the head was left out of.
        seen: drafts that were right and wrong, of graphs alone.
        may_lack: requests may be given fewer drafts than the step says.
    """

    harness: Drafted
    group: RunnerGroup
    rounds: list[tuple[int, int]] = field(default_factory=list)
    num_pieces: int = 0
    proposals: list[tuple[int, int]] = field(default_factory=list)
    num_eager_proposals: int = 0
    num_rests: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    may_lack: bool = False

    @property
    def graphs(self) -> RoundGraphs:
        worker: Any = self.harness.scheduler._worker
        graphs: RoundGraphs = worker._rounds
        return graphs

    def verify(self, batch: ScheduleBatch, plan: StepPlan) -> VerifiedStep | None:
        """Notes what `RoundGraphs.verify` does."""
        found = self._verify(batch, plan)
        self.num_rests += plan.rests
        if found is None:
            self.num_pieces += 1
            return None
        assert not plan.rests, "The head was run."
        taken = found.accepted
        num_drafts, num_fed = taken.num_drafts, plan.max_pending - 1
        fed = [0] * len(batch.rows) if num_drafts is None else num_drafts.tolist()
        if self.may_lack:
            assert max(fed) <= num_fed
        else:
            assert fed == [num_fed] * len(batch.rows)
        right = int((taken.accept_lens - 1).sum())
        self.seen["right"] += right
        self.seen["wrong"] += sum(fed) - right
        self.rounds.append((len(batch.rows), num_fed))
        return copied(found)

    def propose(self, step: ExtendedStep) -> bool:
        """Notes what `RoundGraphs.propose` does."""
        is_graph = self._propose(step)
        if is_graph:
            self.proposals.append((len(step.batch.rows), step.plan.next_drafts[0]))
        self.num_eager_proposals += not is_graph
        return is_graph

    def watch(self) -> None:
        self._verify, self._propose = self.graphs.verify, self.graphs.propose
        vars(self.graphs).update(verify=self.verify, propose=self.propose)

    def unwatch(self) -> None:
        """Nothing is noted from now on: what is noted is read from the device."""
        del vars(self.graphs)["verify"], vars(self.graphs)["propose"]


def zero(group: RunnerGroup) -> None:
    """KV of nobody is a number, of which a mask makes nothing."""
    for pool in group.memory.pools:
        for kv in pool.kv:
            kv.zero_()


def serving(
    paths: dict[str, Path],
    kind: str = EAGLE3,
    setup: Setup | None = None,
    policy: str = "fixed",
    on: On = ON_CPU,
    tree: TreeShape | None = None,
    tile_spec_cache: Path | None = None,
    returned: tuple[int, ...] = (),
    **options: Any,
) -> Served:
    """`options` are of `Drafted`."""
    num_steps = NUM_STEPS if tree is None else tree.depth
    rounds = {"tree": tree, "tile_spec_cache": tile_spec_cache}
    drafter = eagle_config_for(paths["target"], paths[kind], kind, num_steps, policy, **rounds)
    setup = setup or setup_of()
    group = runners(paths, drafter, setup, on, returned)
    served = Served(Drafted(group, drafter, setup, **options), group)
    zero(group)
    served.watch()
    return served


def right_tokens(paths: dict[str, Path], on: On = ON_CPU) -> list[list[int]]:
    """Without a head, one request after the other."""
    setup = setup_of(use_radix_cache=False, enable_overlap=False)
    group = runners(paths, None, setup, on)
    plain = Drafted(group, None, setup)
    zero(group)
    return [plain.generate([each], **params_of(i))[0] for i, each in enumerate(prompts())]


def submit_all(served: Served, **more: Any) -> list[int]:
    """All prompts at once; gives their numbers."""
    harness = served.harness
    ids = [harness.submit(each, **(params_of(i) | more)) for i, each in enumerate(prompts())]
    harness.run()
    harness.check()
    return ids
