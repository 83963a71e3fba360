"""One request, as the scheduler sees it, and one launched step."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang.srt.base_worker import GenerationBatchResult, StepWidth
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.mem_cache.base_prefix_cache import Namespace
from sglang.srt.mem_cache.kv_ledger import RequestKV
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.tokenizer import StopStringFinder


@dataclass(slots=True, eq=False)
class Req:
    """A request from its arrival to its last output.

    Host facts only; what depends on a step in flight is bounded, not known:

        committed          tokens with KV, by the last result read
        committed_bound    the same after all launched steps, at most (exact while prefilling)

    Attributes:
        stop_finder: looks for stop strings in the output; None without any.
        fill_ids: prompt and output at the last admission: what prefill has to feed.
        num_inflight, num_inflight_emits: launched, unread steps with this request, and how many
            of them emit.
        row_is_new: the device does not know the request's row yet.
        num_sent, was_reported: output tokens that the client has been told of; whether it has
            heard of the request at all.
    """

    req_id: int
    rid: str
    input_ids: list[int]
    params: SamplingParams
    width: StepWidth
    stream: bool
    seed: int
    arrival: int
    namespace: Namespace
    stop_token_ids: frozenset[int]
    stop_finder: StopStringFinder | None = None
    output_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    kv: RequestKV | None = None
    fill_ids: list[int] = field(default_factory=list)
    committed: int = 0
    committed_bound: int = 0
    num_inflight: int = 0
    num_inflight_emits: int = 0
    num_emitted_since_admission: int = 0
    num_sent: int = 0
    was_reported: bool = False
    num_cached_tokens: int = 0
    num_retractions: int = 0
    was_admitted: bool = False
    row_is_new: bool = False

    @property
    def is_prefilling(self) -> bool:
        """Whether prompt rows are still to be launched. Needs `kv`."""
        return self.committed_bound < len(self.fill_ids)

    @property
    def num_remaining(self) -> int:
        """Tokens that may still be generated, by the last result read."""
        return self.params.max_new_tokens - len(self.output_ids)

    @property
    def surely_ends(self) -> bool:
        """Whether the launched steps reach max_new_tokens even at one token each."""
        return self.num_inflight_emits >= max(self.num_remaining, 1)

    @property
    def known_ids(self) -> list[int]:
        return self.input_ids + self.output_ids


@dataclass(frozen=True, slots=True)
class LaunchedRow:
    """A request's part in a launched step.

    Attributes:
        max_kept: what the launch added to `committed_bound`.
        ends_prompt: the step feeds the last prompt token.
    """

    req: Req
    max_kept: int
    emits: bool
    ends_prompt: bool

    @property
    def is_decode(self) -> bool:
        return self.emits and not self.ends_prompt


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose result is not read yet."""

    rows: list[LaunchedRow]
    result: GenerationBatchResult
