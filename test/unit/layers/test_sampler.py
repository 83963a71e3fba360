"""The sampler against big integers, numpy and statistics."""

from __future__ import annotations

import math
from array import array
from typing import Any

import numpy as np
import pytest
import torch

from sgl_kernel import SamplingRows
from sgl_kernel.reference import kept_tokens, uniform_noise
from sglang.srt.layers.logprobs import (
    HostLogprobs,
    LogprobQueries,
    LogprobTensors,
    query_prompt_logprobs,
)
from sglang.srt.layers.sampler import Sampler, in_aligned_float32

torch.set_num_threads(1)
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
NUM_DRAWS = 20_000


def sample(logits: torch.Tensor, parameters: SamplingRows | None) -> torch.Tensor:
    return Sampler(torch.device("cpu"), ()).sample(logits, parameters)


def filter_probs(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Zeroes the tokens that are not kept."""
    ordered, order = probs.sort(dim=-1, descending=True, stable=True)
    parameters = rows(len(probs))._replace(top_k=top_k, top_p=top_p, min_p=min_p)
    keep = kept_tokens(ordered, parameters)
    return torch.zeros_like(probs).scatter_(-1, order, ordered * keep)


def rows(
    count: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 1 << 30,
    min_p: float = 0.0,
    seed: int = 1,
    first_position: int = 0,
) -> SamplingRows:
    """The same parameters at `count` consecutive positions."""
    return SamplingRows(
        temperature=torch.full((count,), temperature),
        top_p=torch.full((count,), top_p),
        top_k=torch.full((count,), top_k),
        min_p=torch.full((count,), min_p),
        seeds=torch.full((count,), seed),
        positions=torch.arange(first_position, first_position + count),
    )


def test_probs_are_those_of_the_kept_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of rows sorted at once; rows with other filters stand beside them."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11, generator=generator)
    logits[3, 4:6] = logits[3].max() + 1  # two best ones
    given = rows(7)._replace(
        temperature=torch.tensor([0.5, 1.0, 1.5, 1.0, 0.7, 2.0, 0.0]),
        top_k=torch.tensor([11, 3, 11, 1, 5, 11, 11]),
        top_p=torch.tensor([1.0, 1.0, 0.6, 1.0, 0.9, 1.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.0, 0.05, 0.3, 0.0]),
    )
    divisor = torch.where(given.temperature > 0, given.temperature, 1.0)
    allowed = logits.index_fill(1, torch.tensor([0, 8]), -torch.inf)
    unfiltered = (allowed / divisor[:, None]).softmax(-1)
    right = filter_probs(unfiltered, given.top_k, given.top_p, given.min_p)
    right /= right.sum(-1, keepdim=True)
    sampler = Sampler(torch.device("cpu"), (0, 8))
    for most in (1, 30, 1 << 22):
        monkeypatch.setattr("sglang.srt.layers.sampler.MAX_SORTED_LOGITS", most)
        probs = sampler.probs(logits, given)
        assert torch.allclose(probs, right, atol=1e-6)
        assert torch.equal(probs > 0, right > 0)
    assert probs[3].nonzero()[:, 0].tolist() == [4]
    seeded = [given._replace(seeds=given.seeds + number) for number in range(300)]
    drawn = {int(sampler.sample(logits, parameters)[4]) for parameters in seeded}
    assert drawn == set(probs[4].nonzero()[:, 0].tolist())


def test_scores_of_tokens_that_were_not_drawn() -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)) * 3
    given = rows(5, top_k=3)._replace(temperature=torch.tensor([0.5, 1.0, 2.0, 0.0, 1.0]))
    sampler = Sampler(torch.device("cpu"), (2,))
    tokens = torch.tensor([0, 3, 5, 7, 10])
    allowed = logits.index_fill(1, torch.tensor([2]), -torch.inf)
    divisor = torch.where(given.temperature > 0, given.temperature, 1.0)
    for parameters, scale in ((given, divisor), (None, torch.ones(5))):
        drawn = sampler.sample_scored(logits, parameters)
        scored = sampler.score(logits, parameters, drawn, tokens)
        right = (allowed / scale[:, None]).log_softmax(-1)
        assert torch.equal(scored.tokens, tokens)
        assert torch.allclose(scored.logprobs, right.gather(1, tokens[:, None])[:, 0], atol=1e-5)


# --- noise ---------------------------------------------------------------------------------------


def mix(value: int) -> int:
    """SplitMix64's finalizer over unsigned integers."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def reference_noise(seed: int, position: int, token: int) -> float:
    golden = 0x9E3779B97F4A7C15
    stream = mix((mix(seed % 2**64) + position * golden) % 2**64)
    bits = mix((stream + (token + 1) * golden) % 2**64)
    return (bits // 2**41 + 0.5) / 2**23


@pytest.mark.parametrize("seed", [0, 1, -1, 42, 123456789, -(10**15), INT64_MIN, INT64_MAX])
def test_noise_equals_the_same_hash_over_big_integers(seed: int) -> None:
    positions = [0, 1, 2, 1000, 2**31, 2**40]
    noise = uniform_noise(torch.full((len(positions),), seed), torch.tensor(positions), 50)
    expected = [[reference_noise(seed, position, i) for i in range(50)] for position in positions]
    assert noise.tolist() == expected


def test_noise_is_strictly_between_0_and_1() -> None:
    noise = uniform_noise(torch.arange(-500, 500), torch.arange(1000), 1000)
    assert 0 < float(noise.min()) < 1e-5
    assert 1 - 1e-5 < float(noise.max()) < 1
    assert bool(torch.isfinite(torch.log(noise)).all())
    assert float(torch.log(noise).max()) < 0


def test_noise_of_a_row_does_not_depend_on_the_batch() -> None:
    seeds, positions = torch.tensor([5, -9, 5, 7]), torch.tensor([3, 3, 4, 10**6])
    together = uniform_noise(seeds, positions, 64)
    for index in range(4):
        alone = uniform_noise(seeds[index : index + 1], positions[index : index + 1], 64)
        assert torch.equal(alone[0], together[index])


def test_noise_of_a_token_does_not_depend_on_the_vocabulary_size() -> None:
    seeds, positions = torch.tensor([5]), torch.tensor([3])
    assert torch.equal(
        uniform_noise(seeds, positions, 100)[:, :10], uniform_noise(seeds, positions, 10)
    )


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_neighbouring_rows_have_different_noise(axis: str) -> None:
    moving, still = torch.arange(200), torch.zeros(200, dtype=torch.int64)
    seeds, positions = (moving, still) if axis == "seed" else (still, moving)
    noise = uniform_noise(seeds, positions, 200)
    assert len({tuple(row) for row in noise.tolist()}) == 200
    # Neither shifted along the tokens: a shared counter would repeat a row one token later.
    assert float((noise[1:, :-1] == noise[:-1, 1:]).float().mean()) < 1e-3
    assert float((noise[1:] == noise[:-1]).float().mean()) < 1e-3


def test_seed_and_position_are_not_interchangeable() -> None:
    one = uniform_noise(torch.tensor([3]), torch.tensor([4]), 50)
    other = uniform_noise(torch.tensor([4]), torch.tensor([3]), 50)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("seed", [0, 1, -1, INT64_MIN, INT64_MAX])
def test_noise_is_uniform(seed: int) -> None:
    """Mean, variance and a chi-square over 64 cells; bounds are beyond 5 sigma."""
    noise = uniform_noise(torch.full((500,), seed), torch.arange(500), 400).double().flatten()
    count = noise.numel()
    assert abs(float(noise.mean()) - 1 / 2) < 5 * (1 / 12 / count) ** 0.5
    assert abs(float(noise.var()) - 1 / 12) < 5 * (1 / 180 / count) ** 0.5
    cells = torch.bincount((noise * 64).long(), minlength=64).numpy()
    assert chi_square(cells, np.full(64, 1 / 64)) < chi_square_bound(63)


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
@pytest.mark.parametrize("lag", [1, 2, 16])
def test_noise_is_uncorrelated_along_every_axis(axis: str, lag: int) -> None:
    if axis == "seed":
        seeds, positions = torch.arange(400), torch.full((400,), 17)
    else:
        seeds, positions = torch.full((400,), 17), torch.arange(400)
    noise = uniform_noise(seeds, positions, 400).double() - 0.5
    if axis == "token":
        noise = noise.T
    products = noise[lag:] * noise[:-lag] * 12
    assert abs(float(products.mean())) < 5 / products.numel() ** 0.5


# --- filters -------------------------------------------------------------------------------------


def reference_filter(
    probs: np.ndarray, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """Kept probabilities of one row, token by token; and the mass before each token."""
    order = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    kept, masses, mass = np.zeros_like(probs), np.zeros(len(probs)), 0.0
    for rank, token in enumerate(order):
        masses[token] = mass
        is_best = rank == 0
        inside = rank < top_k and (mass < top_p or top_p >= 1)
        if is_best or (inside and probs[token] >= min_p * probs[order[0]]):
            kept[token] = probs[token]
        mass += float(probs[token])
    return kept, masses


def filtered(probs: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    out = filter_probs(
        torch.from_numpy(probs)[None],
        torch.tensor([top_k]),
        torch.tensor([top_p]),
        torch.tensor([min_p]),
    )
    return out[0].numpy()


@pytest.mark.long_matrix
@pytest.mark.parametrize("seed", range(40))
def test_filters_agree_with_a_walk_over_the_tokens(seed: int) -> None:
    generator = np.random.default_rng(seed)
    size = int(generator.integers(1, 200))
    logits = generator.normal(size=size) * generator.choice([0.3, 2.0, 8.0])
    probs = (np.exp(logits) / np.exp(logits).sum()).astype(np.float32)
    top_k = int(generator.choice([1, 2, 7, size, 1 << 30]))
    top_p = np.float32(generator.choice([1e-6, 0.3, 0.9, 0.999]))
    min_p = float(np.float32(generator.choice([0.0, 0.05, 0.5, 1.0])))
    expected, masses = reference_filter(probs, top_k, float(top_p), min_p)
    # Rounding may decide where a cumulated sum meets top_p, nowhere else.
    clear = np.abs(masses - top_p) > 1e-6
    assert clear.mean() > 0.9 or size < 10
    assert np.array_equal(filtered(probs, top_k, float(top_p), min_p)[clear], expected[clear])


def test_all_filters_open_keep_every_token_however_rare() -> None:
    """A cumulated sum that rounds to 1 must not cut off the tail."""
    torch.manual_seed(0)
    probs = torch.softmax(torch.randn(4, 50_000) * 2, dim=-1)
    probs[0] = 1 / 50_000
    neutral = rows(4)
    assert torch.equal(filter_probs(probs, neutral.top_k, neutral.top_p, neutral.min_p), probs)


TIED = np.array([0.1, 0.2, 0.2, 0.2, 0.3], dtype=np.float32)


@pytest.mark.parametrize(
    ("parameters", "kept"),
    [
        ((3, 1.0, 0.0), [1, 2, 4]),  # ties at the edge go to the lower token id
        ((1, 1.0, 0.0), [4]),
        ((5, 0.3, 0.0), [4]),  # the best token alone reaches the mass
        ((5, 0.31, 0.0), [1, 4]),
        ((5, 0.55, 0.0), [1, 2, 4]),
        ((5, 1e-9, 0.0), [4]),
        ((5, 1.0, 1.0), [4]),
        ((5, 1.0, 0.6), [1, 2, 3, 4]),  # ties are kept or dropped together
        ((2, 0.9, 0.1), [1, 4]),
        ((4, 0.55, 0.9), [4]),
    ],
    ids=str,
)
def test_filters_at_ties_and_edges(parameters: tuple[int, float, float], kept: list[int]) -> None:
    assert np.flatnonzero(filtered(TIED, *parameters)).tolist() == kept


def test_min_p_1_keeps_all_tokens_that_tie_for_the_best() -> None:
    probs = np.array([0.25, 0.25, 0.1, 0.25, 0.15], dtype=np.float32)
    assert np.flatnonzero(filtered(probs, 5, 1.0, 1.0)).tolist() == [0, 1, 3]


def test_each_row_is_filtered_by_its_own_parameters() -> None:
    torch.manual_seed(1)
    probs = torch.softmax(torch.randn(3, 30), dim=-1)
    top_k, top_p = torch.tensor([2, 30, 30]), torch.tensor([1.0, 0.5, 1.0])
    min_p = torch.tensor([0.0, 0.0, 0.4])
    together = filter_probs(probs, top_k, top_p, min_p)
    for i in range(3):
        one = slice(i, i + 1)
        assert torch.equal(
            filter_probs(probs[one], top_k[one], top_p[one], min_p[one])[0], together[i]
        )


# --- draws ---------------------------------------------------------------------------------------


def chi_square(counts: np.ndarray, probs: np.ndarray) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def chi_square_bound(degrees: int) -> float:
    """Wilson and Hilferty's approximation of the quantile at 4.5 sigma (about 3 in a million)."""
    term = 2 / (9 * degrees)
    return degrees * (1 - term + 4.5 * term**0.5) ** 3


def draws(logits: torch.Tensor, parameters: SamplingRows) -> np.ndarray:
    """Counts how often each token is drawn."""
    count = len(parameters.positions)
    tokens = sample(logits.expand(count, -1).contiguous(), parameters)
    return torch.bincount(tokens, minlength=logits.numel()).numpy()


LOGITS = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.5, -0.5, 1.0, -2.0, 0.2, 1.9])


@pytest.mark.parametrize("seed", [0, 7, INT64_MIN])
@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_p": 0.8},
        {"top_k": 3},
        {"min_p": 0.3},
        {"temperature": 1.7, "top_p": 0.9, "top_k": 6, "min_p": 0.1},
    ],
    ids=str,
)
def test_draws_follow_the_filtered_distribution(parameters: dict[str, Any], seed: int) -> None:
    given = {"temperature": 1.0, "top_k": 10, "top_p": 1.0, "min_p": 0.0, **parameters}
    scaled = LOGITS.double().numpy() / given["temperature"]
    probs = np.exp(scaled) / np.exp(scaled).sum()
    kept, _ = reference_filter(probs, int(given["top_k"]), given["top_p"], given["min_p"])
    expected = kept / kept.sum()
    counts = draws(LOGITS, rows(NUM_DRAWS, seed=seed, **parameters))
    inside = expected > 0
    assert counts[~inside].sum() == 0
    assert chi_square(counts[inside], expected[inside]) < chi_square_bound(int(inside.sum()) - 1)


def test_draws_over_seeds_at_one_position_follow_the_distribution() -> None:
    seeds = torch.arange(NUM_DRAWS) - NUM_DRAWS // 2
    counts = draws(
        LOGITS,
        rows(NUM_DRAWS)._replace(seeds=seeds, positions=torch.full((NUM_DRAWS,), 12)),
    )
    assert chi_square(counts, torch.softmax(LOGITS, -1).double().numpy()) < chi_square_bound(9)


def test_successive_draws_are_independent() -> None:
    """Pairs of neighbouring positions, as a chi-square over all combinations."""
    logits = torch.tensor([1.0, 0.0, 0.5, 0.2])
    tokens = sample(logits.expand(40_000, -1).contiguous(), rows(40_000))
    pairs = torch.bincount(tokens[::2] * 4 + tokens[1::2], minlength=16).numpy()
    probs = torch.softmax(logits, -1).double().numpy()
    assert chi_square(pairs, np.outer(probs, probs).flatten()) < chi_square_bound(15)


def test_greedy_rows_take_the_best_token() -> None:
    torch.manual_seed(0)
    logits = torch.randn(30, 500)
    mixed = rows(30)
    mixed.temperature[::2] = 0.0
    best = logits.argmax(-1)
    assert torch.equal(sample(logits, mixed)[::2], best[::2])
    assert not torch.equal(sample(logits, mixed)[1::2], best[1::2])


def test_a_batch_known_to_be_greedy_takes_the_best_tokens() -> None:
    torch.manual_seed(0)
    logits = torch.randn(30, 500)
    parameters = rows(30, temperature=0.0)
    assert torch.equal(sample(logits, None), logits.argmax(-1))
    assert torch.equal(sample(logits, parameters), logits.argmax(-1))


def test_a_banned_token_is_never_drawn_and_has_no_share() -> None:
    sampler = Sampler(torch.device("cpu"), (0,))
    logits = LOGITS.expand(2000, -1).contiguous()
    for temperature in (0.0, 0.7, 100.0):
        assert not (sampler.sample(logits, rows(2000, temperature=temperature)) == 0).any()
    assert sampler.sample(logits, None).tolist() == [9] * 2000
    allowed = torch.softmax(LOGITS[1:], dim=-1)
    best = sampler.sample_scored(logits[:1], None)
    assert best.tokens.tolist() == [9]
    torch.testing.assert_close(best.logprobs.exp(), allowed.max()[None])
    everything = LogprobQueries(top_num=0, token_ids=[list(range(len(LOGITS)))])
    logprobs = sampler.query(logits[:1], None, best, everything, None).chosen[0]
    assert logprobs[0] == -torch.inf
    torch.testing.assert_close(logprobs[1:].exp(), allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("picks", [None, [4, 1, 1]])
def test_logprobs_are_those_of_the_distribution_before_the_filters(
    picks: list[int] | None, dtype: torch.dtype
) -> None:
    """Checks log-probabilities of the token drawn, of the best and of chosen ones, with each row's
    own temperature."""
    sampler = Sampler(torch.device("cpu"), (3,))
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(5, 40, generator=generator) * 4).to(dtype)
    parameters = rows(5, top_k=2)
    temperatures = torch.tensor([0.0, 0.3, 1.0, 2.5, 0.7])
    parameters.temperature.copy_(temperatures)
    drawn = sampler.sample_scored(logits, parameters)
    assert torch.equal(drawn.tokens, sampler.sample(logits, parameters))

    places = list(range(5)) if picks is None else picks
    chosen = [[(7 * place + i) % 40 for i in range(place + 1)] for place in places]
    queries = LogprobQueries(top_num=6, token_ids=chosen)
    wanted = None if picks is None else torch.tensor(picks)
    answers = sampler.query(logits, parameters, drawn, queries, wanted)
    values = logits.double()
    values[:, 3] = -torch.inf
    divisor = torch.where(temperatures == 0, 1.0, temperatures).double()
    expected = torch.log_softmax(values / divisor[:, None], dim=-1).float()
    for i, place in enumerate(places):
        of_row = expected[place]
        near = {"rtol": 1e-5, "atol": 1e-5}
        torch.testing.assert_close(answers.target[i], of_row[drawn.tokens[place]], **near)
        torch.testing.assert_close(answers.top_values[i], of_row.topk(6).values, **near)
        torch.testing.assert_close(of_row[answers.top_ids[i]], answers.top_values[i], **near)
        told = answers.chosen[i][: len(chosen[i])]
        torch.testing.assert_close(told, of_row[chosen[i]], **near)


@pytest.mark.parametrize("picks", [None, [4, 1, 1, 3]])
def test_tokens_that_filters_keep_and_the_share_of_one_among_them(picks: list[int] | None) -> None:
    """Each row has filters of its own; the first is greedy, the second does not ask."""
    sampler = Sampler(torch.device("cpu"), (3,))
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3
    parameters = rows(5)
    parameters.temperature.copy_(torch.tensor([0.0, 0.3, 1.0, 2.5, 0.7]))
    parameters.top_p.copy_(torch.tensor([0.9, 0.9, 0.8, 1.0, 0.6]))
    parameters.top_k.copy_(torch.tensor([40, 40, 40, 7, 2]))
    parameters.min_p.copy_(torch.tensor([0.0, 0.0, 0.0, 0.2, 0.0]))
    drawn = sampler.sample_scored(logits, parameters)
    unlikely = torch.tensor([drawn.tokens[0], 5, 11, 23, 31])  # as thresholds may accept them
    places = list(range(5)) if picks is None else picks
    wants = [place != 1 for place in places]
    queries = LogprobQueries(0, [[]] * len(places), wants)
    wanted = None if picks is None else torch.tensor(picks)
    for given in (drawn, sampler.score(logits, parameters, drawn, unlikely)):
        answers = sampler.query(logits, parameters, given, queries, wanted)
        host = HostLogprobs.of(answers.tensors)
        assert host is not None
        for i, place in enumerate(places):
            token = int(given.tokens[place])
            if not wants[i]:
                assert host.kept[i] == b""
                assert host.target[i] == pytest.approx(float(given.logprobs[place]))
                continue
            values = [float(v) for v in logits[place]]
            right = kept_by_hand(values, *(float(p[place]) for p in parameters[:4])) | {token}
            assert {*array("i", host.kept[i] or b"")} == right
            divisor = float(parameters.temperature[place]) or 1.0
            total = math.fsum(math.exp(values[k] / divisor) for k in right)
            share = math.exp(values[token] / divisor) / total
            assert host.target[i] == pytest.approx(math.log(share), abs=1e-4)


def kept_by_hand(
    values: list[float], temperature: float, top_k: float, top_p: float, min_p: float
) -> set[int]:
    """The tokens, token 3 left out, that filters keep of the 40."""
    order = sorted((i for i in range(40) if i != 3), key=lambda i: -values[i])
    if temperature == 0:
        return set(order[:1])
    weights = [math.exp(values[i] / temperature) for i in order]
    shares = [weight / math.fsum(weights) for weight in weights]
    return {
        token
        for rank, token in enumerate(order)
        if rank < top_k
        and math.fsum(shares[:rank]) < top_p + (top_p >= 1)
        and shares[rank] >= min_p * shares[0]
    }


def test_more_kept_tokens_than_are_told_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.layers.sampler.MAX_KEPT", 4)
    sampler, parameters = Sampler(torch.device("cpu"), ()), rows(2)
    parameters.top_k.copy_(torch.tensor([4, 5]))
    drawn = sampler.sample_scored(LOGITS.expand(2, -1).contiguous(), parameters)
    queries = LogprobQueries(0, [[], []], [True, True])
    logits = LOGITS.expand(2, -1).contiguous()
    host = HostLogprobs.of(sampler.query(logits, parameters, drawn, queries, None).tensors)
    assert host is not None
    assert [None if ids is None else len(ids) // 4 for ids in host.kept] == [4, None]


def test_answers_without_more_lie_where_the_others_do() -> None:
    """Parts with and without chosen ids are put together on the device."""
    answers = LogprobTensors.of_targets(torch.empty(3, device="meta"))
    assert {tensor.device.type for tensor in answers.tensors} == {"meta"}


@pytest.mark.parametrize("temperature", [None, 1e-5, 1e-3, 1.0])
def test_logprobs_of_large_and_close_logits_lose_no_digits(temperature: float | None) -> None:
    """A temperature near 0 and large biases make scaled logits of millions."""
    sampler = Sampler(torch.device("cpu"), ())
    logits = torch.tensor([[1e5, 1e5, 0.0, -1e5], [30.0, 30.0 - 1e-3, 3.0, 2.0]])
    parameters = None if temperature is None else rows(2, temperature=temperature)
    drawn = sampler.sample_scored(logits, parameters)
    scaled = logits.double() / (1.0 if temperature is None else temperature)
    expected = torch.log_softmax(scaled, dim=-1).gather(1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.logprobs.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e6])
def test_extreme_temperatures_give_finite_choices(temperature: float) -> None:
    logits = torch.tensor([30.0, -50.0, 29.0, 0.0])
    counts = draws(logits, rows(4000, temperature=temperature))
    if temperature < 1:
        assert counts.tolist() == [4000, 0, 0, 0]
    else:
        assert chi_square(counts, np.full(4, 0.25)) < chi_square_bound(3)


def test_a_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    torch.manual_seed(3)
    logits = torch.randn(9, 300) * 3
    parameters = SamplingRows(
        temperature=torch.tensor([0.0, 0.5, 1.0, 2.0, 1.0, 1.0, 1.0, 0.7, 0.0]),
        top_p=torch.tensor([1.0, 0.9, 1.0, 0.5, 1.0, 0.99, 1.0, 0.8, 1.0]),
        top_k=torch.tensor([300, 300, 5, 50, 300, 300, 1, 20, 300]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.1, 0.3, 0.0, 0.0, 0.05, 0.0]),
        seeds=torch.tensor([1, 2, 3, -4, 5, INT64_MIN, 7, 8, INT64_MAX]),
        positions=torch.tensor([0, 5, 5, 99, 1000, 2, 0, 4095, 7]),
    )
    together = sample(logits, parameters)
    for order in ([8, 3, 1], [4], [7, 6, 5, 4, 3, 2, 1, 0], [2, 2]):
        index = torch.tensor(order)
        part = SamplingRows(*(parameter[index] for parameter in parameters))
        assert torch.equal(sample(logits[index], part), together[index])


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.empty(0, 10), rows(0)).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("picks", [None, [5, 1, 1]])
def test_logprobs_have_the_bits_of_prompts_where_that_is_asked_for(
    picks: list[int] | None, dtype: torch.dtype
) -> None:
    """They do in greedy rows and those of temperature 1, alone or beside any, for all that is
    queried, with a token that is never emitted."""
    sampler = Sampler(torch.device("cpu"), (3,))
    logits = torch.randn(6, 400, generator=torch.Generator().manual_seed(0)) * 3
    logits[:, 3] = 9.0  # its share would show
    logits = logits.to(dtype)
    parameters = rows(6)
    temperatures = torch.tensor([0.0, 1.0, 0.4, 1.0, 0.0, 1.0])
    parameters.temperature.copy_(temperatures)
    drawn = sampler.sample_scored(logits, parameters, as_in_prompts=True)
    other = sampler.sample_scored(logits, parameters)
    assert torch.equal(drawn.tokens, other.tokens)
    torch.testing.assert_close(drawn.logprobs, other.logprobs)
    assert torch.equal(drawn.logprobs[2], other.logprobs[2])
    places = list(range(6)) if picks is None else picks
    queries = LogprobQueries(4, [[7, place] for place in places])
    wanted = None if picks is None else torch.tensor(picks)
    found = sampler.query(logits, parameters, drawn, queries, wanted)
    for place, row in enumerate(places):
        if temperatures[row] not in (0, 1):
            continue
        one = LogprobQueries(4, [[7, row]])
        right = query_prompt_logprobs(
            logits, torch.tensor([row]), lambda x: x, [int(drawn.tokens[row])], one, sampler.banned
        )
        assert torch.equal(found.target[place], right.target[0])
        assert torch.equal(found.top_values[place], right.top_values[0])
        assert torch.equal(found.top_ids[place], right.top_ids[0])
        assert torch.equal(found.chosen[place], right.chosen[0])
        greedy = temperatures[row] == 0
        alone = sampler.sample_scored(logits[row : row + 1], None)
        assert not greedy or torch.equal(alone.logprobs[0], drawn.logprobs[row])


@pytest.mark.parametrize("size", [1, 3, 8, 1001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_rows_begin_at_multiples_of_16_bytes(size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(size)).to(dtype)
    found = in_aligned_float32(logits)
    assert torch.equal(found, logits.float())
    assert found.dtype == torch.float32
    assert all(row.data_ptr() % 16 == 0 for row in found)
    greedy = Sampler(torch.device("cpu"), ()).sample_scored(found, None)
    assert torch.equal(greedy.tokens, logits.argmax(-1))


def test_a_prompt_has_no_share_for_a_token_that_is_never_emitted() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0, 0.5]])
    banned, queries = torch.tensor([1]), LogprobQueries(3, [[]])
    found = query_prompt_logprobs(logits, torch.tensor([0]), lambda x: x, [2], queries, banned)
    its = query_prompt_logprobs(
        logits, torch.tensor([0]), lambda x: x, [1], LogprobQueries(0, [[1, 1]]), banned
    )
    assert its.target.tolist() == [-math.inf]
    assert its.chosen.tolist() == [[-math.inf] * 2]
    allowed = torch.log_softmax(logits[0, [0, 2, 3]], -1)
    torch.testing.assert_close(found.target[0], allowed[1])
    assert found.top_ids[0].tolist() == [2, 0, 3]
    torch.testing.assert_close(found.top_values[0], allowed[[1, 0, 2]])
