"""Hidden states that a drafter asks for equal transformers', however the tokens are fed."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from model_harness import TOLERANCE, Feeder, Model, sequence
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture
from sglang.srt.model_executor.model_runner import ForwardResult
from utils import Setup, make_random_model, make_runner

NUM_LAYERS = 4
HIDDEN_SIZE = 64
LENGTHS = {"whole": 30, "chunks": 27, "one": 9}
STEPS = {"whole": [26, 1, 1, 1, 1], "chunks": [9, 7, 11], "one": [1] * 9}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("models") / "model"
    return Model(make_random_model(request.param, path, num_hidden_layers=NUM_LAYERS))


def fed(
    model: Model, capture: HiddenCapture, page_size: int = 1
) -> tuple[list[list[tuple[str, int]]], list[ForwardResult]]:
    """Three sequences side by side: one whole, one in chunks, one token by token. Gives the name
    and position of each row of each step, and what the step computed."""
    setup = Setup(num_pages=320 // page_size, page_size=page_size)
    runner = make_runner(Path(model.config.path), setup, capture=capture)
    results: list[ForwardResult] = []
    forward = runner.forward

    def recording(batch: ForwardBatch) -> ForwardResult:
        result = forward(batch)
        results.append(result)
        return result

    rows = []
    feeder = Feeder(runner, page_size)
    with mock.patch.object(runner, "forward", recording):
        for step in range(max(map(len, STEPS.values()))):
            chunks, places = {}, []
            for seed, (name, sizes) in enumerate(STEPS.items()):
                if step < len(sizes):
                    start = feeder.fed.get(name, 0)
                    chunks[name] = sequence(LENGTHS[name], seed)[start : start + sizes[step]]
                    places += [(name, start + index) for index in range(sizes[step])]
            feeder.feed(chunks)
            rows.append(places)
    return rows, results


@torch.inference_mode()
def oracle(model: Model) -> dict[str, tuple[torch.Tensor, ...]]:
    """Transformers' `hidden_states` of each sequence: NUM_LAYERS + 1 of [length, hidden_size], of
    which the last one is after the last norm."""
    return {
        name: tuple(
            states[0]
            for states in model.reference(
                torch.tensor([sequence(length, seed)]), output_hidden_states=True
            ).hidden_states
        )
        for seed, (name, length) in enumerate(LENGTHS.items())
    }


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("layers", [(0,), (1, 2, 3), (3, 0, 2)], ids=str)
def test_taps_are_the_hidden_states_of_transformers_with_the_same_numbers(
    model: Model, layers: tuple[int, ...], page_size: int
) -> None:
    """`hidden_states[i]` is the input of layer i, so the output of layer i - 1. Of all rows: those
    whose last layer nobody reads too."""
    expected = oracle(model)
    rows, results = fed(model, HiddenCapture(layers), page_size)
    for places, result in zip(rows, results, strict=True):
        assert result.taps is not None
        assert result.taps.shape == (len(places), len(layers) * HIDDEN_SIZE)
        for (name, position), tap in zip(places, result.taps, strict=True):
            wanted = torch.cat([expected[name][layer][position] for layer in layers])
            assert_close(tap, wanted)


def test_the_last_layer_computes_all_rows_if_asked_to(model: Model) -> None:
    """Without that it computes those that somebody reads: one of each request here."""
    expected = oracle(model)
    rows, results = fed(model, HiddenCapture(all_rows=True))
    _, plain = fed(model, NO_CAPTURE)
    for places, result, read in zip(rows, results, plain, strict=True):
        assert result.taps is None
        assert len(result.hidden) == len(places)
        for (name, position), hidden in zip(places, result.hidden, strict=True):
            assert_close(hidden, expected[name][NUM_LAYERS][position])
        assert len(read.hidden) == len({name for name, _ in places})


def test_taps_change_no_bit_of_the_rest(model: Model) -> None:
    _, plain = fed(model, NO_CAPTURE)
    _, tapped = fed(model, HiddenCapture((1, 3)))
    assert all(result.taps is None for result in plain)
    for before, after in zip(plain, tapped, strict=True):
        assert torch.equal(before.hidden, after.hidden)


@pytest.mark.parametrize("layer", [-1, NUM_LAYERS])
def test_a_layer_that_the_model_lacks_is_refused(model: Model, layer: int) -> None:
    with pytest.raises(ValueError, match=rf"layers \[{layer}\] .* are 0 to 3"):
        fed(model, HiddenCapture((1, layer)))
