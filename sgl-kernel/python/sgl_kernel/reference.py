"""Every op in plain torch: what runs on the CPU, and what the kernels are tested against."""

from __future__ import annotations

import torch

from sgl_kernel.confirmed_drafts import ConfirmedDrafts
from sgl_kernel.kv_addresses import KVAddresses
from sgl_kernel.reference_tree_sampling import sample_ragged_trees
from sgl_kernel.sampling_rows import SamplingRows

__all__ = [
    "argmax",
    "argmax_logprob",
    "confirm_drafts",
    "kept_tokens",
    "move_kept_kv",
    "penalize_logits",
    "sample_ragged_trees",
    "sample_tokens",
    "topk_logprob",
    "uniform_noise",
]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_FIRST = 0xBF58476D1CE4E5B9
_MIX_SECOND = 0x94D049BB133111EB


def argmax(logits: torch.Tensor, banned_ids: torch.Tensor | None = None) -> torch.Tensor:
    """Arguments and result as `sgl_kernel.argmax`."""
    return _allowed(logits, banned_ids).argmax(dim=-1)


def argmax_logprob(
    logits: torch.Tensor, banned_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Arguments and results as `sgl_kernel.argmax_logprob`."""
    allowed = _allowed(logits, banned_ids)
    token_ids = allowed.argmax(dim=-1)
    best = allowed.gather(-1, token_ids[:, None])[:, 0]
    return token_ids, best, -(allowed - best[:, None]).logsumexp(dim=-1)


def topk_logprob(
    logits: torch.Tensor, topk: int, banned_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as `sgl_kernel.topk_logprob`."""
    allowed = _allowed(logits, banned_ids)
    # The sum makes +0 of -0, which is its equal. Integers in the order of the floats:
    bits = (allowed.nan_to_num(-torch.inf, torch.inf, -torch.inf) + 0.0).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64) << 32
    # No two of these are equal, so which are the greatest does not depend on how they are found.
    keys += torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)
    token_ids = logits.shape[-1] - 1 - (keys.topk(topk, dim=-1).values & 0xFFFFFFFF)
    relative = allowed - allowed.amax(dim=-1, keepdim=True)
    logprobs = relative.gather(-1, token_ids) - relative.logsumexp(dim=-1, keepdim=True)
    return token_ids, logprobs


def sample_tokens(
    logits: torch.Tensor, rows: SamplingRows, banned_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Arguments and results as `sgl_kernel.sample_tokens`."""
    allowed = _allowed(logits, banned_ids)
    is_drawn = rows.temperature > 0
    divisor = torch.where(is_drawn, rows.temperature, 1.0)
    ordered, order = allowed.sort(dim=-1, descending=True, stable=True)
    probs = torch.softmax(ordered / divisor[:, None], dim=-1)
    keep = kept_tokens(probs, rows)
    clocks = -torch.log(uniform_noise(rows.seeds, rows.positions, logits.shape[-1]))
    # argmax(p / E) with E ~ Exp(1) follows p.
    race = torch.where(keep, probs, 0.0) / clocks.gather(-1, order)
    winner = race.argmax(dim=-1)
    is_drawn &= ordered[:, 0].isfinite()
    place = torch.where(is_drawn, winner, 0)[:, None]
    # To the best logit before anything is scaled: differences of large numbers lose digits.
    relative = (ordered - ordered[:, :1]) / divisor[:, None]
    logprobs = relative.gather(-1, place)[:, 0] - relative.logsumexp(dim=-1)
    return order.gather(-1, place)[:, 0], logprobs


def penalize_logits(
    logits: torch.Tensor,
    counts: torch.Tensor,
    penalties: torch.Tensor,
    requests: torch.Tensor,
    extra_tokens: torch.Tensor | None = None,
    extra_counts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Arguments and result as `sgl_kernel.penalize_logits`."""
    values, count = logits.to(torch.float32), counts[requests]
    if extra_tokens is not None and extra_counts is not None:
        count.scatter_add_(1, extra_tokens, extra_counts)
    repetition, frequency, presence = penalties[requests].unsqueeze(-1).unbind(1)
    scaled = torch.where(values > 0, values / repetition, values * repetition)
    return torch.where(count > 0, scaled - (count * frequency + presence), values)


def confirm_drafts(
    tokens: torch.Tensor,
    targets: torch.Tensor,
    parents: torch.Tensor | None,
    starts: torch.Tensor,
    num_rows: torch.Tensor,
    max_rows: int,
    target_starts: torch.Tensor | None = None,
) -> ConfirmedDrafts:
    """Arguments and result as `sgl_kernel.confirm_drafts`."""
    if target_starts is None:
        target_starts = starts[:-1]
    num_requests, num_tokens, num_targets = len(num_rows), len(tokens), len(targets)
    if not num_tokens or not num_targets:  # no row to gather, so none is pending
        tokens = targets = torch.zeros(1, dtype=torch.int64, device=tokens.device)
        parents = None
    ends = starts[1:].clamp(max=num_tokens)
    counts = torch.minimum(num_rows, torch.minimum(ends - starts[:-1], num_targets - target_starts))
    is_inside = (starts[:-1] >= 0) & (target_starts >= 0)
    counts = torch.where(is_inside, counts, 0).clamp(min=0)

    rows = torch.arange(max_rows, device=tokens.device)
    places = (starts[:-1, None] + rows).clamp(0, len(tokens) - 1)
    target_places = (target_starts[:, None] + rows).clamp(0, len(targets) - 1)
    own_targets = targets[target_places]
    parent = (rows - 1).expand_as(places) if parents is None else parents[places].long()
    is_draft = (rows < counts[:, None]) & (parent >= 0) & (parent < rows)
    parent = torch.where(is_draft, parent, 0)
    is_match = is_draft & (tokens[places] == own_targets.gather(1, parent))
    # The lowest row that each row confirms; column max_rows stands for none, and leads to itself.
    followers = torch.full((num_requests, max_rows + 1), max_rows, device=tokens.device)
    followers.scatter_reduce_(1, parent, torch.where(is_match, rows, max_rows), "amin")
    path = torch.where(counts > 0, 0, max_rows)[:, None]
    while path.shape[1] < max_rows:  # followers leads path.shape[1] rows ahead
        path = torch.cat([path, followers.gather(1, path)], 1)
        followers = followers.gather(1, followers)
    path = path[:, :max_rows]

    is_kept = path < max_rows
    num_confirmed = (is_kept.sum(1) - 1).clamp(min=0)
    last = path.gather(1, num_confirmed[:, None]).clamp(max=max_rows - 1)
    return ConfirmedDrafts(
        num_confirmed=num_confirmed,
        path=torch.where(is_kept, path, -1).to(torch.int32),
        next_token=torch.where(counts > 0, own_targets.gather(1, last)[:, 0], 0),
    )


def move_kept_kv(
    kv: KVAddresses,
    page_table: torch.Tensor,
    table_rows: torch.Tensor,
    committed: torch.Tensor,
    path: torch.Tensor,
    num_confirmed: torch.Tensor,
) -> None:
    """Arguments and effect as `sgl_kernel.move_kept_kv`."""
    num_table_rows, width = page_table.shape
    if not path[:, 1:].numel() or not page_table.numel():
        return
    kept = torch.arange(1, path.shape[1], device=path.device)
    sources = path[:, 1:].long()
    is_moved = (kept <= num_confirmed[:, None]) & (sources > kept)
    is_moved &= ((table_rows >= 0) & (table_rows < num_table_rows) & (committed >= 0))[:, None]
    is_moved &= committed[:, None] < width - sources
    rows = table_rows.clamp(0, num_table_rows - 1)[:, None]
    first = committed.clamp(0, width - 1)[:, None]
    indices = torch.arange(is_moved.numel(), device=path.device)
    origins = page_table[rows, (first + sources).clamp(0, width - 1)].long()
    places = page_table[rows, (first + kept).clamp(max=width - 1)].long()
    for num_slots in {tensor.shape[0] for tensor in kv.tensors}:
        is_inside = (origins >= 0) & (origins < num_slots) & (places >= 0) & (places < num_slots)
        moved = (is_moved & is_inside).flatten()
        # Without waiting for the device the number of moves is unknown. The others repeat one that
        # is made; if there is none, a slot is copied to itself.
        repeated = torch.where(moved, indices, moved.int().argmax())
        origin = torch.where(moved.any(), origins.flatten()[repeated], 0)
        place = torch.where(moved.any(), places.flatten()[repeated], 0)
        for tensor in kv.tensors:
            if tensor.shape[0] == num_slots:
                tensor[place] = tensor[origin]


def kept_tokens(probs: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Returns which tokens pass all filters; probs [S, V] are in descending order.

    Returns:
        [S, V] bool; column 0 is always True.
    """
    top_p, min_p = rows.top_p[:, None], rows.min_p[:, None]
    rank = torch.arange(probs.shape[-1], device=probs.device)
    mass_before = probs.cumsum(dim=-1) - probs
    # Rounding can bring the mass up to 1, and top_p = 1 keeps even what comes then.
    keep = (mass_before < top_p) | (top_p >= 1)
    keep &= rank < rows.top_k[:, None]
    keep &= probs >= probs[:, :1] * min_p
    keep[:, 0] = True
    return keep


def uniform_noise(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Arguments and result as `sgl_kernel.uniform_noise`."""
    stream = _mix(_mix(seeds) + positions * _as_int64(_GOLDEN))
    tokens = torch.arange(1, size + 1, device=seeds.device)
    hashed = _mix(stream[:, None] + tokens * _as_int64(_GOLDEN))
    bits = _shift_right(hashed, 41)
    # Odd multiples of 2^-24: exact in float32, and neither 0 nor 1.
    return (bits.to(torch.float32) + 0.5) * 2.0**-23


def _allowed(logits: torch.Tensor, banned_ids: torch.Tensor | None) -> torch.Tensor:
    """[S, V] float32 with -inf for banned ids; ids outside the vocabulary are ignored."""
    values = logits.to(torch.float32)
    if banned_ids is None:
        return values
    size = logits.shape[-1]
    inside = banned_ids[(banned_ids >= 0) & (banned_ids < size)]
    return values.index_fill(-1, inside, -torch.inf)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on wrapping int64."""
    value = (value ^ _shift_right(value, 30)) * _as_int64(_MIX_FIRST)
    value = (value ^ _shift_right(value, 27)) * _as_int64(_MIX_SECOND)
    return value ^ _shift_right(value, 31)


def _shift_right(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift; torch's own keeps the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(unsigned: int) -> int:
    """The int64 with the same bits."""
    return unsigned - (1 << 64) if unsigned >= 1 << 63 else unsigned
