"""transformers as the oracle for greedy tokens, and the near-tie rule: where the two best
logits are closer than `MAX_GAP`, rounding may choose either."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from target import TARGET

MAX_GAP = TARGET.max_gap
MAX_SHARE = 0.02
# Of few prompts. Two logits of 16 bits lie within MAX_GAP more often than two of 32.
FEW_NEAR_TIES = 0 if TARGET.dtype == "float32" else 2


@dataclass(frozen=True)
class Reference:
    """Greedy output of one prompt; gaps[i] is the top-2 logit gap where token i was chosen."""

    prompt: list[int]
    tokens: list[int]
    gaps: list[float]


def transformers_greedy(path: Path, prompts: list[list[int]], num_tokens: int) -> list[Reference]:
    """`generate` of transformers, float32, the mask token suppressed; of all prompts at once, with
    padding on the left that none of them sees."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    mask = getattr(model.config, "mtp_mask_token_id", None)
    longest = max(map(len, prompts))
    paddings = [longest - len(prompt) for prompt in prompts]
    padded = [[0] * count + prompt for count, prompt in zip(paddings, prompts, strict=True)]
    seen = [[0] * count + [1] * (longest - count) for count in paddings]
    out = model.generate(
        torch.tensor(padded),
        attention_mask=torch.tensor(seen),
        max_new_tokens=num_tokens,
        do_sample=False,
        suppress_tokens=None if mask is None else [mask],
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
    )
    best, second = torch.stack(out.scores, dim=1).topk(2).values.unbind(-1)  # [R, num_tokens]
    found = zip(prompts, out.sequences[:, longest:].tolist(), (best - second).tolist(), strict=True)
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return [Reference(prompt, *_until(ends, tokens, gaps)) for prompt, tokens, gaps in found]


def _until(
    ends: list[int | None], tokens: list[int], gaps: list[float]
) -> tuple[list[int], list[float]]:
    """Cuts off what is behind the first token that ends an output."""
    count = next((place for place, token in enumerate(tokens, 1) if token in ends), len(tokens))
    return tokens[:count], gaps[:count]


def most_near_ties(num_requests: int) -> float:
    """Returns how many requests may differ at near-ties."""
    return max(FEW_NEAR_TIES, MAX_SHARE * num_requests)


def assert_equal_up_to_near_ties(
    actual: list[list[int]], references: list[Reference], what: str
) -> None:
    """Tokens are equal, but for first divergences at near-ties in at most 2 % of the prompts.

    The number of those is printed.
    """
    num_near_ties = 0
    for index, (tokens, reference) in enumerate(zip(actual, references, strict=True)):
        if tokens == reference.tokens:
            continue
        place = first_divergence(tokens, reference.tokens)
        assert place < min(len(tokens), len(reference.tokens)), (
            f"{what}, prompt {index}: {len(tokens)} tokens, the reference has"
            f" {len(reference.tokens)}; they agree as far as they go"
        )
        assert reference.gaps[place] <= MAX_GAP, (
            f"{what}, prompt {index}: token {place} is {tokens[place]}, the reference has"
            f" {reference.tokens[place]} with a gap of {reference.gaps[place]:.4f}"
        )
        num_near_ties += 1
    print(f"{what}: {num_near_ties} near-ties in {len(references)} prompts")
    assert num_near_ties <= most_near_ties(len(references)), f"{what}: {num_near_ties} near-ties"


def first_divergence(left: list[int], right: list[int]) -> int:
    """Index of the first difference; the shorter length if there is none before it."""
    pairs = enumerate(zip(left, right))
    return next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))


def code_snippets(modules: list[ModuleType], count: int, lengths: list[int]) -> list[str]:
    """Pieces of real source code, `lengths` characters long in turn, from different places."""
    sources = [inspect.getsource(module) for module in modules]
    snippets = []
    for index in range(count):
        source = sources[index % len(sources)]
        length = lengths[index % len(lengths)]
        start = (index * 977) % (len(source) - length)
        snippets.append(source[start : start + length])
    return snippets
