"""The messages of requests and their outputs.

One class per message; `messages/control.py` has those of control calls.

Messages are msgspec structs, tagged by class name; nothing is ever pickled.

    front end (tokenizer manager) --TokenizedGenerateReqInput, AbortReq, control--> scheduler
    scheduler --BatchTokenIDOutput, HealthPing--> detokenizer
    detokenizer --BatchStrOutput, HealthPing--> front end
    scheduler --control replies--> front end
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from sglang.srt.messages.control import ControlOutput, ControlRequest, HealthPing, Message
from sglang.srt.sampling.sampling_params import SamplingParams

# ---------------------------------------------------------------- results


class FinishReason(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`meta_info.finish_reason` of SGLang.

    Attributes:
        type: `stop` (matched: the token id or the text), `length` (length: tokens generated) or
            `abort` (message, status_code and err_type say why).
    """

    type: Literal["stop", "length", "abort"]
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None


DECODE_FAILED = FinishReason(
    type="abort",
    message="The output could not be turned into text; see the server's log.",
    status_code=500,
    err_type="DetokenizerError",
)
BROKEN_OUTPUT = FinishReason(
    type="abort",
    message="The output could not be taken in; see the server's log.",
    status_code=500,
    err_type="InternalServerError",
)
STOP_TOO_SLOW = FinishReason(
    type="abort",
    message="stop_regex takes too long on this output; use a simpler expression.",
    status_code=400,
    err_type="BadRequestError",
)

TOO_MANY_KEPT = FinishReason(
    type="abort",
    message="return_top_p_token_ids: the filters keep too many tokens; lower top_p or top_k.",
    status_code=400,
    err_type="BadRequestError",
)


class DecodeOptions(msgspec.Struct, array_like=True, frozen=True):
    """The part of a request that the detokenizer must know; sent with its first output.

    Attributes:
        context_ids: the last ids of the prompt, on which the text of the output's first depends.
    """

    skip_special_tokens: bool
    stop_strings: list[str]
    no_stop_trim: bool
    stop_regexes: list[str] = []
    min_new_tokens: int = 0
    context_ids: list[int] = []


class LogprobOptions(msgspec.Struct, frozen=True):
    """The log-probabilities that a request wants.

    Attributes:
        start_len: first prompt position wanted; the prompt's length less one for outputs only.
        top_num: best tokens per position.
        token_ids: ids wanted at every position.
        kept: whether the tokens that the filters kept are wanted with each token drawn, whose
            log-probability is then that among them.
    """

    start_len: int
    top_num: int = 0
    token_ids: list[int] = []
    kept: bool = False


class PositionLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities at one position.

    Attributes:
        logprob: of the token there; None where there is nothing before it.
        top_logprobs, top_ids: of the best tokens, best first.
        chosen: logprobs of `LogprobOptions.token_ids`.
        kept: ids of the tokens that the filters kept, best first: int32 as they lie in memory; None
            if they are too many.
    """

    token_id: int
    logprob: float | None
    top_logprobs: list[float] = []
    top_ids: list[int] = []
    chosen: list[float] = []
    kept: bytes | None = b""


class ReqOutput(msgspec.Struct, array_like=True):
    """News of one request. A request's last output, and no other, has a finish reason.

    Attributes:
        req_id: the server's own number of the request.
        token_ids: generated tokens since the last output, the stop token included.
        completion_tokens: all tokens generated so far.
        options: only on the first output of a request.
        step_lens: how many of `token_ids` each step gave, if the request wants to know.
        num_proposed_drafts: drafts that all its steps so far have verified.
        accept_histogram: of those steps, how many confirmed 0, 1, ... of their drafts; empty where
            no step has verified any.
        drafts_by: those drafts and how many were confirmed, by the name of their drafter; empty
            where the server has one.
        input_logprobs, output_logprobs: new ones, of prompt positions and of `token_ids`.
        hidden_states: new ones; of each row that is returned its float32 values, as they lie in
            memory: as numbers of Python a prompt's would hold up every process.
        weight_spans: of each model the labels of the weights that generated the tokens, each with
            its first token's index among all tokens generated; empty if nothing has changed since
            the last output.
        queue_time_s: how long it waited before it first ran; None if it has not, or was told.
    """

    req_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int
    options: DecodeOptions | None = None
    input_logprobs: list[PositionLogprobs] = []
    output_logprobs: list[PositionLogprobs] = []
    hidden_states: list[bytes] = []
    step_lens: list[int] = []
    weight_spans: dict[str, list[tuple[str, int]]] = {}
    num_proposed_drafts: int = 0
    accept_histogram: list[int] = []
    drafts_by: dict[str, tuple[int, int]] = {}
    queue_time_s: float | None = None


class ReqTextOutput(msgspec.Struct, array_like=True):
    """`ReqOutput` with its text.

    Attributes:
        text: text since the last output. Appending all of them gives the final text: a text that
            could still become part of a stop string or of a longer character is held back.
        token_ids: tokens since the last output, the stop token included.
    """

    req_id: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int
    input_logprobs: list[PositionLogprobs] = []
    output_logprobs: list[PositionLogprobs] = []
    hidden_states: list[bytes] = []
    step_lens: list[int] = []
    weight_spans: dict[str, list[tuple[str, int]]] = {}
    num_proposed_drafts: int = 0
    accept_histogram: list[int] = []
    drafts_by: dict[str, tuple[int, int]] = {}
    queue_time_s: float | None = None


# ---------------------------------------------------------------- front end -> scheduler


class HiddenFileOptions(msgspec.Struct, array_like=True):
    """Says where the hidden states of a request go.

    Attributes:
        path: of a file that does not exist yet, in a folder of the server.
        layers: which states each row has, counted as in `hidden_states` of transformers.
    """

    path: str
    layers: list[int]


class TokenizedGenerateReqInput(Message):
    """One sequence to generate, checked and tokenized.

    Attributes:
        req_id: the server's own number of the request, unique for the life of the server.
        rid: the client's name for it, or one made by the front end; only a label.
        logprobs: None for none.
        hidden_states: `none`, `all` rows fed, or the `last` row of each step.
        hidden_file: takes all of them instead of the answer; None: none does.
        cache_key: KV is shared only between requests with the same.
        streams: its client gets tokens as they come, so it sees gaps between them.
    """

    req_id: int
    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    logprobs: LogprobOptions | None = None
    hidden_states: Literal["none", "all", "last"] = "none"
    hidden_file: HiddenFileOptions | None = None
    priority: int = 0
    cache_key: tuple[str, str] = ("", "")
    streams: bool = False

    @property
    def namespace(self) -> tuple[str, str, bool]:
        """The values beside the tokens that must be equal to share KV. Of deterministic requests
        all KV was computed in fixed orders."""
        return (*self.cache_key, self.sampling_params.deterministic)


# ---------------------------------------------------------------- token and text streams


class BatchTokenIDOutput(Message):
    """Scheduler to detokenizer: the news of one step."""

    outputs: list[ReqOutput]


class BatchStrOutput(Message):
    """Detokenizer to front end."""

    outputs: list[ReqTextOutput]


# ---------------------------------------------------------------- start of a process


class SchedulerInfo(msgspec.Struct, kw_only=True):
    """The facts about the scheduler that the front end must know; resolved values, not wishes.

    Attributes:
        vocab_size: width of the logits; token ids at or above it are refused.
        max_req_len: prompt plus max_new_tokens of one request at most, by context and KV pool.
        max_req_len_reason: which of the two limits it, and the remedy.
        eos_token_ids: ids that end an output.
        mtp_max_k: tokens that a request may predict per step; 0 where none may.
        mtp_refusal: why none may, and the remedy; None: the model has no mask token.
        drafters: see `DrafterConfig.names`; masks are not among them.
        hidden_layers: the layers of files of hidden states, see `HiddenFileOptions`.
        hidden_row_bytes: bytes of one row of such a file.
        resolved: the resolved configuration, for `/server_info`.
    """

    vocab_size: int
    context_len: int
    max_total_num_tokens: int
    max_req_len: int
    max_req_len_reason: str
    max_running_requests: int
    eos_token_ids: list[int]
    mtp_max_k: int = 0
    mtp_refusal: str | None = None
    drafters: dict[str, str] = {}
    hidden_layers: list[int] = []
    hidden_row_bytes: int = 0
    resolved: dict[str, Any]


class ProcessReady(Message):
    """A child process can work now. `scheduler` comes from the scheduler alone."""

    role: str
    scheduler: SchedulerInfo | None = None


class ProcessFailed(Message):
    """A child process cannot start; `message` is one line for the user."""

    role: str
    message: str


ToScheduler = TokenizedGenerateReqInput | ControlRequest | HealthPing
ToDetokenizer = BatchTokenIDOutput | HealthPing
ToFrontend = BatchStrOutput | ControlOutput | HealthPing
ToLauncher = ProcessReady | ProcessFailed
