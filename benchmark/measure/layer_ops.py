"""What do the fused operations gain? Microseconds of each beside torch's own way, on one GPU.

Medians of CUDA graphs of many calls, so that a launch costs what it costs in the graph of a decode
step (ours overlaps with the end of the call before it, where the GPU can). Inputs rotate through
copies that together exceed the L2 cache (`cold`), but no more copies than calls: what few rows read
stays in the cache, as it does in a step. Results are compared with torch's before they are timed.

Operations between matrix products; matrix products of few rows (torch: cuBLAS; where `kernel` is
cublas, ours too); attention of requests that feed one token each (torch: the `torch_native`
backend). Random values in the geometry of Llama-3.1-8B, bfloat16. The ratio is torch's time over
ours. `at_copy_bandwidth_us`: what the bytes that must move take at the bandwidth of a large copy;
what mostly reads can be faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from benchmark.command import make_parser, store
from benchmark.device_times import cache_bytes, copies_to_exceed, copy_gb_s, device_us
from benchmark.environment import describe_environment
from benchmark.random_model import GEOMETRIES, Geometry
from sglang.srt.layers.forward_batch import DECODE, ForwardBatch, GraphKey
from sglang.srt.layers.layer_runtime import LayerOps
from sglang.srt.layers.rotary_embedding import rotation_table
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.platform import shared_memory_bytes
from sglang.srt.registry import ATTENTION_BACKENDS, OPERATIONS, load
from sglang.srt.rope_config import parse_rope

GEOMETRY = "llama-3.1-8b"
BACKENDS = {"triton": "triton", "torch": "torch_native"}  # of attention, for each of OPERATIONS
KV_LENS, MAX_POSITIONS = (170, 1024), 8192
EPS, ROPE = 1e-5, {"rope_theta": 500_000.0}
MAX_ERROR = 2e-2  # of the norm of a result; what bfloat16 rounds is less than 1e-2
LINE = "{op:17}{detail:21}{rows!s:>4}  {kernel:8}{cold!s:7}{method:13}"
LINE += "{ours_us!s:>8}{torch_us!s:>10}{ratio!s:>7}{at_copy_bandwidth_us!s:>22}"

Call = Callable[[], tuple[torch.Tensor, ...]]  # with inputs of its own; gives what is compared


@dataclass(frozen=True, slots=True)
class Case:
    """One operation at one size.

    Attributes:
        rows: tokens fed; of attention: requests.
        num_bytes: what must move: all inputs read once and all results written once.
        make: takes a name of BACKENDS; draws inputs and binds them.
        kernel: what ours runs, `triton` or `cublas`.
    """

    op: str
    detail: str
    rows: int
    num_bytes: int
    make: Callable[[str], Call]
    kernel: str = "triton"

    def calls(self, name: str, num_copies: int) -> list[Call]:
        """One per copy of the inputs; every name gets the same inputs."""
        torch.manual_seed(0)
        return [self.make(name) for _ in range(num_copies)]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases share."""

    geometry: Geometry
    device: torch.device
    dtype: torch.dtype

    def draw(self, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
        """Normal values."""
        return [torch.empty(s, dtype=self.dtype, device=self.device).normal_() for s in shapes]

    def layer_ops(self, name: str) -> LayerOps:
        """Those of the set `name`."""
        ops: LayerOps = load(OPERATIONS[name].layers)(self.device)
        return ops


def norm_case(setting: Setting, rows: int) -> Case:
    size = setting.geometry.hidden_size

    def make(name: str) -> Call:
        ops = setting.layer_ops(name)
        x, residual, weight = setting.draw((rows, size), (rows, size), (size,))
        return lambda: ops.add_rms_norm(x, residual, weight, EPS)

    num_bytes = (4 * rows + 1) * size * setting.dtype.itemsize
    return Case("add_rms_norm", f"{size}, with residual", rows, num_bytes, make)


def activation_case(setting: Setting, rows: int) -> Case:
    size = setting.geometry.intermediate_size

    def make(name: str) -> Call:
        ops, (gate_up,) = setting.layer_ops(name), setting.draw((rows, 2 * size))
        return lambda: (ops.silu_and_mul(gate_up),)

    num_bytes = 3 * rows * size * setting.dtype.itemsize
    return Case("silu_and_mul", f"{size}", rows, num_bytes, make)


def rotation_case(setting: Setting, rows: int) -> Case:
    num_kv, head_dim = 2 * setting.geometry.num_kv_heads, setting.geometry.head_dim
    num_heads = setting.geometry.num_heads + num_kv
    table = rotation_table(head_dim, MAX_POSITIONS, parse_rope(ROPE)).to(setting.device)

    def make(name: str) -> Call:
        ops = setting.layer_ops(name)
        (heads,) = setting.draw((rows, num_heads, head_dim))
        positions = torch.randint(0, MAX_POSITIONS, (rows,), device=setting.device)
        rotation = ops.rotation(table, positions)  # once per step, not per layer
        slots = torch.randperm(rows, device=setting.device)
        kv = torch.zeros_like(heads[:, :num_kv])
        return lambda: (ops.rotate_and_store(heads, rotation, positions, kv, slots), kv)

    # Heads in and out; cos and sin in float32, head_dim / 2 of each; position and slot.
    num_bytes = rows * (2 * num_heads * head_dim * setting.dtype.itemsize + 4 * head_dim + 16)
    return Case("rotate_and_store", f"{num_heads} heads of {head_dim}", rows, num_bytes, make)


def weight_shapes(geometry: Geometry) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of the matrices that a token goes through."""
    hidden, inner = geometry.hidden_size, geometry.intermediate_size
    q, kv = (num * geometry.head_dim for num in (geometry.num_heads, geometry.num_kv_heads))
    layer = {"qkv": (q + 2 * kv, hidden), "o": (hidden, q)}
    layer |= {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    return {**layer, "lm_head": (geometry.vocab_size, hidden)}


def product_cases(
    setting: Setting, weight_name: str, row_counts: Sequence[int], op: str = "linear"
) -> list[Case]:
    """For no more rows than our kernel takes. `gated_linear` ends with the activation."""
    from sglang.srt.layers.ops.triton_ops import MAX_FEW_ROWS, _FewRows

    n, k = weight_shapes(setting.geometry)[weight_name]
    is_gated = op == "gated_linear"

    def case_of(rows: int) -> Case:
        def make(name: str) -> Call:
            ops, (x, weight) = setting.layer_ops(name), setting.draw((rows, k), (n, k))
            product = ops.gated_linear if is_gated else ops.linear
            return lambda: (product(x, weight, None),)

        results = n // 2 if is_gated else n
        num_bytes = (rows * (results + k) + n * k) * setting.dtype.itemsize
        shape = _FewRows.choose(rows, n, k, shared_memory_bytes(setting.device), is_gated)
        kernel = "triton" if shape else "cublas"
        return Case(op, f"{weight_name} {n}x{k}", rows, num_bytes, make, kernel)

    return [case_of(rows) for rows in row_counts if rows <= MAX_FEW_ROWS]


def attention_case(setting: Setting, rows: int, kv_len: int) -> Case:
    """Planned as for the graph of a decode step; slots in random order, pages of one."""
    geometry, device, num_slots = setting.geometry, str(setting.device), rows * kv_len
    num_heads, num_kv_heads, head_dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim

    def make(name: str) -> Call:
        pool = MHATokenToKVPool(num_slots, 1, 1, num_kv_heads, head_dim, setting.dtype, device)
        pool.kv[0].normal_()
        pool.kv *= geometry.num_layers  # one memory; torch_native keeps what it keeps of a model
        slots = 1 + torch.randperm(num_slots, device=device).view(rows, kv_len)
        requests = ReqToTokenPool(rows, MAX_POSITIONS, device)
        requests.req_to_token[: len(slots), :kv_len] = slots
        kv_lens = torch.full((rows,), kv_len, device=device)
        batch = ForwardBatch(
            input_ids=torch.zeros_like(kv_lens),
            positions=kv_lens - 1,
            slots=slots[:, -1],
            rows=torch.arange(rows, device=device),
            q_lens=[1] * rows,
            kv_lens=kv_lens,
            kv_len_upper_bounds=[kv_len] * rows,
            graph_key=GraphKey(DECODE, rows, 1, rows),
        )
        (q,), windows = setting.draw((rows, num_heads, head_dim)), [None] * geometry.num_layers
        backend = ATTENTION_BACKENDS.load(BACKENDS[name])(requests, pool, num_heads, windows)
        backend.plan(batch)
        backend.forward(0, q)
        backend.plan(batch)  # the next step: what torch_native has kept is not gathered again
        return lambda: (backend.forward(0, q),)

    num_values = 2 * (kv_len * num_kv_heads + num_heads) * head_dim  # K, V, queries, result
    num_bytes = rows * (num_values * setting.dtype.itemsize + 4 * kv_len)  # and int32 slots
    return Case("decode attention", f"KV of {kv_len}", rows, num_bytes, make)


def make_cases(setting: Setting, row_counts: Sequence[int]) -> list[Case]:
    """All that is timed."""
    makers = (norm_case, activation_case, rotation_case)
    cases = [make(setting, rows) for make in makers for rows in row_counts]
    for name in weight_shapes(setting.geometry):
        cases += product_cases(setting, name, row_counts)
    cases += product_cases(setting, "gate_up", row_counts, "gated_linear")
    return cases + [attention_case(setting, rows, kv) for kv in KV_LENS for rows in row_counts]


def check(case: Case, ours: Sequence[Call], reference: Sequence[Call]) -> None:
    """Raises a ValueError where a result differs from the reference by more than rounding."""
    for call, expect in zip(ours, reference, strict=True):
        for found, expected in zip(call(), expect(), strict=True):
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            error = (found.double() - expected.double()).norm() / expected.double().norm()
            if not error < MAX_ERROR:
                raise ValueError(
                    f"{case.op} ({case.detail}) of {case.rows} rows is wrong: it differs from"
                    f" torch's by {error:.1e} of the norm, {MAX_ERROR:.0e} is allowed."
                )


def measure(case: Case, num_calls: int, cold_bytes: int, gb_s: float) -> dict[str, Any]:
    """A row of the result; `method` graph/events: torch's way could not be captured.

    Args:
        cold_bytes: that must move between two readings of the same input, for it to be cold.
    """
    num_copies = copies_to_exceed(cold_bytes, case.num_bytes, num_calls)
    ours, reference = (case.calls(name, num_copies) for name in BACKENDS)
    check(case, ours, reference)
    ours_us, ours_method = device_us(ours, num_calls)
    torch_us, torch_method = device_us(reference, num_calls)
    row = {"op": case.op, "rows": case.rows, "detail": case.detail, "kernel": case.kernel}
    row["cold"] = num_copies * case.num_bytes > cold_bytes
    row["method"] = "/".join(dict.fromkeys((ours_method, torch_method)))
    times = {"ours_us": ours_us, "torch_us": torch_us, "ratio": torch_us / ours_us}
    times["at_copy_bandwidth_us"] = case.num_bytes / gb_s / 1e3
    return {**row, **{name: round(value, 2) for name, value in times.items()}}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The names of the fields and a line per row."""
    return "\n".join(LINE.format(**row) for row in ({name: name for name in rows[0]}, *rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints a table, writes the result."""
    parser = make_parser(__doc__, "layer_ops")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 512])
    parser.add_argument("--calls", type=int, default=40, help="calls per CUDA graph")
    arguments = parser.parse_args(argv)
    if min(arguments.calls, *arguments.rows) < 1:
        parser.error("--rows and --calls must be 1 or more.")
    if not torch.cuda.is_available():
        sys.exit("There is no GPU to time: run this where torch.cuda.is_available() is True.")
    device = torch.device("cuda", torch.cuda.current_device())
    setting = Setting(GEOMETRIES[GEOMETRY], device, torch.bfloat16)
    cold_bytes = cache_bytes(device)  # inputs are half of them or more
    gb_s = copy_gb_s(device)
    with torch.inference_mode():
        cases = make_cases(setting, arguments.rows)
        rows = [measure(case, arguments.calls, cold_bytes, gb_s) for case in tqdm(cases)]
    print(table(rows))
    result = {"geometry": GEOMETRY, "copy_gb_s": round(gb_s, 1), "rows": rows}
    store(arguments.out, {**describe_environment(), **result})


if __name__ == "__main__":
    main()
