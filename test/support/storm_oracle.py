"""Tells what a request of the storm must give, by its definition alone: no cache, batch or steps.

The model is computed densely in a few lines of its own. A token is right if it is what the
parameters choose behind the tokens before it, so an output whose every token is right is that of
the request run alone. Weights that change under a request, and KV that it keeps from the old
ones, are part of the definition (`Stretch`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch

import sgl_kernel.reference as sampling_reference
from sgl_kernel import SamplingRows
from sglang.srt.messages.requests import FinishReason, TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from storm_grammars import is_allowed

TEXTS = [b"a", b"b", b"c", b"d", b"e", b"f", b" ", b"\n", b"\xc3", b"\xa9", b"", b""]
VOCAB_SIZE = len(TEXTS)
MASK = VOCAB_SIZE - 1
NEAR_TIE = 1e-3
Cache = list[tuple[torch.Tensor, torch.Tensor]]


def text_of(tokens: list[int]) -> str:
    """Text of token ids; bytes that are no character yet, or never will be, are replaced."""
    return b"".join(TEXTS[token] for token in tokens).decode(errors="replace")


def text_behind(prompt: list[int], tokens: list[int]) -> str:
    """Returns what tokens add to the text of a prompt: a character that begins there comes
    whole."""
    before, whole = text_of(prompt), text_of([*prompt, *tokens])
    kept = before if whole.startswith(before) else before.removesuffix("\ufffd")
    return whole[len(kept) :]


class DenseModel:
    """A Llama over whole sequences.

    Args:
        weights: by the names of a checkpoint.
    """

    def __init__(self, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights
        self._num_layers = config["num_hidden_layers"]
        self._num_kv_heads = config["num_key_value_heads"]
        self._head_dim = config["head_dim"]
        self._eps = config["rms_norm_eps"]
        steps = torch.arange(0, self._head_dim, 2).float() / self._head_dim
        self._frequencies = 10000.0**-steps

    def updated(self, weights: dict[str, torch.Tensor]) -> DenseModel:
        """With some weights replaced."""
        copy = object.__new__(DenseModel)
        copy.__dict__.update(self.__dict__)
        copy.weights = {**self.weights, **weights}
        return copy

    @torch.inference_mode()
    def run(
        self, ids: list[int], positions: list[int], visible: torch.Tensor, past: Cache
    ) -> tuple[torch.Tensor, Cache]:
        """Hidden states [T, D] after the last norm, and K and V of past and new rows.

        Args:
            visible: [T, P + T] bool; which of the past and new rows each new one sees.
        """
        x = self.weights["model.embed_tokens.weight"][torch.tensor(ids)]
        angles = torch.tensor(positions)[:, None] * self._frequencies
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        cache: Cache = []
        for layer in range(self._num_layers):
            x, kv = self._layer(f"model.layers.{layer}.", x, (cos, sin), visible, past, layer)
            cache.append(kv)
        return self._norm(x, "model.norm.weight"), cache

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, V]."""
        output_head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return hidden @ output_head.T

    def _layer(
        self,
        name: str,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
        past: Cache,
        layer: int,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        def heads(kind: str) -> torch.Tensor:
            rows = normed @ self.weights[f"{name}self_attn.{kind}_proj.weight"].T
            return rows.view(len(rows), -1, self._head_dim).transpose(0, 1)

        normed = self._norm(x, f"{name}input_layernorm.weight")
        q, k, v = _rotate(heads("q"), *rotation), _rotate(heads("k"), *rotation), heads("v")
        if past:
            k, v = torch.cat((past[layer][0], k), 1), torch.cat((past[layer][1], v), 1)
        groups = q.shape[0] // self._num_kv_heads
        scores = q @ k.repeat_interleave(groups, 0).transpose(1, 2) * self._head_dim**-0.5
        shares = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        attended = (shares @ v.repeat_interleave(groups, 0)).transpose(0, 1).flatten(1)
        x = x + attended @ self.weights[f"{name}self_attn.o_proj.weight"].T
        normed = self._norm(x, f"{name}post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(normed @ self.weights[f"{name}mlp.gate_proj.weight"].T)
        up = normed @ self.weights[f"{name}mlp.up_proj.weight"].T
        return x + (gate * up) @ self.weights[f"{name}mlp.down_proj.weight"].T, (k, v)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * self.weights[name]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


@dataclass(frozen=True)
class Stretch:
    """From here on a request is computed by other weights, or its KV anew.

    Attributes:
        num_outputs: tokens that it had generated.
        num_kept: tokens whose KV it had and keeps.
        model: what computes everything else.
    """

    num_outputs: int
    num_kept: int
    model: DenseModel


@dataclass
class Rows:
    """Holds what chooses the tokens of an output, row by row.

    Attributes:
        logits: [n, V]; of token i, adjusted as its request asks.
        step_lens: of unverified requests: tokens that each step accepts before clipping.
        margins: of the same: how close the confidences that decide it were to the threshold.
        hidden: [P + n - 1, D]; of each token before the last one, where one model computed all.
        prompt_logits: [P, V]; likewise, and not adjusted.
    """

    logits: torch.Tensor
    step_lens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    hidden: torch.Tensor | None = None
    prompt_logits: torch.Tensor | None = None


class Expectation:
    """Tells what one request must give behind the tokens that it gave.

    Args:
        request: as it was sent, with its seed.
        stop_ids: ids that end it.
        stretches: in order, the first from its arrival.
        tokens, step_lens: what it gave.
    """

    def __init__(
        self,
        request: TokenizedGenerateReqInput,
        stop_ids: frozenset[int],
        stretches: list[Stretch],
        tokens: list[int],
        step_lens: list[int],
    ) -> None:
        self.request, self.params = request, request.sampling_params
        self.stop_ids = stop_ids
        self.tokens = tokens
        self._known = request.input_ids + tokens
        self._num_prompt = len(request.input_ids)
        self._stretches = stretches
        self._step_lens = step_lens

    @property
    def is_unverified(self) -> bool:
        params = self.params
        return params.mtp_enabled and not params.mtp_verify and params.mtp_k > 1

    def rows(self) -> Rows:
        """Runs every stretch behind what the one before it left."""
        rows = Rows(torch.empty(0, VOCAB_SIZE))
        past: Cache = []
        ends = [*self._stretches[1:], None]
        for stretch, following in zip(self._stretches, ends, strict=True):
            past = [(k[:, : stretch.num_kept], v[:, : stretch.num_kept]) for k, v in past]
            past = self._run(stretch, following, past, rows)
        return rows

    def _run(self, stretch: Stretch, following: Stretch | None, past: Cache, rows: Rows) -> Cache:
        end = len(self.tokens) if following is None else following.num_outputs
        last = self._num_prompt + end - 1  # the row behind it has given no token of this stretch
        if following is not None:
            last = max(following.num_kept, last if end > stretch.num_outputs else 0)
        ids = self._known[stretch.num_kept : last]
        if not ids:
            return past
        boundaries = self._boundaries(stretch.num_outputs, end) if self.is_unverified else []
        num_masks = self.params.mtp_k - 1
        num_new, num_past = len(ids), stretch.num_kept
        positions = list(range(num_past, last))
        for boundary in boundaries:
            ids = ids + [MASK] * num_masks
            start = self._num_prompt + boundary
            positions += range(start, start + num_masks)
        visible = self._visible(num_past, num_new, boundaries)
        hidden, cache = stretch.model.run(ids, positions, visible, past)
        certain = hidden[:num_new]
        if boundaries:
            self._add_predictions(stretch, hidden, num_new, boundaries, end, rows)
        elif end > stretch.num_outputs:
            first = self._num_prompt + stretch.num_outputs - 1 - num_past
            logits = stretch.model.logits(certain[first:])
            counts = list(range(stretch.num_outputs, end))
            rows.logits = torch.cat((rows.logits, self._adjusted(logits, counts)))
        if len(self._stretches) == 1:
            rows.hidden = certain
            rows.prompt_logits = stretch.model.logits(certain[: self._num_prompt])
        keep = num_past + num_new
        return [(k[:, :keep], v[:, :keep]) for k, v in cache]

    def _boundaries(self, first: int, end: int) -> list[int]:
        """Numbers of outputs at which steps began, in a stretch."""
        starts, start = [], 0
        for length in self._step_lens:
            starts.append(start)
            start += length
        found = [start for start in starts if first <= start < end]
        if end > first:
            assert found, "no step began in a stretch that has tokens"
            assert found[0] == first, f"no step began at output {first}, where KV changed"
        return found

    def _visible(self, num_past: int, num_new: int, boundaries: list[int]) -> torch.Tensor:
        num_masks = self.params.mtp_k - 1
        num_rows = num_new + num_masks * len(boundaries)
        visible = torch.zeros(num_rows, num_past + num_rows, dtype=torch.bool)
        visible[:num_new, : num_past + num_new] = torch.ones(
            num_new, num_past + num_new, dtype=torch.bool
        ).tril(num_past)
        for index, boundary in enumerate(boundaries):
            start = num_new + index * num_masks
            group = slice(start, start + num_masks)
            visible[group, : self._num_prompt + boundary] = True
            columns = slice(num_past + start, num_past + start + num_masks)
            visible[group, columns] = torch.ones(num_masks, num_masks, dtype=torch.bool).tril()
        return visible

    def _add_predictions(
        self,
        stretch: Stretch,
        hidden: torch.Tensor,
        num_new: int,
        boundaries: list[int],
        end: int,
        rows: Rows,
    ) -> None:
        """Rows of the masks behind each boundary, and how many of them a step accepts."""
        k, tau = self.params.mtp_k, self.params.mtp_threshold
        for index, boundary in enumerate(boundaries):
            certain = self._num_prompt + boundary - 1 - stretch.num_kept
            start = num_new + index * (k - 1)
            states = torch.cat((hidden[certain : certain + 1], hidden[start : start + k - 1]))
            counts = list(range(boundary, boundary + k))
            logits = self._adjusted(stretch.model.logits(states), counts)
            confidence = logits.softmax(-1).amax(-1).tolist()
            length = next((i for i in range(k) if confidence[i] < tau), k)
            rows.step_lens.append(max(1, length))
            rows.margins.append(min(abs(value - tau) for value in confidence[: length + 1]))
            following = boundaries[index + 1] if index + 1 < len(boundaries) else end
            assert following - boundary <= k, f"a step of {following - boundary} tokens, k is {k}"
            rows.logits = torch.cat((rows.logits, logits[: following - boundary]))

    def _adjusted(self, logits: torch.Tensor, num_outputs: list[int]) -> torch.Tensor:
        """Logits of the tokens behind so many outputs each: penalties, biases, stops that must not
        be drawn yet, the mask, what a grammar forbids."""
        params, logits = self.params, logits.clone()
        for row, num in zip(logits, num_outputs, strict=True):
            if params.has_penalties:
                for token in set(self.tokens[:num]):
                    factor = params.repetition_penalty
                    row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
                    times = self.tokens[:num].count(token)
                    row[token] -= times * params.frequency_penalty + params.presence_penalty
            for token_id, bias in (params.logit_bias or {}).items():
                row[int(token_id)] += bias
            if num < params.min_new_tokens:
                row[sorted(self.stop_ids)] = float("-inf")
            row[MASK] = float("-inf")
            if params.grammar is not None:
                output = self.tokens[:num]
                for token in range(VOCAB_SIZE):
                    if not is_allowed(params.grammar, output, token):
                        row[token] = float("-inf")
        return logits

    def chosen(self, logits: torch.Tensor, start: int = 0) -> list[int]:
        """The output tokens from place `start` on, of rows [n, V]."""
        params, size = self.params, len(logits)
        if params.is_greedy or not size:
            return logits.argmax(-1).tolist()
        assert params.sampling_seed is not None
        first = self._num_prompt + start
        rows = SamplingRows(
            temperature=torch.full((size,), params.temperature),
            top_k=torch.full((size,), VOCAB_SIZE if params.top_k == -1 else params.top_k),
            top_p=torch.full((size,), params.top_p),
            min_p=torch.full((size,), params.min_p),
            seeds=torch.full((size,), params.sampling_seed),
            positions=torch.arange(first, first + size),
        )
        tokens, _ = sampling_reference.sample_tokens(logits, rows)
        return tokens.tolist()

    def is_near_tie(self, logits: torch.Tensor, place: int, token: int, other: int) -> bool:
        """Tells whether rounding may choose `token` at a place of the output where [V] says
        `other`."""
        if self.params.is_greedy:
            return float(logits[other] - logits[token]) <= NEAR_TIE
        # A draw compares products of probabilities and noise, and probabilities with bounds.
        noise = torch.empty_like(logits).uniform_(-NEAR_TIE, NEAR_TIE)
        towards = torch.zeros_like(logits)
        towards[token], towards[other] = NEAR_TIE, -NEAR_TIE
        others = (logits + change for change in (noise, -noise, towards, -towards))
        return any(self.chosen(each[None], place) == [token] for each in others)

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """[n, V] of the distribution that tokens are drawn from."""
        scale = 1.0 if self.params.is_greedy else self.params.temperature
        return torch.log_softmax(logits / scale, -1)


def expected_end(
    params: SamplingParams, prompt: list[int], tokens: list[int], stop_ids: frozenset[int]
) -> str:
    """`stop` or `length` if the output must end with its last token, else empty; `too late` if it
    should have ended before."""
    for count in range(1, len(tokens) + 1):
        if _stops(params, prompt, tokens[:count], stop_ids):
            return "stop" if count == len(tokens) else "too late"
    if len(tokens) > params.max_new_tokens:
        return "too late"
    return "length" if len(tokens) == params.max_new_tokens else ""


def _stops(
    params: SamplingParams, prompt: list[int], tokens: list[int], stop_ids: frozenset[int]
) -> bool:
    if tokens[-1] in stop_ids:
        return True
    return params.has_stop_texts and bool(_stop_texts(params, prompt, tokens))


def _stop_texts(params: SamplingParams, prompt: list[int], tokens: list[int]) -> list[str]:
    """Stop strings that end, and expressions that match, behind the first min_new_tokens tokens."""
    if len(tokens) <= params.min_new_tokens:
        return []
    text = text_behind(prompt, tokens)
    # A character that later tokens complete is behind them.
    start = len(text_behind(prompt, tokens[: params.min_new_tokens]).rstrip("\ufffd"))
    return [s for s in params.stop_strings if s in text[max(0, start - len(s) + 1) :]] + [
        e for e in params.stop_regexes if re.compile(e).search(text, start)
    ]


def stop_matches(
    reason: FinishReason, params: SamplingParams, prompt: list[int], tokens: list[int]
) -> bool:
    """Tells whether what a request says it stopped at is there."""
    if isinstance(reason.matched, int):
        return reason.matched == tokens[-1]
    return reason.matched in _stop_texts(params, prompt, tokens)
