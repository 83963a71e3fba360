"""Kernels that a rehearsal has noted are those that graphs and first steps launch."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.model_executor import runner_group
from sglang.srt.model_executor.runner_group import CompilesAhead, compile_ahead, make_runners
from utils import Setup, make_execution, make_random_model

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

SETUP = Setup(num_pages=20_000, max_running_requests=40, page_size=1)
# Sizes that no other test has: their kernels are compiled here.
SIZES = {"num_hidden_layers": 5, "hidden_size": 384, "intermediate_size": 992, "head_dim": 64}


def test_graphs_launch_what_was_rehearsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    compiled: list[tuple[str, str]] = []  # name of a kernel and of a thread

    def note(*, fn: Any, **_: Any) -> None:
        compiled.append((fn.name, threading.current_thread().name))

    ahead: list[CompilesAhead | None] = []

    def watched(*configs: Any, **more: Any) -> CompilesAhead | None:
        ahead.append(compile_ahead(*configs, **more))
        return ahead[0]

    monkeypatch.setattr(runner_group, "compile_ahead", watched)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", note)
    path = make_random_model("llama", tmp_path / "model", 0, **SIZES)
    more = {"device": "cuda", "attention_backend": "triton", "dtype": "bfloat16"}
    group = make_runners(make_execution(path, SETUP, 600, max_graph_width=1, **more))
    assert group.target.num_graphs > 0
    assert ahead[0] is not None
    assert [name for name, thread in compiled if thread.startswith("triton")]
    assert [name for name, thread in compiled if not thread.startswith("triton")] == []
