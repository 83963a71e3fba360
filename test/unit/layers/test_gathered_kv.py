"""`GatheredKV` holds what a fresh gather would, whatever happens to the batch between steps."""

from __future__ import annotations

import random

import pytest
import torch

from sglang.srt.layers.attention import gathered_kv
from sglang.srt.layers.attention.gathered_kv import GatheredKV

NUM_SLOTS, NUM_LAYERS = 200, 2


class Requests:
    """Requests with slots in a pool, of which a random part takes part in each step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = [torch.zeros(NUM_SLOTS, 2, 3) for _ in range(NUM_LAYERS)]
        self.free = list(range(1, NUM_SLOTS))
        self.random.shuffle(self.free)
        self.slots: dict[int, list[int]] = {}
        self.committed: dict[int, int] = {}

    def start(self, row: int, length: int) -> None:
        """A request with `length` tokens in the pool; their KV is written behind its back."""
        self.slots[row] = [self.free.pop() for _ in range(length + 8)]
        self.committed[row] = length
        self._write(self.slots[row][:length])

    def end(self, row: int) -> None:
        self.free += self.slots.pop(row)
        self.random.shuffle(self.free)

    def step(self, gathered: GatheredKV, rows: list[int], q_len: int, num_kept: int) -> None:
        """Stores q_len tokens of each row, plans, and compares every layer with a fresh gather."""
        starts = torch.tensor([self.committed[row] for row in rows])
        kv_lens = starts + q_len
        length = int(kv_lens.max())
        table = torch.zeros(len(rows), length, dtype=torch.int64)
        for index, row in enumerate(rows):
            used = self.slots[row][: int(kv_lens[index])]
            table[index, : len(used)] = torch.tensor(used)
            self._write(used[-q_len:])
            self.committed[row] += num_kept
        positions = starts[:, None] + torch.arange(q_len)
        gathered.plan(table, positions, kv_lens)
        for layer in range(NUM_LAYERS):
            found = gathered.gather(layer)
            for index, end in enumerate(kv_lens.tolist()):
                expected = self.pool[layer][table[index, :end]]
                assert torch.equal(found[index, :end], expected)

    def _write(self, slots: list[int]) -> None:
        for kv in self.pool:
            kv[torch.tensor(slots, dtype=torch.int64)] = torch.rand(len(slots), 2, 3)


@pytest.mark.parametrize("max_bytes", [1 << 30, 2000, 0])
def test_it_equals_a_fresh_gather(max_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_kv, "MAX_KEPT_BYTES", max_bytes)
    for seed in range(60):
        requests = Requests(seed)
        gathered = GatheredKV(requests.pool)
        choose = requests.random
        rows: list[int] = []
        for _ in range(40):
            if len(rows) < 4 and choose.random() < 0.3:
                row = min(set(range(8)) - set(rows))
                requests.start(row, choose.randint(0, 6))
                rows.append(row)
                gathered.forget()  # its prompt went through a step without it
            if rows and choose.random() < 0.2:
                requests.end(rows.pop(choose.randrange(len(rows))))
            q_len = choose.choice([1, 1, 1, 3])
            rows = [row for row in rows if requests.committed[row] + 3 < len(requests.slots[row])]
            if rows:
                requests.step(gathered, rows, q_len, choose.randint(1, q_len))


def test_a_row_that_skipped_a_step_is_gathered_again() -> None:
    requests = Requests(seed=0)
    gathered = GatheredKV(requests.pool)
    for row in (0, 1):
        requests.start(row, 5)
    requests.step(gathered, [0, 1], 1, 1)
    requests.step(gathered, [0], 1, 1)
    requests.step(gathered, [0, 1], 1, 1)


def test_an_unchanged_batch_gathers_only_its_new_tokens() -> None:
    requests = Requests(seed=0)
    gathered = GatheredKV(requests.pool)
    requests.start(0, 5)
    requests.step(gathered, [0], 1, 1)
    secret = requests.slots[0][2]
    for kv in requests.pool:
        kv[secret] = -1.0  # no longer read by the next step
    with pytest.raises(AssertionError):
        requests.step(gathered, [0], 1, 1)
