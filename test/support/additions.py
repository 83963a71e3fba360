"""Additions to this runtime, each as its page in docs/ describes one (`docs/adding_a_*.md`), and a
copy of the source that has them. `additions_at_work.py` uses all of them in that copy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

from code_shape import ROOT

SRT = "python/sglang/srt"
KERNELS = "sgl-kernel"
COPIED = ("python/sglang", KERNELS)
LEFT_IN_PLACE = ("demo_models", "build", "*.so", "*.egg-info", "tests")


class Change(NamedTuple):
    """The edit of one file by an addition.

    Attributes:
        path: from the repository's root.
        new: text that comes after each of `places`, or the whole of a new file.
        after: text that stands in the file once.
    """

    path: str
    new: str
    after: str | None = None


class Addition(NamedTuple):
    """The addition that one page describes.

    Attributes:
        example: the file of the page's own example, in whose place is a new one; None: there is no
            new file.
        changes: several may be of one file.
    """

    changes: list[Change]
    example: str | None = None

    @property
    def files(self) -> set[str]:
        """The files touched, by the names that the page has for them."""
        new = {change.path for change in self.changes if change.after is None}
        named = {self.example} if self.example is not None else set()
        assert len(new) == len(named)
        return {change.path for change in self.changes} - new | named


BACKEND = '''"""Attention request by request, with all keys of each at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.layers.attention.base_attn_backend import (
    PLAIN,
    AttentionCapabilities,
    GraphSupport,
    ScoreForm,
)
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool


class EagerBackend:
    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        num_heads: int,
        windows: Sequence[int | None],
        scores: ScoreForm = PLAIN,
    ) -> None:
        if any(window is not None for window in windows) or scores != PLAIN:
            raise ValueError("--attention-backend eager has no windows and no form of scores.")
        self._table, self._pool, self._num_heads = req_to_token_pool, kv_pool, num_heads
        self._batch: ForwardBatch | None = None

    @classmethod
    def capabilities(cls) -> AttentionCapabilities:
        return AttentionCapabilities(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32}),
            page_sizes=None,
            graph=GraphSupport.NEVER,
            tree_masks=False,
            captures_trees=False,
            reads_q_starts=False,
            captures_plans=False,
            reads_kv_starts=False,
        )

    def plan(self, batch: ForwardBatch) -> None:
        self._batch = batch

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        batch, start, out = self._batch, 0, torch.zeros_like(q)
        assert batch is not None and batch.q_starts is None
        for row, q_len in zip(batch.rows.tolist(), batch.q_lens, strict=True):
            rows = slice(start, start + q_len)
            start += q_len
            positions = batch.positions[rows]
            num_keys = int(positions.max()) + 1
            slots = self._table.req_to_token[row, :num_keys].long()
            k, v = (each[layer][slots] for each in (self._pool.k, self._pool.v))
            share = self._num_heads // k.shape[1]
            k, v = (each.repeat_interleave(share, dim=1) for each in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[rows], k) * q.shape[-1] ** -0.5
            later = torch.arange(num_keys) > positions[:, None]
            probs = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
            out[rows] = torch.einsum("hqk,khd->qhd", probs, v)
        return out.flatten(1)
'''

DRAFTER = '''"""Drafts that repeat the certain token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.lookahead.contract import StepPlan, StepRecord
from sglang.srt.lookahead.draft_rows import plan_of_drafts
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter import Drafter, DrafterParts, ExtendedStep, PlannedDrafter
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch


@dataclass(frozen=True, slots=True)
class RepeatConfig:
    num_drafts: int


class RepeatPlanner:
    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._have_drafts = set[int]()  # rows

    def step_width(self, params: SamplingParams) -> StepWidth:
        num_rows = 1 + self._num_drafts
        return StepWidth(num_rows, 0, num_rows)

    def admit(self, new_rows: list[NewRow]) -> None:
        self._have_drafts -= {new.row for new in new_rows}

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        fed = zip(batch.rows, batch.num_prompt_tokens, strict=True)
        counts = [
            self._num_drafts if row in self._have_drafts and not num_prompt else 0
            for row, num_prompt in fed
        ]
        self._have_drafts |= {
            row for row, emits in zip(batch.rows, batch.emits, strict=True) if emits
        }
        return plan_of_drafts(batch, counts)

    def observe(self, record: StepRecord, result: HostResult) -> None:
        """Learns nothing."""


class RepeatDrafter(Drafter):
    def __init__(self, parts: DrafterParts) -> None:
        self._num_drafts: int = parts.options.num_drafts
        self._state, self._ops = parts.state, parts.runners.target.step_ops

    @staticmethod
    def needs(options: RepeatConfig) -> DrafterNeeds:
        return DrafterNeeds(max_drafts=options.num_drafts, max_rows=1 + options.num_drafts)

    @staticmethod
    def models(options: RepeatConfig, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        return ()

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        return PlannedDrafter(RepeatPlanner(parts.options.num_drafts), cls(parts))

    def propose(self, step: ExtendedStep) -> None:
        emits = torch.tensor(step.batch.emits, device=step.rows.device)
        certain = self._state.pending(step.rows)[:, :1]
        drafts = certain.expand(-1, self._num_drafts).contiguous()
        counts = torch.where(emits, self._num_drafts, 0)
        self._ops.write_drafts(self._state, step.rows, drafts, counts)
'''

MODEL = '''"""A family of our own: Llama with normalized queries and keys."""

from __future__ import annotations

from sglang.srt.model_config import ModelConfig
from sglang.srt.models.transformer import CausalLM, DecoderSpec


class TwinForCausalLM(CausalLM):
    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        bias = config.flag("attention_bias")
        super().__init__(
            config, max_positions, DecoderSpec(qkv_bias=bias, output_bias=bias, qk_norm=True)
        )
'''

ADDITIONS = {
    "adding_a_backend": Addition(
        [
            Change(f"{SRT}/layers/attention/eager_backend.py", BACKEND),
            Change(
                f"{SRT}/registry.py",
                '\n        "eager": "sglang.srt.layers.attention.eager_backend:EagerBackend",',
                'ATTENTION_BACKENDS = Registry(\n    "attention backend",\n    {',
            ),
        ],
        f"{SRT}/layers/attention/torch_native_backend.py",
    ),
    "adding_a_control_call": Addition(
        [
            Change(
                f"{SRT}/control/bodies.py",
                "    NoteWeightsReq,\n",
                "from sglang.srt.messages.control import (\n",
            ),
            Change(
                f"{SRT}/control/bodies.py",
                "\n\nclass NoteWeightsReqInput(msgspec.Struct, kw_only=True):\n"
                '    """Body of `/note_weights`."""\n\n'
                "    note: Label\n\n"
                "    def message(self) -> NoteWeightsReq:\n"
                "        return NoteWeightsReq(note=self.note)\n",
                "TensorName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]\n",
            ),
            Change(
                f"{SRT}/messages/control.py",
                "\n\nclass NoteWeightsReq(CallMessage):\n"
                '    """A note on the weights."""\n\n    note: str\n',
                "    in_weight_session: bool = False\n",
            ),
            Change(
                f"{SRT}/messages/control.py",
                "    | NoteWeightsReq\n",
                "ControlCall = (\n    PauseGenerationReq\n",
            ),
            Change(
                f"{SRT}/control/weight_control.py",
                "    NoteWeightsReq,\n",
                "from sglang.srt.messages.control import (\n",
            ),
            Change(
                f"{SRT}/control/weight_control.py",
                "            NoteWeightsReq: self._note,\n",
                "        self.handlers: dict[type, Callable[[Any], None]] = {\n",
            ),
            Change(
                f"{SRT}/control/weight_control.py",
                "    def _note(self, message: NoteWeightsReq) -> None:\n"
                "        text = f'Noted: {message.note}'\n"
                "        self._answer(message.call_id, '', text)\n\n",
                "    # ---------------------------------------------------------------- groups\n\n",
            ),
            Change(
                f"{SRT}/entrypoints/control_calls.py",
                "    NoteWeightsReqInput,\n",
                "from sglang.srt.control.bodies import (\n",
            ),
            Change(
                f"{SRT}/entrypoints/control_calls.py",
                "    CallRoute(\n"
                '        "/note_weights",\n'
                "        NoteWeightsReqInput,\n"
                "        NoteWeightsReqInput.message,\n"
                '        "Notes something on the weights.",\n'
                "    ),\n",
                "CALL_ROUTES: tuple[CallRoute[Any], ...] = (\n",
            ),
            Change(
                f"{SRT}/entrypoints/engine.py",
                "    NoteWeightsReqInput,\n",
                "from sglang.srt.control.bodies import (\n",
            ),
            Change(
                f"{SRT}/entrypoints/engine.py",
                "    def note_weights(self, note: str) -> dict[str, Any]:\n"
                '        """Notes something on the weights."""\n'
                "        return self._call(make_body(NoteWeightsReqInput,"
                ' {"note": note}).message())\n\n',
                "            self._finalizer()\n            raise\n\n",
            ),
        ]
    ),
    "adding_a_drafter": Addition(
        [
            Change(f"{SRT}/speculative/repeat_drafter.py", DRAFTER),
            Change(
                f"{SRT}/registry.py",
                '\n        "repeat": "sglang.srt.speculative.repeat_drafter:RepeatDrafter",',
                'DRAFTERS = Registry(\n    "drafter",\n    {',
            ),
            Change(
                f"{SRT}/processes/runtime_config.py",
                "    if (count := model.hf.get('num_repeated')) is not None:\n"
                "        from sglang.srt.speculative.repeat_drafter import RepeatConfig\n\n"
                "        return DrafterConfig('repeat', RepeatConfig(count))\n",
                "    mask, drafter = drafter_of(args, model, environ)\n",
            ),
        ],
        f"{SRT}/speculative/mask_drafter.py",
    ),
    "adding_a_metric": Addition(
        [
            Change(
                f"{SRT}/scheduling/request_lifecycle.py",
                "    num_ended_by_length: int = 0\n",
                "    num_ended_by_grammars: int = 0\n",
            ),
            Change(
                f"{SRT}/scheduling/request_lifecycle.py",
                "\n            num_ended_by_length=self.counts.num_ended_by_length"
                '\n            + (reason.type == "length"),',
                '            num_aborted=self.counts.num_aborted + (reason.type == "abort"),',
            ),
            Change(
                f"{SRT}/control/internal_state.py",
                '        "num_ended_by_length": lifecycle.counts.num_ended_by_length,\n',
                '        "num_ended_by_grammars": lifecycle.counts.num_ended_by_grammars,\n',
            ),
            Change(
                f"{SRT}/observability/metrics.py",
                '    Figure("num_ended_by_length", "ended_by_length_total", "Ended by length."),\n',
                "    # grammars, control calls, processes\n",
            ),
        ]
    ),
    "adding_a_model": Addition(
        [
            Change(f"{SRT}/models/twin.py", MODEL),
            Change(
                f"{SRT}/registry.py",
                '        "TwinForCausalLM": "sglang.srt.models.twin:TwinForCausalLM",\n',
                'MODELS = Registry(\n    "model architecture",\n    {\n',
            ),
            Change(
                f"{SRT}/registry.py",
                '    "twin": {"architectures": ["TwinForCausalLM"], "rms_norm_eps": 1e-6},\n',
                "FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {\n",
            ),
        ],
        f"{SRT}/models/qwen3.py",
    ),
    "adding_a_sampling_parameter": Addition(
        [
            Change(
                f"{SRT}/sampling/sampling_params.py",
                "    top_a: Annotated[float, Meta(ge=0, le=MAX_MAGNITUDE)] = 0.0\n",
                "    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0\n",
            ),
            Change(
                f"{SRT}/sampling/sampling_params.py",
                " or self.top_a > 0",
                "or self.top_p < 1 or self.top_k != -1 or self.min_p > 0",
            ),
            Change(
                f"{KERNELS}/python/sgl_kernel/sampling_rows.py",
                "    top_a: torch.Tensor\n",
                "    min_p: torch.Tensor\n",
            ),
            Change(
                f"{KERNELS}/python/sgl_kernel/reference.py",
                "    keep &= probs >= rows.top_a[:, None] * probs[:, :1] ** 2\n",
                "    keep &= probs >= probs[:, :1] * min_p\n",
            ),
            Change(
                f"{KERNELS}/include/sgl_kernel/sampling_filters.cuh",
                "  const float* top_a;        // [rows] float32\n",
                "  const float* min_p;        // [rows] float32\n",
            ),
            Change(
                f"{KERNELS}/include/sgl_kernel/sampling_filters.cuh",
                "  float top_a;\n",
                "  float min_p;\n",
            ),
            Change(
                f"{KERNELS}/include/sgl_kernel/sampling_filters.cuh",
                ",\n        top_a(sampling.top_a[row])",
                "        min_p(sampling.min_p[row])",
            ),
            Change(
                f"{KERNELS}/include/sgl_kernel/sampling_filters.cuh",
                " && !(top_a > 0.0f)",
                "return top_k >= size && top_p >= 1.0f && !(min_p > 0.0f)",
            ),
            Change(
                f"{KERNELS}/include/sgl_kernel/sampling_filters.cuh",
                " || top_a > 0.0f",
                "needs_total() const { return top_p < 1.0f",
            ),
            Change(
                f"{KERNELS}/include/sgl_kernel/sampling_filters.cuh",
                " && (!(top_a > 0.0f) || weight * total >= top_a)",
                "return rank < top_k && may_keep(weight)",
            ),
            Change(
                f"{KERNELS}/benchmark/bench_sampling.py",
                '        top_a=torch.zeros(rows, device="cuda"),\n',
                '        min_p=torch.zeros(rows, device="cuda"),\n',
            ),
            Change(
                f"{SRT}/entrypoints/openai/sampling_defaults.py",
                '"top_a", ',
                'NAMES = ("temperature", ',
            ),
        ]
    ),
}


def copy_with_additions(folder: Path) -> Path:
    """Copies the source to a folder, with all additions.

    Raises:
        AssertionError: naming a text that a change looks for and that does not stand there once.
    """
    ignored = shutil.ignore_patterns(*LEFT_IN_PLACE)
    for part in COPIED:  # with what is compiled of it: its dates are kept
        shutil.copytree(ROOT / part, folder / part, ignore=ignored)
    for addition in ADDITIONS.values():
        for path, new, after in addition.changes:
            file = folder / path
            if after is None:
                assert not file.exists(), f"{path} is there."
                file.write_text(new, encoding="utf-8")
                continue
            text = file.read_text(encoding="utf-8")
            assert text.count(after) == 1, f"{path} has {text.count(after)} times {after!r}."
            file.write_text(text.replace(after, after + new), encoding="utf-8")
    return folder
