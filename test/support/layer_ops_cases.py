"""The conformance table of layer operations, and what compares a set with `TorchOps` in float64.

As a program it runs `INTERPRETED` in float32 and float16 on a CPU and prints a line of JSON for
each; Triton kernels then need TRITON_INTERPRET=1 in the environment, set before Triton is imported:

    export PYTHONPATH=python:sgl-kernel/python:test
    TRITON_INTERPRET=1 python test/support/layer_ops_cases.py triton
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch

from interpreted import asked
from sglang.srt.layers.layer_runtime import HeadNorms, LayerOps
from sglang.srt.layers.ops.torch_ops import TorchOps
from sglang.srt.layers.rotary_embedding import rotation_table
from sglang.srt.layers.scaled_weight import CODES, scaled
from sglang.srt.registry import OPERATIONS, load
from sglang.srt.rope_config import parse_rope
from sglang.srt.weight_format import CHANNEL

# Of outputs of size about 1: rounding of the result, and of one operand before it.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
INTERPRETED_TYPES = (torch.float32, torch.float16)  # matrix products of few rows take no float32
NUM_SLOTS = 40
ORACLE = TorchOps(torch.device("cpu"))

Case = Callable[[LayerOps, torch.Generator, str, torch.dtype], float]


def _values(
    generator: torch.Generator, device: str, dtype: torch.dtype, *shape: int
) -> torch.Tensor:
    return torch.randn(*shape, generator=generator).to(device, dtype)


def _worst(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert found.dtype == dtype, found.dtype
    assert found.shape == expected.shape, found.shape
    if found.numel() == 0:
        return 0.0
    scale = expected.abs().clamp(min=1)
    worst = ((found.double().cpu() - expected.cpu()).abs() / scale.cpu()).max().item()
    return worst if worst == worst else float("inf")


def norm_case(shape: tuple[int, ...], has_residual: bool) -> Case:
    """RMSNorm over the last dimension; of three dimensions every other head, as of queries."""

    def run(ops: LayerOps, generator: torch.Generator, device: str, dtype: torch.dtype) -> float:
        x = _values(generator, device, dtype, *shape)
        x = x[:, ::2] if x.dim() == 3 else x
        residual = _values(generator, device, dtype, *x.shape) if has_residual else None
        weight = _values(generator, device, dtype, shape[-1])
        out, total = ops.add_rms_norm(x, residual, weight, 1e-5)
        rounded = (x if residual is None else x + residual).double()
        expected, _ = ORACLE.add_rms_norm(rounded, None, weight.double(), 1e-5)
        return max(_worst(out, expected, dtype), _worst(total, rounded, dtype))

    return run


def activation_case(num_rows: int, size: int) -> Case:
    def run(ops: LayerOps, generator: torch.Generator, device: str, dtype: torch.dtype) -> float:
        gate_up = _values(generator, device, dtype, num_rows, 2 * size)
        expected = ORACLE.silu_and_mul(gate_up.double())
        return _worst(ops.silu_and_mul(gate_up), expected, dtype)

    return run


def rotation_case(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    by_token: bool = False,
    has_norms: bool = False,
) -> Case:
    """Every slot that is not named must keep its content. Normalized heads are those of
    `add_rms_norm`, rounded.

    Args:
        by_token: the rotation has a row for each token.
        has_norms: queries and keys are normalized first.
    """

    def run(ops: LayerOps, generator: torch.Generator, device: str, dtype: torch.dtype) -> float:
        rope = parse_rope({"rope_theta": 10_000.0})
        table = rotation_table(head_dim, 512, rope).to(device)
        num_all = num_heads + 2 * num_kv_heads
        heads = _values(generator, device, dtype, num_tokens, num_all, head_dim)
        kv = _values(generator, device, dtype, NUM_SLOTS, 2 * num_kv_heads, head_dim)
        positions = torch.randint(0, 512, (num_tokens,), generator=generator).to(device)
        slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_tokens].to(device)
        expected_kv = kv.double()
        rotation, parts = ORACLE.rotation(table, positions), heads
        norms = None
        if has_norms:
            q_weight, k_weight = (_values(generator, device, dtype, head_dim) / 2 for _ in "qk")
            norms = HeadNorms(q_weight, k_weight, 0.1)
            q, k, v = heads.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
            q, _ = ORACLE.add_rms_norm(q.float(), None, q_weight.float(), norms.eps)
            k, _ = ORACLE.add_rms_norm(k.float(), None, k_weight.float(), norms.eps)
            parts = torch.cat((q.to(dtype), k.to(dtype), v), dim=1)
        expected = ORACLE.rotate_and_store(parts.double(), rotation, positions, expected_kv, slots)
        if by_token:
            q = ops.rotate_and_store(heads, table[positions], None, kv, slots, norms)
        else:
            rotation = ops.rotation(table, positions)
            q = ops.rotate_and_store(heads, rotation, positions, kv, slots, norms)
        return max(_worst(q, expected, dtype), _worst(kv, expected_kv, dtype))

    return run


def product_case(num_rows: int, out_features: int, in_features: int) -> Case:
    def run(ops: LayerOps, generator: torch.Generator, device: str, dtype: torch.dtype) -> float:
        x = _values(generator, device, dtype, num_rows, in_features)
        weight = _values(generator, device, dtype, out_features, in_features) / in_features**0.5
        expected = x.double() @ weight.double().T
        return _worst(ops.linear(x, weight, None), expected, dtype)

    return run


def scaled_case(
    num_rows: int,
    out_features: int,
    in_features: int,
    has_bias: bool = False,
    is_gated: bool = False,
) -> Case:
    """A product with a weight of 8 bits, in bfloat16; the error is in proportion to the tolerance
    of the type. Each row of x is one of 8 bits times a power of 2, which rounding leaves as it is
    (Triton's interpreter rounds to 8 bits wrongly).

    Args:
        is_gated: half of the features are gates; on a CPU in float16, since Triton's interpreter
            multiplies bfloat16 wrongly.
    """

    def run(ops: LayerOps, generator: torch.Generator, device: str, dtype: torch.dtype) -> float:
        x = 100 * _values(generator, device, torch.float32, num_rows, in_features)
        x[:, 5] = 448.0
        used = torch.float16 if is_gated and device == "cpu" else torch.bfloat16
        sizes = 2.0 ** torch.arange(num_rows).remainder(4 if is_gated else 14)[:, None]
        x = (x.clamp(-448, 448).to(CODES).float() / 256 / sizes.to(device)).to(used)
        values = _values(generator, device, torch.float32, out_features, in_features)
        weight = scaled(values / in_features**0.5, CHANNEL)
        bias = _values(generator, device, used, out_features) if has_bias else None
        expected = x.double() @ weight.values(torch.float64).T
        expected = expected if bias is None else expected + bias
        expected = ORACLE.silu_and_mul(expected) if is_gated else expected
        product = ops.gated_linear if is_gated else ops.linear
        error = _worst(product(x, weight, bias), expected, used)
        return error * TOLERANCE[dtype] / TOLERANCE[used]

    return run


def gated_case(num_rows: int, size: int, in_features: int, has_bias: bool = False) -> Case:
    """Large values, of which exp overflows, must give finite ones."""

    def run(ops: LayerOps, generator: torch.Generator, device: str, dtype: torch.dtype) -> float:
        x = _values(generator, device, dtype, num_rows, in_features)
        weight = _values(generator, device, dtype, 2 * size, in_features) / in_features**0.5
        bias = _values(generator, device, dtype, 2 * size) if has_bias else None
        wide = None if bias is None else bias.double()
        expected = ORACLE.gated_linear(x.double(), weight.double(), wide)
        assert ops.gated_linear(x * 40, weight, bias).isfinite().all()
        return _worst(ops.gated_linear(x, weight, bias), expected, dtype)

    return run


def experts_case(
    num_rows: int,
    num_experts: int,
    num_chosen: int,
    normalizes: bool,
    size: int = 64,
    hidden_size: int = 64,
    has_ties: bool = False,
) -> Case:
    """Makes a case of experts with large scores; the last expert is never chosen.

    Args:
        has_ties: each expert has a twin with its weights and scores, so that any choice of equal
            scores gives the same.
    """

    def run(ops: LayerOps, generator: torch.Generator, device: str, dtype: torch.dtype) -> float:
        x = _values(generator, device, dtype, num_rows, hidden_size)
        scores = 3 * _values(generator, device, dtype, num_rows, num_experts)
        scores[:, -1] = -30.0
        gate_up = _values(generator, device, dtype, num_experts, 2 * size, hidden_size)
        gate_up /= hidden_size**0.5
        down = _values(generator, device, dtype, num_experts, hidden_size, size) / size**0.5
        if has_ties:
            scores = torch.cat((scores, scores), -1)
            gate_up, down = torch.cat((gate_up, gate_up)), torch.cat((down, down))
        given = (scores, gate_up, down)
        wide = [each.double() for each in (x, *given)]
        expected = ORACLE.experts(*wide, num_chosen, normalizes)
        found = ops.experts(x, *given, num_chosen, normalizes)
        return _worst(found, expected, dtype)

    return run


CASES: dict[str, Case] = {
    "norm of one row": norm_case((1, 256), False),
    "norm of a sum": norm_case((5, 256), True),
    "norm of no rows": norm_case((0, 256), True),
    "norm of an odd size": norm_case((3, 80), True),
    "norm of heads": norm_case((3, 8, 64), False),
    "norm of a large size": norm_case((2, 4096), True),
    "activation": activation_case(3, 768),
    "activation of no rows": activation_case(0, 768),
    "activation of an odd size": activation_case(2, 1100),
    "rotation, GQA 4:2": rotation_case(7, 4, 2, 128),
    "rotation, GQA 3:1": rotation_case(5, 3, 1, 64),
    "rotation by token": rotation_case(5, 3, 1, 64, by_token=True),
    "rotation, keys alone": rotation_case(5, 0, 2, 64),
    "rotation, a head each": rotation_case(3, 2, 2, 64),
    "rotation, GQA 32:8": rotation_case(2, 32, 8, 128),
    "rotation, heads of 80": rotation_case(4, 4, 2, 80),
    "rotation of normalized heads": rotation_case(7, 4, 2, 128, has_norms=True),
    "rotation of normalized heads of 80": rotation_case(3, 16, 2, 80, has_norms=True),
    "rotation of normalized keys alone": rotation_case(5, 0, 2, 64, has_norms=True),
    "rotation of normalized heads by token": rotation_case(5, 3, 1, 64, True, has_norms=True),
    "product of one row": product_case(1, 64, 256),
    "product of no rows": product_case(0, 64, 256),
    "product of an odd size": product_case(3, 50, 70),
    "product of 16 rows": product_case(16, 6144, 512),
    "product of 24 rows": product_case(24, 4288, 256),
    "product of 24 rows, few features": product_case(24, 512, 256),
    "product of 64 rows": product_case(64, 4288, 256),
    "product of 64 rows, few features": product_case(64, 512, 256),
    "product of 40 rows": product_case(40, 16384, 256),
    "product over many columns": product_case(20, 64, 8192),
    "8-bit product of one row": scaled_case(1, 64, 256),
    "8-bit product of no rows": scaled_case(0, 64, 256),
    "8-bit product of 24 rows with a bias": scaled_case(24, 512, 272, has_bias=True),
    "8-bit product of 512 rows": scaled_case(512, 256, 512),
    "8-bit product of 40 rows": scaled_case(40, 128, 512),
    "8-bit product of 128 rows": scaled_case(128, 4288, 256),
    "8-bit product over many columns": scaled_case(20, 64, 8192),
    "8-bit product of 16 rows": scaled_case(16, 16384, 256),
    "8-bit gated product of one row": scaled_case(1, 128, 256, is_gated=True),
    "8-bit gated product of no rows": scaled_case(0, 128, 256, is_gated=True),
    "8-bit gated product with a bias": scaled_case(3, 128, 256, has_bias=True, is_gated=True),
    "8-bit gated product of 65 rows": scaled_case(65, 256, 256, is_gated=True),
    "8-bit gated product of 200 rows": scaled_case(200, 256, 256, is_gated=True),
    "gated product of one row": gated_case(1, 64, 256),
    "gated product of no rows": gated_case(0, 64, 256),
    "gated product of an odd size": gated_case(3, 50, 70),
    "gated product with a bias": gated_case(3, 64, 64, has_bias=True),
    "gated product of 16 rows": gated_case(16, 8192, 256),
    "gated product of 64 rows": gated_case(64, 8192, 256),
    "gated product of 65 rows": gated_case(65, 64, 256),
    "experts of one row": experts_case(1, 8, 2, True),
    "experts of no rows": experts_case(0, 4, 2, True),
    "experts of many rows": experts_case(37, 8, 3, False),
    "experts of an odd size": experts_case(5, 4, 1, False, size=50),
    "experts of odd sizes": experts_case(19, 6, 1, True, size=40, hidden_size=96),
    "experts with equal scores": experts_case(6, 4, 3, True, size=40, has_ties=True),
    "rotation of one token": rotation_case(1, 4, 2, 128),
    "product of 16 rows, few features": product_case(16, 512, 256),
    "product of 40 rows, few features": product_case(40, 512, 256),
    "gated product of 16 rows, few features": gated_case(16, 256, 256),
    "gated product of 64 rows, few features": gated_case(64, 256, 256),
    "8-bit product of 16 rows, few features": scaled_case(16, 128, 256),
    "8-bit product of 128 rows, few features": scaled_case(128, 128, 256),
}
# So many features choose other tiles on a GPU, but none in the interpreter, where each of these
# runs as the case of its name with few features.
MANY_FEATURES = {name.removesuffix(", few features") for name in CASES if "few features" in name}
INTERPRETED = {name: case for name, case in CASES.items() if name not in MANY_FEATURES}


def max_error(name: str, case: Case, device: str, dtype: torch.dtype, seed: int = 0) -> float:
    """The largest difference of set `name` from the oracle, relative where values exceed 1."""
    ops: LayerOps = load(OPERATIONS[name].layers)(torch.device(device))
    return case(ops, torch.Generator().manual_seed(seed), device, dtype)


def main(name: str) -> None:
    torch.set_num_threads(1)
    for dtype in INTERPRETED_TYPES:
        for case_name, case in asked(INTERPRETED).items():
            error = max_error(name, case, "cpu", dtype)
            print(json.dumps([f"{case_name}, {dtype}", error]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
