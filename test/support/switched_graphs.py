"""The bundled model and its EAGLE-3 head with graphs, on any device: what holds when the tier is
another one in each step, and with accept thresholds below 1."""

from __future__ import annotations

import copy
import modulefinder
import pickletools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from drafted_serving import Drafted
from drafter_checks import DraftCounter
from jumping_tier import CHANGING, JUMPING, resting
from oracle import Reference, assert_equal_up_to_near_ties, code_snippets, most_near_ties
from sglang.srt.environ import Environ
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.model_config import load_model_config, resolve_model_path
from sglang.srt.model_executor.draft_passes import Drafts
from sglang.srt.model_executor.runner_graphs import RunnerGraphs
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.processes.round_flags import Asked
from sglang.srt.processes.runtime_config import drafter_needs
from sglang.srt.processes.speculation_flags import drafter_from_flags
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.tokenizer import load_tokenizer
from utils import Setup, make_execution

DEMO = resolve_model_path("demo")
MODULES = [copy, modulefinder, pickletools]  # held out of the corpus of model and head
NUM_STEPS = 3
TIERS = tuple(range(NUM_STEPS + 1))
WAVES = (1, 6, 2, 4, 3)  # requests that arrive together, one wave when the last one has ended
MAX_REQUESTS = max(WAVES)


@dataclass(frozen=True)
class Place:
    """Settings of a check.

    Attributes:
        max_graph_rows: rows of prompts and decodes together that have graphs; 0: there are none.
        memory: what is in use or kept for later; compared when nothing runs.
        prompt_tokens, new_tokens: of a request, at most and at least.
        warm_waves: rounds of all waves after which nothing may become more.
        context_len: of the model, in tokens; a request needs less.
    """

    device: str
    backend: str
    max_graph_rows: int
    memory: Callable[[], tuple[int, ...]]
    prompt_tokens: int = 100
    new_tokens: int = 20
    warm_waves: int = 3
    context_len: int = 192


def drafter_of(tier_policy: str, num_steps: int = NUM_STEPS, **flags: Any) -> DrafterConfig:
    """The bundled EAGLE-3 head; `flags` are of `ServerArgs`."""
    args = ServerArgs(
        model_path="demo",
        speculative_algorithm="EAGLE3",
        speculative_draft_model_path="demo-eagle3",
        speculative_num_steps=num_steps,
        speculative_load_aware="off",
        **flags,
    )
    model = load_model_config("demo")
    suppressed = (model.hf["mtp_mask_token_id"],)
    asked = Asked(args=args, model=model, suppressed_token_ids=suppressed, environ=Environ())
    drafter = drafter_from_flags(asked)
    assert drafter is not None
    rounds = replace(drafter.options.rounds, tier_policy=tier_policy)
    return replace(drafter, options=replace(drafter.options, rounds=rounds))


class Switched(Drafted):
    """A scheduler over the model with the head, or alone, with graphs.

    Attributes:
        replayed: steps without prompts, by their tier and whether the target replayed a graph.
        num_switches: steps whose tier was another one than that of the step before.
    """

    def __init__(self, place: Place, drafter: DrafterConfig | None, checks_kv: bool = False):
        needs = drafter_needs(drafter)
        setup = Setup(
            num_pages=2048,
            use_radix_cache=False,
            max_running_requests=MAX_REQUESTS,
            chunked_prefill_size=place.max_graph_rows or 1024,
            context_len=place.context_len,
            max_decode_rows=needs.max_slots,
        )
        execution = make_execution(
            DEMO,
            setup,
            place.context_len,
            needs.max_rows,
            device=place.device,
            attention_backend=place.backend,
            dtype="float32",
            max_graph_width=needs.max_rows if place.max_graph_rows else 0,
            row_width=setup.row_width,
            capture=needs.capture,
        )
        execution = replace(execution, max_graph_rows=place.max_graph_rows)
        self.group = make_runners(execution, *drafter_models(drafter, execution))
        self.replayed = Counter[tuple[int, bool]]()
        self.num_switches = 0
        self._tier = -1
        counter = DraftCounter()
        self.seen: Counter[str] = counter.seen

        def on_step(step: ComputedStep) -> None:
            counter(step)
            self._note(step)

        worker = {"on_step": on_step} if drafter is not None else {}
        super().__init__(self.group, drafter, setup, checks_kv=checks_kv, **worker)
        for pool in self.group.memory.pools:
            for kv in pool.kv:
                kv.zero_()  # of nobody, and masked: a graph's padding reads it

    def _note(self, step: ComputedStep) -> None:
        if any(step.batch.num_prompt_tokens):
            return
        tier = step.plan.draft_length
        self.replayed[tier, step.forward.used_graph] += 1
        self.num_switches += tier != self._tier
        self._tier = tier

    @property
    def num_graphs(self) -> int:
        return sum(runner.num_graphs for runner in self.group.runners)

    def serve(self, requests: Sequence[dict[str, Any]]) -> list[list[int]]:
        """Tokens of all requests, which come in WAVES again and again."""
        waiting, tokens = list(requests), []
        for size in WAVES * len(requests):
            wave, waiting = waiting[:size], waiting[size:]
            ids = [self.submit(**request) for request in wave]
            self.run()
            tokens += [self.outputs.pop(req_id).token_ids for req_id in ids]
        return tokens


@contextmanager
def noted_drafts() -> Iterator[Counter[tuple[int, bool]]]:
    """Counts passes of draft steps while this lasts: how many steps, and whether a graph was
    replayed."""
    seen = Counter[tuple[int, bool]]()
    draft = RunnerGraphs.draft

    def noting(self: RunnerGraphs, first: Any, num_steps: int) -> Drafts | None:
        found = draft(self, first, num_steps)
        seen[num_steps, found is not None] += 1
        return found

    with mock.patch.object(RunnerGraphs, "draft", noting):
        yield seen


def greedy_requests(place: Place) -> list[dict[str, Any]]:
    """Pieces of held-out code of different lengths; so many that each wave comes once."""
    encode = load_tokenizer(DEMO).encode
    texts = code_snippets(MODULES, sum(WAVES), [40, 160, 161, 300])
    return [
        {
            "input_ids": encode(text)[: place.prompt_tokens],
            "max_new_tokens": place.new_tokens + 3 * (index % 5),
            "temperature": 0.0,
            "ignore_eos": True,
        }
        for index, text in enumerate(texts)
    ]


def sampled_requests(place: Place) -> list[dict[str, Any]]:
    """The same with a temperature and a seed of their own."""
    return [
        {**request, "temperature": 1.0, "sampling_seed": 100 + index}
        for index, request in enumerate(greedy_requests(place))
    ]


# ---------------------------------------------------------------- checks


def references(place: Place) -> list[Reference]:
    """Greedy tokens without a head, one request after the other."""
    plain, found = Switched(place, None), []
    for request in greedy_requests(place):
        scores = LogprobOptions(start_len=len(request["input_ids"]) - 1, top_num=2, token_ids=[])
        req_id = plain.submit(**request, logprobs=scores)
        plain.run()
        outcome = plain.outputs[req_id]
        tops = [position.top_logprobs for position in outcome.output_logprobs]
        gaps = [first - second for first, second in tops]
        found.append(Reference(request["input_ids"], outcome.token_ids, gaps))
    return found


def check_tokens(place: Place, right: list[Reference], policy: str, num_steps: int) -> None:
    """Greedy tokens are those without a head, and every step without prompts replays graphs."""
    with noted_drafts() as drafts:
        harness = Switched(place, drafter_of(policy, num_steps), checks_kv=True)
        tokens = harness.serve(greedy_requests(place))
    harness.check()
    assert_equal_up_to_near_ties(tokens, right, f"{policy}, {num_steps} steps")
    tiers = (num_steps,) if policy == "fixed" else tuple(range(num_steps + 1))
    assert all(used for _, used in harness.replayed), harness.replayed
    assert {tier for tier, _ in harness.replayed} == {*tiers}
    wanted = {tier - 1 for tier in tiers if tier > 1}
    assert {*drafts} == {(each, True) for each in wanted}, drafts
    assert all(count > 2 for count in (harness.replayed + drafts).values())
    assert harness.seen["confirmed"] > 40
    assert harness.seen["fed"] - harness.seen["confirmed"] > 40
    assert (harness.num_switches == 1) == (policy == "fixed")


def check_storm(place: Place, least_switches: int) -> None:
    """Another tier in each step: after a while nothing is captured or kept that was not there."""
    harness, requests = Switched(place, drafter_of(CHANGING)), greedy_requests(place)
    one = [{**requests[0], "max_new_tokens": 1}]
    for _ in range(place.warm_waves):
        harness.serve(requests)

    def memory() -> tuple[int, ...]:
        """Behind a last step that is always the same."""
        with resting(harness.planner.policy):
            harness.serve(one)
        return place.memory()

    before, num_graphs, num_before = memory(), harness.num_graphs, harness.num_switches
    assert num_graphs > 10
    while harness.num_switches - num_before < least_switches:
        harness.serve(requests)
        assert memory() == before
        assert harness.num_graphs == num_graphs
    assert all(used for _, used in harness.replayed), harness.replayed
    assert all(harness.replayed[tier, True] > least_switches // 20 for tier in TIERS)
    harness.check()


def check_thresholds(place: Place) -> None:
    """A seeded request repeats, alone and beside others; more drafts are accepted than at 1, where
    tokens are those without a head."""
    requests = sampled_requests(place)
    plain = Switched(place, None).serve(requests)
    exact = Switched(place, drafter_of("fixed"))
    assert_few_differ(exact.serve(requests), plain, "both thresholds at 1")
    changing = Switched(place, drafter_of(CHANGING))
    assert_few_differ(changing.serve(requests), plain, "both thresholds at 1, tiers that change")
    flags = {
        "speculative_accept_threshold_single": 0.3,
        "speculative_accept_threshold_acc": 0.5,
    }
    loose = Switched(place, drafter_of("fixed", **flags))
    first = loose.serve(requests)
    shares = [each.seen["confirmed"] / each.seen["fed"] for each in (loose, exact)]
    assert shares[0] > shares[1], shares
    assert loose.serve(requests) == first
    alone = [tokens for request in requests for tokens in loose.serve([request])]
    assert_few_differ(alone, first, "alone")
    assert sum(one != other for one, other in zip(first, plain, strict=True)) > len(plain) // 4
    assert {used for _, used in loose.replayed} == {place.max_graph_rows > 0}, loose.replayed


def assert_few_differ(tokens: list[list[int]], right: list[list[int]], what: str) -> None:
    """All are equal, but for one of them: two tokens whose noise is nearly the same."""
    differing = [i for i, pair in enumerate(zip(tokens, right, strict=True)) if pair[0] != pair[1]]
    assert len(differing) <= max(1, most_near_ties(len(right))), (what, differing)


CASES = ((CHANGING, NUM_STEPS), (JUMPING, NUM_STEPS), ("fixed", 1), ("fixed", NUM_STEPS))
