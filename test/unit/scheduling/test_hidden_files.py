"""Files of hidden states equal what transformers computes of the same tokens."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from mtp_oracle import load_reference
from sglang.srt.environ import Environ
from sglang.srt.messages.control import AbortReq
from sglang.srt.messages.requests import HiddenFileOptions
from sglang.srt.model_config import load_model_config, resolve_model_path
from sglang.srt.model_executor.model_runner import ForwardResult
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.platform import Platform
from sglang.srt.processes.runtime_config import resolve
from sglang.srt.processes.worker_factory import drafter_models, make_worker
from sglang.srt.scheduling import hidden_file
from sglang.srt.server_args import ServerArgs
from utils import Collected, SchedulerHarness, Setup

DEMO = resolve_model_path("demo")
HEAD = {
    "speculative_algorithm": "EAGLE3",
    "speculative_draft_model_path": str(resolve_model_path("demo-eagle3")),
    "speculative_num_steps": 3,
    "speculative_load_aware": "off",
}
TREES = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_load_aware": "off"}
VERIFIED = {"mtp_enabled": True, "mtp_k": 4, "mtp_verify": True}
UNVERIFIED = {"mtp_enabled": True, "mtp_k": 4, "mtp_verify": False}
# Flags, sampling parameters, and the layers of each row.
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...]]] = {
    "plain": ({"hidden_states_layers": "0, 3,1"}, {}, (0, 3, 1, 4)),
    "mask tokens": ({}, VERIFIED, (1, 2, 4)),
    "unverified": ({"hidden_states_layers": "2"}, UNVERIFIED, (2, 4)),
    "head": (HEAD, {}, (1, 2, 3, 4)),
    "trees, other layers": ({**HEAD, **TREES, "hidden_states_layers": "3,0"}, {}, (3, 0, 4)),
    "ngram": ({**NGRAM, "hidden_states_layers": "3"}, {}, (3, 4)),
}


class Served:
    """A scheduler over the bundled model, with the flags' drafter. Prompts come in chunks, requests
    are retracted, and cached prefixes are there to be used."""

    def __init__(self, folder: Path, flags: dict[str, Any], **changes: Any) -> None:
        args = ServerArgs(
            model_path=str(DEMO),
            device="cpu",
            num_threads=1,
            context_length=160,
            max_total_tokens=800,
            max_running_requests=8,
            hidden_states_folder=str(folder),
            **flags,
        )
        environ = replace(Environ.read(), mtp_fixed_k=True)
        config = resolve(args, Platform.probe(), load_model_config(str(DEMO)), environ)
        models = drafter_models(config.drafter, config.execution)
        self.folder = folder
        self.layers = [*config.execution.capture.returned, config.model.num_layers]
        self.runners: RunnerGroup = make_runners(config.execution, *models)
        options = {"chunked_prefill_size": 7, "retract_interval": 2, **changes}
        setup = Setup(
            num_pages=800,
            context_len=160,
            max_decode_rows=config.needs.max_slots,
            **options,
        )
        self.harness = SchedulerHarness(setup, make_worker(self.runners, config.drafter))

    def submit(self, prompt: list[int], path: Path | None = None, **params: Any) -> int:
        """Without a path the file has the request's number for a name."""
        if path is None:
            path = self.folder / f"{1 + len(self.harness.outputs)}.safetensors"
            path.touch(exist_ok=False)
        return self.harness.submit(
            prompt,
            hidden_states="all",
            hidden_file=HiddenFileOptions(str(path), self.layers),
            **{"temperature": 0.0, **params},
        )

    def outcome(self, req_id: int) -> Collected:
        return self.harness.outputs[req_id]


def read(path: Path) -> tuple[torch.Tensor, str]:
    """The rows of a file, and the layers that it names."""
    with safe_open(path, "pt") as file:
        assert list(file.keys()) == ["hidden_states"]
        return file.get_tensor("hidden_states"), file.metadata()["layers"]


def assert_close(found: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def oracle() -> Any:
    return load_reference(DEMO)


@pytest.mark.long_matrix
@pytest.mark.parametrize("way", WAYS)
def test_files_have_the_states_of_transformers(
    way: str, oracle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that want JSON share the steps, and get what they get without files."""
    monkeypatch.setattr(hidden_file, "FLUSH_BYTES", 20_000)
    flags, params, layers = WAYS[way]
    served, chooser = Served(tmp_path, flags), random.Random(3)
    assert served.layers == list(layers)
    text = [chooser.randrange(3, 400) for _ in range(30)]
    served.harness.generate([text[:20]], max_new_tokens=1, temperature=0.0)  # is cached then
    prompts = [text, text[:17], text[5:9], text[:23] + text[:7]]
    ids = {
        served.submit(prompt, max_new_tokens=5 + number, **params): prompt
        for number, prompt in enumerate([*prompts, *prompts[:2]])
    }
    params = {"max_new_tokens": 8, "temperature": 0.0, **params}
    listed = served.harness.submit(text, hidden_states="all", **params)
    served.harness.run()
    assert sum(served.outcome(req_id).num_retractions for req_id in ids) > 0
    for req_id, prompt in {**ids, listed: text}.items():
        outcome = served.outcome(req_id)
        fed = prompt + outcome.token_ids[:-1]
        with torch.inference_mode():
            states = oracle.model(torch.tensor([fed]), output_hidden_states=True).hidden_states
        right = torch.stack([states[layer][0] for layer in layers], dim=1)
        if req_id == listed:
            rows, right = torch.tensor(outcome.hidden_states), right[:, -1]
        else:
            assert outcome.hidden_states == []
            rows, named = read(tmp_path / f"{req_id}.safetensors")
            assert named == ",".join(map(str, layers))
        if params.get("mtp_verify", True):
            assert len(rows) == len(right)
        assert len(rows) >= len(prompt)  # what an unverified request is told last has no KV
        assert_close(rows, right[: len(rows)])


def test_bits_are_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served(tmp_path, {"dtype": "bfloat16"}, retract_interval=0)
    results: list[ForwardResult] = []
    forward = served.runners.target.forward

    def recording(batch: Any) -> ForwardResult:
        results.append(forward(batch))
        return results[-1]

    monkeypatch.setattr(served.runners.target, "forward", recording)
    served.submit([5, 6, 7, 8, 9, 10, 11, 12, 13], max_new_tokens=4)
    served.harness.run()
    rows, _ = read(tmp_path / "1.safetensors")
    taps = torch.cat([each.taps for each in results if each.taps is not None])
    hidden = torch.cat([each.hidden for each in results])
    assert rows.dtype == torch.bfloat16
    assert len(taps) >= len(rows) == 12
    assert torch.equal(rows[:, :-1].flatten(1), taps[:12])
    assert torch.equal(rows[:, -1], hidden[:12])


def test_files_are_written_in_order_and_steps_wait_for_a_slow_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hidden_file, "MOST_WAITING_BYTES", 10)
    writer, written, may_go_on = hidden_file.FileWriter(), list[int](), threading.Event()
    writer.write(may_go_on.wait, 4)
    for number in range(3):
        writer.write(partial(written.append, number), 2)
    assert written == []  # nobody waits for 10 bytes
    may_go_on.set()
    writer.write(partial(written.append, 3), 11)
    assert written == [0, 1, 2, 3]


def test_steps_go_on_while_a_file_is_completed(tmp_path: Path) -> None:
    """The disk has time until the request that runs beside it has ended."""
    served, may_go_on = Served(tmp_path, {}, retract_interval=0), threading.Event()
    writer = served.harness.scheduler._file_writer
    writer.write(partial(may_go_on.wait, 20), 0)
    short = served.submit([5, 6, 7], max_new_tokens=4)
    other = served.harness.submit([5, 6, 7], max_new_tokens=40)
    while served.outcome(other).num_ends == 0:
        served.harness.step()
    assert served.outcome(short).num_ends == 0
    may_go_on.set()
    served.harness.run()
    assert served.outcome(short).num_ends == 1
    assert len(read(tmp_path / f"{short}.safetensors")[0]) == 6


def test_messages_are_handled_while_nothing_but_a_file_is_completed(tmp_path: Path) -> None:
    """The disk has time until a request that came later has ended."""
    served, may_go_on = Served(tmp_path, {}, retract_interval=0), threading.Event()
    harness, scheduler = served.harness, served.harness.scheduler
    scheduler._file_writer.write(partial(may_go_on.wait, 20), 0)
    first = served.submit([5, 6, 7], max_new_tokens=4)
    while not harness.is_idle:
        harness.step()
    scheduler._wait_for_message()
    later = harness.submit([5, 6, 7], max_new_tokens=4)
    while served.outcome(later).num_ends == 0:
        harness.step()
    assert served.outcome(first).num_ends == 0
    may_go_on.set()
    harness.run()
    assert served.outcome(first).num_ends == 1


def test_an_aborted_request_writes_nothing_more(tmp_path: Path) -> None:
    served = Served(tmp_path, {}, retract_interval=0)
    req_id = served.submit([5, 6, 7], max_new_tokens=100)
    for _ in range(10):
        served.harness.step()
    served.harness.inbox.messages.append(AbortReq(req_ids=[req_id]))
    served.harness.run()
    reason = served.outcome(req_id).finish_reason
    assert reason is not None
    assert reason.type == "abort"
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]


def test_a_file_that_has_been_removed_is_not_made_again(tmp_path: Path) -> None:
    served = Served(tmp_path, {}, retract_interval=0)
    req_id = served.submit([5, 6, 7], max_new_tokens=6)
    (tmp_path / f"{req_id}.safetensors").unlink()
    served.harness.run()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("problem", ["there is one", "a link", "no folder"])
def test_a_file_that_cannot_be_written_ends_its_request_alone(problem: str, tmp_path: Path) -> None:
    served = Served(tmp_path, {}, retract_interval=0)
    path, other = tmp_path / "taken.safetensors", tmp_path / "other"
    if problem == "there is one":
        path.write_text("mine")
    elif problem == "a link":
        path.symlink_to(other)
    else:
        path = tmp_path / "none" / "taken.safetensors"
    broken = served.submit([5, 6, 7], path, max_new_tokens=6)
    right = served.submit([5, 6, 7], max_new_tokens=6)
    served.harness.run()
    reason = served.outcome(broken).finish_reason
    assert reason is not None
    assert reason.type == "abort"
    assert "--hidden-states-folder" in str(reason.message)
    assert read(tmp_path / f"{right}.safetensors")[0].shape == (8, 3, 256)
    assert served.outcome(right).token_ids == served.outcome(broken).token_ids
    assert not other.exists()
    assert problem != "there is one" or path.read_text() == "mine"
