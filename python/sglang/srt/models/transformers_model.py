"""Any decoder by transformers' own modelling code, over this package's KV pool and operations."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sglang.srt.layers.attention.base_attn_backend import ScoreForm
from sglang.srt.layers.forward_batch import ForwardBatch, ModelOutput
from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import Embedding
from sglang.srt.model_config import ModelConfig
from sglang.srt.models.divided_attention import divide_attention
from sglang.srt.models.exchanged_modules import WRONG_CODE, CurrentStep, StepLinear, exchange
from sglang.srt.models.fused_layers import StepLayer, StepRotations, exchange_layers
from sglang.srt.models.model import CheckpointNames, Model, SharedModules
from sglang.srt.models.transformer import apart_from
from sglang.srt.shard import WHOLE, Shard
from sglang.srt.transformers_config import (
    Entries,
    in_one_line,
    model_class,
    read_config,
    text_entries,
)

ATTENTION = "paged_pool"  # its name in transformers' attention interface
# What models pass to attention beside the form of scores and the window, and what may be there
# without a meaning here.
USED_OPTIONS = {"scaling", "softcap", "sliding_window"}
IDLE_OPTIONS = {"dropout", "position_ids", "use_cache", "is_causal", "cache", "past_key_values"}


class LayerCall(NamedTuple):
    """A call of attention by a layer, as the code makes it.

    Attributes:
        heads: query heads, KV heads, and the size of a head of queries, of keys and of values.
        options: by keyword.
    """

    layer: int
    heads: tuple[int, int, int, int, int]
    options: dict[str, Any]


class TransformersStep(CurrentStep):
    """The step that transformers' code computes.

    Attributes:
        calls: of attention, while there is no runtime.
        rotations: of queries and keys, left to the operation that stores K and V.
        taps: takes the inputs of layers; None if nobody wants them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[LayerCall] = []
        self.rotations = StepRotations(self)
        self.taps: dict[int, torch.Tensor] | None = None

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
    ) -> torch.Tensor:
        """q [1, num_heads, T, head_dim], k and v [1, num_kv_heads, T, head_dim] -> [1, T,
        num_heads, head_dim]."""
        if self.runtime is None:
            heads = (q.shape[1], k.shape[1], q.shape[3], k.shape[3], v.shape[3])
            self.calls.append(LayerCall(layer, heads, options))
            self.rotations.note(layer, q, k, v)
            return q.transpose(1, 2)
        rotation = self.rotations.take(q)
        qkv, norms = _side_by_side(q, k, v), self.rotations.norms_of(layer)
        attended = self.runtime.attend(layer, qkv, rotation, norms, by_token=True)
        return attended.view(1, q.shape[2], q.shape[1], -1)

    def begin(self, runtime: LayerRuntime, wanted: torch.Tensor | None, has_taps: bool) -> None:
        self.runtime, self.wanted, self.taps = runtime, wanted, {} if has_taps else None

    def end(self) -> dict[int, torch.Tensor] | None:
        """Forgets what belongs to the step. Returns the taps."""
        taps, self.taps, self.output, self.wanted = self.taps, None, None, None
        self.rotations.forget()
        return taps


def _side_by_side(*parts: torch.Tensor) -> torch.Tensor:
    """Returns parts [1, heads of each, T, head_dim] as [T, heads of all, head_dim], without a copy
    where they lie so."""
    rows = [part[0].transpose(0, 1) for part in parts]
    first, place = rows[0], rows[0].storage_offset()
    strides = first.stride(0), first.shape[2], 1
    for each in rows:
        is_there = each.storage_offset() == place and each.stride() == strides
        if not is_there or each.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(rows, dim=1)
        place += each.shape[1] * each.shape[2]
    shape = first.shape[0], sum(each.shape[1] for each in rows), first.shape[2]
    return first.as_strided(shape, strides)


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Serves as an attention function of transformers. There is no mask, since transformers
    makes none for a function that it does not know."""
    if attention_mask is not None:
        raise ValueError("it makes masks of its own for attention")
    step: TransformersStep = module.paged_step
    return step.attend(module.layer_idx, query, key, value, options), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)


class _Given(nn.Module):
    """Stands for the decoder where the code that makes logits asks for its hidden states."""

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **__: Any) -> BaseModelOutputWithPast:
        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)


class TransformersModel(Model):
    """A decoder and its head as transformers computes them.

    Embedding, layers, rotation, norms and logits are its code; attention is ours, by its attention
    interface, and so are the modules that `exchange` knows. Parameters bear transformers' names,
    which are those of checkpoints.
    """

    def __init__(self, config: ModelConfig, max_positions: int) -> None:
        super().__init__()
        self._config, self._step = config, TransformersStep()
        code = _make(config)
        plan = code.config.base_model_tp_plan or {}
        cuts = divide_attention(code.base_model, config, plan)
        exchange(code.base_model, self._step, config.shard, plan, cuts)
        exchange(code, self._step, WHOLE, {}, {})
        exchange_layers(code.base_model, self._step)
        calls, entries = self._step.calls, Entries(code.config)
        problem = _note_calls(code, self._step, config.shard) or _why_not_calls(
            calls, config, entries
        )
        if problem is not None:
            raise config.refusal(problem)
        self.windows = tuple(call.options.get("sliding_window") for call in calls)
        self.scores = _scores_of(calls[0])
        layers = _layers_of(code.base_model, config.num_layers)
        if layers is None:
            raise config.refusal("transformers' code does not hold its layers in one list")
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(_tap, self._step, index), with_kwargs=True)
        last = layers[-1]
        self._drops_rows = isinstance(last, StepLayer) and bool(last.next_norm)
        if isinstance(last, StepLayer):
            last.is_last = self._drops_rows
        for name, module in code.named_children():
            self.add_module(name, module)
        # In tuples, since they are no submodules: their parts are.
        self._decoder = (code.base_model,)
        self._ends = (code.get_input_embeddings(), code.get_output_embeddings())
        code._modules[code.base_model_prefix] = _Given()
        self._code = (code,)
        problem = _why_no_logits(code, config)
        if problem is not None or not isinstance(self._ends[1], StepLinear):
            raise config.refusal(problem or "its output head is no linear layer")
        self._made = _computed_buffers(self)
        ties = code.all_tied_weights_keys if config.tie_word_embeddings else {}
        self._ties = {name: other for name, other in ties.items() if name != other}
        self._tie()
        self.checkpoint_names = _names(config, self._ties)

    def untie(self) -> None:
        for name in self._ties:
            module, weight = self._place_of(name)
            setattr(module, weight, nn.Parameter(torch.empty_like(self.get_parameter(name))))
        self._ties = {}

    def _tie(self) -> None:
        """Makes tied weights share memory."""
        for name, other in self._ties.items():
            module, weight = self._place_of(name)
            setattr(module, weight, self.get_parameter(other))

    def _place_of(self, name: str) -> tuple[nn.Module, str]:
        path, _, weight = name.rpartition(".")
        return self.get_submodule(path), weight

    @torch.no_grad()
    def complete(self) -> None:
        """Has transformers compute the buffers that checkpoints lack, in their own types."""
        self._tie()
        for path, types in self._made.items():
            module = self.get_submodule(path)
            for name, dtype in types.items():
                value = float("nan") if dtype.is_floating_point else 0
                shape = module.get_buffer(name).shape
                setattr(module, name, torch.full(shape, value, dtype=dtype))
            for parameter in module.parameters(recurse=False):
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]
            self._code[0]._init_weights(module)
            if any(bool(module.get_buffer(name).isnan().any()) for name in types):
                raise self._config.refusal(f"transformers does not say what is in {path}")

    def shared_modules(self) -> SharedModules:
        found, head = self._ends
        with torch.device("meta"):
            table = Embedding(found.num_embeddings, found.embedding_dim)
        table.weight = found.weight  # which is not scaled
        assert isinstance(head, StepLinear)
        return SharedModules(table, head)

    def forward(
        self, batch: ForwardBatch, runtime: LayerRuntime, capture: HiddenCapture = NO_CAPTURE
    ) -> ModelOutput:
        wanted = None if capture.all_rows else batch.read_index
        self._step.begin(runtime, wanted, bool(capture.taps))
        hidden = _run(self._decoder[0], batch.input_ids, batch.positions)
        if wanted is not None and not self._drops_rows:
            hidden = hidden[wanted]
        taps = self._step.end()
        if taps is None:
            return ModelOutput(hidden)
        return ModelOutput(hidden, torch.cat([taps[layer] for layer in capture.taps], dim=1))

    def compute_logits(self, hidden: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        self._step.runtime = runtime
        return _logits(self._code[0], hidden)


def _make(config: ModelConfig) -> Any:
    """Makes transformers' model; without memory, on the meta device.

    Raises:
        ModelPathError: if its code cannot.
    """
    entries = text_entries(config.hf)
    types, count = entries.get("layer_types"), config.num_layers
    if isinstance(types, list) and len(types) != count:
        entries["layer_types"] = [*types[: count - 1], types[-1]]
    made = read_config({**entries, "num_hidden_layers": count})
    made._attn_implementation = ATTENTION
    try:
        return model_class(made)(made).eval()
    except WRONG_CODE as error:
        raise config.refusal(f"transformers cannot make the model ({in_one_line(error)})") from None


def _run(decoder: Any, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Returns hidden states [T, hidden_size] of tokens and positions [T] int64."""
    output = decoder(input_ids=ids[None], position_ids=positions[None], use_cache=False)
    hidden: torch.Tensor = output.last_hidden_state
    return hidden[0]


def _logits(code: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Returns logits [S, vocab_size] of hidden states [S, hidden_size]."""
    logits: torch.Tensor = code(inputs_embeds=hidden[None], use_cache=False).logits
    return logits[0]


def _why_no_logits(code: Any, config: ModelConfig) -> str | None:
    """Makes logits on the meta device. Returns why there are none; None if there are."""
    try:
        with torch.no_grad():
            found = _logits(code, torch.zeros((2, config.hidden_size), device="meta"))
    except WRONG_CODE as error:
        return f"transformers' code of its logits does not run here ({in_one_line(error)})"
    is_right = found.shape == (2, config.vocab_size)
    return None if is_right else f"its logits have the shape {[*found.shape]}"


def _note_calls(code: Any, step: TransformersStep, shard: Shard) -> str | None:
    """Runs the decoder on the meta device, to note its calls of attention. Returns why it does not
    run; None if it does."""
    for module in code.modules():
        if isinstance(layer := vars(module).get("layer_idx"), int):
            module.paged_step = step
            step.rotations.exchange_in(module, layer)
    if lost := _plain_tensors(code):
        return f"transformers' code keeps {lost[0][1]!r} neither as a weight nor as a buffer"
    two = torch.zeros(2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            _run(code.base_model, two, two)
    except WRONG_CODE as error:
        where = "here" if shard.is_whole else "over ranks; leave --tp-size out"
        return f"transformers' code does not run {where} ({in_one_line(error)})"
    for module, name in _plain_tensors(code):  # kept by this run: the next one makes them anew
        delattr(module, name)
    return None


def _plain_tensors(code: nn.Module) -> list[tuple[nn.Module, str]]:
    """Finds tensors that are attributes of modules, and neither parameters nor buffers."""
    return [
        (module, name)
        for module in code.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    ]


def _why_not_calls(calls: list[LayerCall], config: ModelConfig, entries: Entries) -> str | None:
    """Says why these calls of attention cannot be served; None if they can."""
    if [call.layer for call in calls] != list(range(config.num_layers)):
        return "its layers do not each call attention once, in their order"
    size = config.head_dim
    num_heads, num_kv_heads = map(config.shard.part, (config.num_heads, config.num_kv_heads))
    heads = (num_heads, num_kv_heads, size, size, size)
    for call in calls:
        if call.heads != heads and call.heads[:2] == (config.num_heads, config.num_kv_heads):
            return "its code does not let ranks divide the heads of attention; leave --tp-size out"
        if call.heads != heads:
            return (
                f"layer {call.layer} has query heads, KV heads and sizes of heads {call.heads}, but"
                f" all must have {heads}"
            )
        for name, value in call.options.items():
            if name not in USED_OPTIONS | IDLE_OPTIONS and value is not None and value is not False:
                return f"layer {call.layer} gives attention {name!r}, which is not supported"
    if any(_scores_of(call) != _scores_of(calls[0]) for call in calls):
        return "its layers scale or cap the scores of attention differently"
    types = entries("layer_types") or ["sliding_attention"] * config.num_layers
    has_window = [entries("sliding_window") and name == "sliding_attention" for name in types]
    if [bool(call.options.get("sliding_window")) for call in calls] != [*map(bool, has_window)]:
        return "its code does not tell attention which layers have a sliding window"
    return None


def _scores_of(call: LayerCall) -> ScoreForm:
    scale, softcap = call.options.get("scaling"), call.options.get("softcap")
    if scale is None or math.isclose(scale, call.heads[2] ** -0.5, rel_tol=1e-6):
        return ScoreForm(None, softcap)
    return ScoreForm(float(scale), softcap)


def _layers_of(decoder: nn.Module, num_layers: int) -> nn.ModuleList | None:
    """Finds the layers; None if they are not in one list."""
    lists = (each for each in decoder.modules() if isinstance(each, nn.ModuleList))
    return next((each for each in lists if len(each) == num_layers), None)


def _tap(
    step: TransformersStep, index: int, _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
) -> None:
    if step.taps is not None:
        hidden: torch.Tensor = args[0] if args else named["hidden_states"]
        step.taps[index] = hidden[0]


def _computed_buffers(model: nn.Module) -> dict[str, dict[str, torch.dtype]]:
    """Names the modules with buffers that no checkpoint has, and the types of these."""
    stored = model.state_dict(keep_vars=True).keys()
    found = dict[str, dict[str, torch.dtype]]()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if f"{path}.{name}" not in stored:
                found.setdefault(path, {})[name] = buffer.dtype
    return found


def _names(config: ModelConfig, ties: dict[str, str]) -> CheckpointNames:
    """Says how checkpoints name weights: where a model has several parts, that of text alone is
    read."""
    if not isinstance(config.hf.get("text_config"), dict):
        return CheckpointNames(tied=ties, apart=apart_from(config))
    return CheckpointNames(
        tied=ties,
        prefixes=(
            ("model.language_model.", "model."),
            ("language_model.model.", "model."),
            ("language_model.lm_head.", "lm_head."),
        ),
        only=("model.language_model.", "language_model.", "lm_head."),
    )
