"""The rule of accept thresholds in plain Python, for one request and one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.speculative.drafter_options import AcceptThresholds

SLACK = 2e-5  # what rounding may do to a probability
GOLDEN = 0x9E3779B97F4A7C15
LogitsBehind = Callable[[list[int]], list[float]]  # the target's, behind a sequence


@dataclass(frozen=True)
class Round:
    """A step of one sampled request with drafts.

    Attributes:
        prompt, output: tokens before the drafts, the certain one included.
        parents: of each draft the number of the node that it follows, 0 is the certain token; None:
            each follows the one before it.
    """

    prompt: list[int]
    output: list[int]
    drafts: list[int]
    emitted: list[int]
    parents: list[int] | None = None

    def children_of(self, node: int) -> list[int]:
        """Nodes that follow a node, in ascending order."""
        parents = self.parents or range(len(self.drafts))
        return [1 + index for index, parent in enumerate(parents) if parent == node]


def expected(
    served: Round,
    params: dict[str, Any],
    thresholds: AcceptThresholds,
    logits_behind: LogitsBehind,
) -> list[int] | None:
    """Returns the tokens that the step is to emit; None where rounding may decide.

    Args:
        params: sampling parameters, with a seed.
    """
    start, seed = len(served.prompt) + len(served.output), params["sampling_seed"]
    accepted: list[int] = []
    node: int | None = 0
    while node is not None:
        output = served.output + accepted
        probs, is_sure = distribution(logits_behind(served.prompt + output), params, output)
        coin, mass = noise(seed, ~(start + len(accepted)), 0), 0.0
        children, node = served.children_of(node), None
        for child in children:
            draft = served.drafts[child - 1]
            chance = probs[draft]
            mass += chance
            scaled = mass / max(thresholds.acc, 1e-9)
            near = min(abs(coin - scaled), abs(chance - thresholds.single) if chance < 1 else 1)
            if not is_sure or (chance > 0 and thresholds.single > 0 and near < SLACK):
                return None
            if chance > 0 and (coin < scaled or chance >= thresholds.single):
                accepted.append(draft)
                node = child
                break
            probs = [0.0 if token == draft else prob for token, prob in enumerate(probs)]
    place, total = noise(seed, ~start, 1) * sum(probs), 0.0
    for token, prob in enumerate(probs):
        total += prob
        if abs(total - place) < SLACK and prob > 0:
            return None
        if place < total:
            return [*accepted, token] if is_sure else None
    raise AssertionError("Nothing is left to draw.")


def distribution(
    logits: Sequence[float], params: dict[str, Any], output: list[int]
) -> tuple[list[float], bool]:
    """After penalties, biases, temperature and filters; False where rounding may decide what the
    filters keep."""
    values = penalized(logits, params, output)
    weights = [math.exp((value - max(values)) / params["temperature"]) for value in values]
    probs = [weight / sum(weights) for weight in weights]
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    top_k, top_p, min_p = params.get("top_k", -1), params.get("top_p", 1), params.get("min_p", 0)
    kept, before, is_sure = [order[0]], 0.0, True
    for rank, token in enumerate(order[1:], 1):
        before += probs[order[rank - 1]]
        floor = min_p * probs[order[0]]
        near_p = top_p < 1 and abs(before - top_p) < SLACK
        is_sure &= not near_p and not (min_p and abs(probs[token] - floor) < SLACK)
        is_kept = (before < top_p or top_p == 1) and probs[token] >= floor
        if is_kept and (top_k == -1 or rank < top_k):
            kept.append(token)
    mass = sum(probs[token] for token in kept)
    return [probs[token] / mass if token in kept else 0.0 for token in range(len(probs))], is_sure


def penalized(logits: Sequence[float], params: dict[str, Any], output: list[int]) -> list[float]:
    values = list(logits)
    repetition = params.get("repetition_penalty", 1)
    for token in set(output):
        values[token] *= 1 / repetition if values[token] > 0 else repetition
        values[token] -= output.count(token) * params.get("frequency_penalty", 0)
        values[token] -= params.get("presence_penalty", 0)
    for token, bias in params.get("logit_bias", {}).items():
        values[int(token)] += bias
    return values


def noise(seed: int, position: int, column: int) -> float:
    """The hash of `sgl_kernel.uniform_noise` over big integers."""
    stream = _mix((_mix(seed % 2**64) + position * GOLDEN) % 2**64)
    return (_mix((stream + (column + 1) * GOLDEN) % 2**64) // 2**41 + 0.5) / 2**23


def _mix(value: int) -> int:
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31
