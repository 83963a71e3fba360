"""Sampling parameters of one request, as they travel from the front end to the scheduler."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from sglang.srt.sampling.grammar import EBNF, JSON_SCHEMA, REGEX, STRUCTURAL_TAG, Grammar

GREEDY_TEMPERATURE = 1e-6  # below it the most probable token is taken, as SGLang does
STATIC, CONF_ADAPT = "static", "conf_adapt"
DEFAULT_TAU = 0.9  # in messages only: there is no default threshold
MTP_STRATEGY_RULE = (
    f'must be ["{STATIC}"] or ["{CONF_ADAPT}", threshold]; as a text "{STATIC}",'
    f' "{CONF_ADAPT}:threshold", "{CONF_ADAPT}" beside mtp_conf_threshold, or such a list in JSON'
)
MAX_MAGNITUDE = 1e6  # of temperatures and biases: logits of float32 stay finite
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1


class Speculative(
    msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The `speculative` object of a request: what a drafter of the server does for it. Drafts
    change how fast its tokens come, not which they are.

    Attributes:
        enabled: false: nothing is drafted.
        max_drafts: drafts per step at most, 0 for none; None: the server's number, which a larger
            one does not raise.
        drafter: name of the drafter; None: the server chooses.
    """

    enabled: bool = True
    max_drafts: Annotated[int, Meta(ge=0, le=INT64_MAX)] | None = None
    drafter: str | None = None

    @property
    def is_off(self) -> bool:
        """Tells whether nothing is drafted."""
        return not self.enabled or self.max_drafts == 0


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The `sampling_params` object of `/generate`, with SGLang's names and defaults.

    msgspec checks types and ranges when it converts or decodes; `problem` has the other rules.

    Attributes:
        max_new_tokens: tokens to generate at most.
        min_p: keep tokens with at least `min_p` times the probability of the best one.
        top_k: keep this many tokens; -1 keeps all.
        sampling_seed: int64. Noise of the token at a position depends on (seed, position) alone,
            so the same request gives the same tokens whatever else runs. None: drawn per request.
        stop: texts that end the output when they appear in it; they are cut off.
        stop_token_ids: token ids that end the output, beside the model's own end-of-text ids.
        ignore_eos: go on after the model's end-of-text ids; `stop_token_ids` still count.
        no_stop_trim: leave the stop text or stop token in the output.
        stop_regex: regular expressions that end the output when they match in it.
        min_new_tokens: the model's end-of-text ids and `stop_token_ids` cannot be drawn before,
            and no `stop` or `stop_regex` ends the output.
        frequency_penalty, presence_penalty: taken off the logit of a generated token, times its
            count or once.
        repetition_penalty: divides positive logits of generated tokens and multiplies negative
            ones (arXiv 1909.05858, section 4.1).
        logit_bias: token id (as text, since JSON keys are texts) to what its logit gets added.
        mtp_enabled: predict several tokens per step (needs a model with a mask token).
        mtp_k: tokens predicted per step at most.
        mtp_strategy: `["static"]` accepts all k; `["conf_adapt", tau]` the longest prefix whose
            top-1 probabilities reach tau, at least one.
        mtp_conf_threshold: tau, as part of the strategy or here.
        mtp_verify: accept only what one token per step would have given.
        spaces_between_special_tokens: only tokenizers that put such spaces heed it.
        stream_interval: a stream gets a chunk each time it has that many tokens; None: the
            server's.
        speculative: what the server's drafter does for the request.
        deterministic: on a GPU its tokens and log-probabilities have the same bits whatever shares
            its steps; true of all requests of a server that does so for all.
        json_schema, regex, ebnf, structural_tag: what the output must match; one of them at most.
            `json_schema` is the text of a schema, `structural_tag` that of an object.
        return_top_p_token_ids: the answer has the tokens that top_p, top_k and min_p kept where
            each token was drawn, and the log-probabilities are those among them.
        n: samples per prompt; the front end makes one request of each.
    """

    max_new_tokens: Annotated[int, Meta(ge=0)] = 128
    temperature: Annotated[float, Meta(ge=0, le=MAX_MAGNITUDE)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: int = -1
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    sampling_seed: Annotated[int, Meta(ge=INT64_MIN, le=INT64_MAX)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    stop_regex: str | list[str] | None = None
    min_new_tokens: Annotated[int, Meta(ge=0)] = 0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] = 1.0
    logit_bias: dict[str, float] | None = None
    spaces_between_special_tokens: bool = True
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    mtp_enabled: bool = False
    mtp_k: Annotated[int, Meta(ge=1)] = 3
    mtp_strategy: list[str | float] | None = None
    mtp_conf_threshold: float | None = None
    mtp_verify: bool = False
    speculative: Speculative = Speculative()
    deterministic: bool = False
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    return_top_p_token_ids: bool = False
    n: Annotated[int, Meta(ge=1)] = 1

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE or self.top_k == 1

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def stop_regexes(self) -> list[str]:
        if self.stop_regex is None:
            return []
        return [self.stop_regex] if isinstance(self.stop_regex, str) else self.stop_regex

    @property
    def has_stop_texts(self) -> bool:
        return bool(self.stop or self.stop_regex)

    @property
    def grammars(self) -> list[Grammar]:
        """All that are given; more than one is refused."""
        return [
            Grammar(kind, text)
            for kind, text in (
                (JSON_SCHEMA, self.json_schema),
                (REGEX, self.regex),
                (EBNF, self.ebnf),
                (STRUCTURAL_TAG, self.structural_tag),
            )
            if text is not None
        ]

    @property
    def grammar(self) -> Grammar | None:
        """Returns the grammar that the output must match; None for anything."""
        return next(iter(self.grammars), None)

    @property
    def ends_at_eos(self) -> bool:
        """Tells whether the model's end-of-text ids end the output. A grammar has no other end."""
        return not self.ignore_eos or self.grammar is not None

    @property
    def has_filters(self) -> bool:
        """Tells whether some tokens cannot be drawn for their probability or rank."""
        return self.is_greedy or self.top_p < 1 or self.top_k != -1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def adjusts_logits(self) -> bool:
        """Tells whether logits change before a token is drawn from them."""
        return self.has_penalties or bool(self.logit_bias) or self.min_new_tokens > 0

    @property
    def num_predicted(self) -> int:
        """Tokens predicted per step at most."""
        return self.mtp_k if self.mtp_enabled else 1

    @property
    def emits_only_confirmed(self) -> bool:
        """Tells whether each token is one that the model draws after all those before it."""
        return self.mtp_verify or not self.mtp_enabled

    @property
    def reports_steps(self) -> bool:
        """Tells whether the client wants to know how many tokens each step gave."""
        return self.mtp_enabled

    @property
    def mtp_threshold(self) -> float:
        """Probability that a prediction must reach; 0 where all are accepted."""
        if not self.mtp_strategy or self.mtp_strategy[0] != CONF_ADAPT:
            return 0.0
        in_list = self.mtp_strategy[1:]
        return float(in_list[0]) if in_list else self.mtp_conf_threshold or 0.0

    def problem(self) -> str | None:
        """The first rule beyond types and ranges that is broken, as `field: reason`, or None.

        Rules that depend on the model or on the server's limits are the front end's.
        """
        checks = (
            ("top_k", self.top_k == -1 or self.top_k >= 1, "must be -1 (all) or at least 1"),
            ("stop", all(self.stop_strings), "must not hold an empty text"),
            ("stop_regex", all(self.stop_regexes), "must not hold an empty expression"),
            (
                "min_new_tokens",
                self.min_new_tokens <= self.max_new_tokens,
                "must be between 0 and max_new_tokens",
            ),
            (
                "logit_bias",
                all(abs(value) <= MAX_MAGNITUDE for value in (self.logit_bias or {}).values()),
                f"must hold numbers in [-{MAX_MAGNITUDE:g}, {MAX_MAGNITUDE:g}]",
            ),
        )
        first = next((f"{name}: {rule}" for name, holds, rule in checks if not holds), None)
        first = first or self._grammar_problem() or self._speculative_problem()
        return first or (self._mtp_problem() if self.mtp_enabled else None)

    def _grammar_problem(self) -> str | None:
        """The first rule of grammars that is broken."""
        kinds = [grammar.kind for grammar in self.grammars]
        if len(kinds) > 1:
            return f"{kinds[1]}: give {kinds[0]} or {kinds[1]}, not both"
        if kinds and self.min_new_tokens > 0:
            return f"min_new_tokens: {kinds[0]} says where the output ends; leave one of them out"
        return None

    def _speculative_problem(self) -> str | None:
        """The rule of drafts, if it is broken."""
        if not self.mtp_enabled or self.speculative == Speculative():
            return None
        if self.speculative.is_off:
            return "speculative: asks for no drafts beside mtp_enabled: true; leave one of them out"
        return "speculative: is for servers with a drafter; beside mtp_enabled give mtp_k"

    def _mtp_problem(self) -> str | None:
        """The first rule of multi-token prediction that is broken."""
        strategy, threshold = self.mtp_strategy or [STATIC], self.mtp_conf_threshold
        in_list = strategy[1:]
        if strategy[0] not in (STATIC, CONF_ADAPT) or len(strategy) > 2:
            return f"mtp_strategy: {MTP_STRATEGY_RULE}"
        for name, value in (("mtp_strategy", in_list[:1]), ("mtp_conf_threshold", [threshold])):
            for tau in value:
                if tau is not None and not (isinstance(tau, int | float) and 0 <= tau <= 1):
                    return f"{name}: the threshold must be a number in [0, 1]"
        if strategy[0] == STATIC and (in_list or threshold is not None):
            name = "mtp_strategy" if in_list else "mtp_conf_threshold"
            return f'{name}: static takes no threshold; use ["{CONF_ADAPT}", {DEFAULT_TAU}]'
        if strategy[0] == CONF_ADAPT and not in_list and threshold is None:
            either = f'["{CONF_ADAPT}", {DEFAULT_TAU}], or mtp_conf_threshold'
            return f"mtp_strategy: needs a threshold, as in {either}"
        if in_list and threshold is not None and in_list[0] != threshold:
            return f"mtp_conf_threshold: {threshold:g} is not the {in_list[0]} of mtp_strategy"
        if self.mtp_verify:
            return None
        if self.deterministic:
            remedy = "or deterministic: false, or mtp_enabled: false"
            return f"deterministic: needs mtp_verify: true beside mtp_enabled, {remedy}"
        if self.temperature > 0:
            return "temperature: must be 0 or left out with mtp_enabled, unless mtp_verify is true"
        if self.has_penalties:
            return "mtp_enabled: penalties need mtp_verify: true"
        if self.grammar is not None:
            return f"mtp_enabled: {self.grammar.kind} needs mtp_verify: true"
        return None
