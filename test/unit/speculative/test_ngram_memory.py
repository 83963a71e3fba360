"""Drafts of n-grams take the same memory however much novel text is served."""

from __future__ import annotations

import gc
import random
import sys
from pathlib import Path
from types import FunctionType, ModuleType
from typing import NamedTuple

import numpy as np
import pytest
import torch

from eagle_models import CONTEXT, VOCAB, write_models
from eagle_serving import setup_for
from ngram_serving import Served, ngram_config
from sglang.srt.control import internal_state
from sglang.srt.lookahead import load_aware_drafts, round_prices
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.ngram_memory import NgramMemory
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import EndedText, NewRow
from tile_spec_rounds import FREE_ROWS

torch.set_num_threads(1)
CPU = torch.device("cpu")
HOUR_OF_TOKENS = 3600 * 1000
BYTES_OF_SLOT = 12
LEAST_BYTES_OF_ENTRY = 30  # of a list or dictionary, whatever it is


class Held(NamedTuple):
    """Bytes of Python's objects, and of the storages of tensors."""

    objects: int
    tensors: int


def held_by(root: object, apart: object = None) -> Held:
    """Counts the bytes of what can be reached from an object, without code and what only `apart`
    leads to."""
    seen, storages = {id(apart)}, dict[int, int]()
    num_bytes, todo = 0, [root]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | ModuleType):
            continue
        seen.add(id(each))
        num_bytes += sys.getsizeof(each, 0)
        if isinstance(each, torch.Tensor):
            storage = each.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, FunctionType):
            todo += each.__closure__ or ()
        else:
            todo += gc.get_referents(each)
    return Held(num_bytes, sum(storages.values()))


def test_an_hour_of_novel_text_of_ever_new_namespaces_leaves_the_store_as_large() -> None:
    width, capacity = 4096, 2048
    table = ReqToTokenPool(2, width, CPU)
    state = RequestRows(table, max_pending=4, vocab_size=width)
    memory = NgramMemory(state, capacity)
    assert memory.tokens.nbytes + memory.tags.nbytes == BYTES_OF_SLOT * capacity
    sizes = list[Held]()
    novel, num_texts = np.random.default_rng(0), HOUR_OF_TOKENS // width
    for number in range(num_texts):
        text = novel.integers(width, size=width, dtype=np.int32)
        state.tokens[0] = torch.from_numpy(text)
        namespace = str(number), ""
        memory.admit([NewRow(0, 0, text, SamplingParams(), 0, namespace=namespace)])
        memory.append([EndedText(0, 0, width, namespace)])
        if number in (0, num_texts - 1):
            sizes.append(held_by(memory))
    assert sizes[1] == sizes[0]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("ngram"))["target"]


@pytest.mark.long_matrix
@pytest.mark.parametrize("shape", [(5, 1), (7, 3)], ids=["chains", "trees"])
def test_a_scheduler_that_has_served_more_novel_text_is_as_large(
    target: Path, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the scheduler and its worker hold, after some requests and after further ones."""
    monkeypatch.setattr(round_prices, "MAX_COSTS", 1)
    monkeypatch.setattr(load_aware_drafts, "PRICE_EVERY", 1)
    monkeypatch.setattr(internal_state, "RECENT_STEPS", 4)
    drafter = ngram_config(*shape, capacity=64, tier_policy="matched")
    harness = Served(target, drafter, setup_for(shape[0], use_radix_cache=False), FREE_ROWS)
    chooser, sizes, num_requests = random.Random(0), list[Held](), 40
    for _ in range(2):
        for number in range(num_requests):
            prompt = [chooser.randrange(VOCAB) for _ in range(chooser.randrange(1, CONTEXT // 4))]
            key = str(chooser.random()), ""
            harness.submit(prompt, cache_key=key, temperature=1.0, max_new_tokens=8)
            if number % 4 == 3:
                harness.run()
        harness.flush()  # the last step is the same one
        sizes.append(held_by((harness.scheduler, harness.drafter), apart=harness))
    before, after = sizes
    assert after.objects < before.objects + LEAST_BYTES_OF_ENTRY * num_requests
    assert after.tensors < 1.05 * before.tensors
