"""Does multi-token prediction give the same tokens, step by step, however the server runs it?

    python -m benchmark.measure.mtp_cudagraph_ab
    python -m benchmark.measure.mtp_cudagraph_ab --model-path DIR --dtype bfloat16 --out ab.json

Fixed prompts at k = 2 and k = 3 (static, conf_adapt and verified) through arms: overlap on and off,
radix cache on and off, one request and eight at once; on a GPU also graphs of multi-token steps on
and off (`--disable-mtp-cuda-graph`). Every arm is compared with the plainest one (the first
line): the first three steps' input, pending and committed tokens, positions and effective k, the
whole outputs, and whether the steps after the first replayed graphs as the arm says. A difference
is allowed where the plainest arm's choice was a near-tie, in at most 2 % of the runs. Also shown:
how many tokens are EOS, the mask or token 0 (the symptoms of a broken graph), and the KV ledger.
Exit code 1 if anything differs that must not, or the ledger is not exact.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import print_rows, store
from benchmark.environment import describe_environment
from sglang.srt.model_config import load_model_config
from sglang.srt.platform import Platform

PROMPTS = (
    "def read_config(path):\n    ",
    "import os\nimport sys\n\n",
    "class Queue:\n    def __init__(self, maxsize=0):\n        ",
    "for index, value in enumerate(values):\n    if value",
    "try:\n    import json\nexcept ImportError:\n",
    "    def test_",
    "@dataclass\nclass Point:\n    x: int\n",
    'raise ValueError(f"',
)
TAU = 0.9
NUM_TRACED_STEPS = 3
MAX_GAP = {"float32": 1e-3, "bfloat16": 0.125, "float16": 0.0625}
MAX_SHARE = 0.02
STEP_FIELDS = ("input", "pending", "committed", "positions", "effective_k", "k")
GRAPH_SWITCH = "disable_mtp_cuda_graph"
EXACT = "0/0/0"  # a ledger
MODES: dict[str, dict[str, Any]] = {
    "static": {},
    "conf_adapt": {"mtp_strategy": ["conf_adapt", TAU]},
    "verified": {"mtp_verify": True, "temperature": 0.0},
}


@dataclass(frozen=True)
class Arm:
    """One way to run the server. `use_graph` is None where the device has no graphs."""

    overlap: bool
    radix: bool
    batch: int
    use_graph: bool | None

    @property
    def name(self) -> str:
        def word(flag: bool) -> str:
            return "on" if flag else "off"

        graph = "" if self.use_graph is None else f", graph {word(self.use_graph)}"
        return f"overlap {word(self.overlap)}, radix {word(self.radix)}, batch {self.batch}{graph}"


@dataclass(frozen=True)
class Run:
    """The output of one request, and its first decoding steps."""

    output_ids: list[int]
    effective_k: list[int]
    finish: str
    steps: list[dict[str, Any]]
    top_logprobs: list[list[float]]

    @classmethod
    def of(cls, answer: dict[str, Any], steps: dict[str, list[dict[str, Any]]]) -> Run:
        meta = answer["meta_info"]
        top_logprobs = [[entry[0] for entry in top] for top in meta["output_top_logprobs"]]
        finish = meta["finish_reason"]["type"]
        steps_of = steps[meta["id"]]
        return cls(answer["output_ids"], meta["mtp_effective_k"], finish, steps_of, top_logprobs)

    def margin(self, place: int) -> float:
        """Returns how close the choice of a token was: its distance in logits to the second, or of
        its probability to the threshold."""
        best, second = self.top_logprobs[place]
        return min(best - second, abs(math.exp(best) - TAU))


@dataclass
class Findings:
    """Outcome of one arm. EOS, mask and token 0 are shares of all tokens."""

    name: str
    ledger: str
    runs: int = 0
    equal: int = 0
    near_ties: int = 0
    differences: list[str] = field(default_factory=list)
    eos: float = 0.0
    mask: float = 0.0
    token_0: float = 0.0

    @property
    def is_clean(self) -> bool:
        return not self.differences and self.ledger == EXACT


Runs = dict[tuple[str, int], Run]  # by mode and k, and prompt


def servers_of(device: str) -> list[list[Arm]]:
    """Lists the arms of each server, the plainest arm first; they differ in the batch alone."""
    graphs: tuple[bool | None, ...] = (None,) if device == "cpu" else (False, True)
    switches = itertools.product(graphs, (False, True), (False, True))
    return [
        [Arm(overlap, radix, batch, graph) for batch in (1, 8)]
        for graph, overlap, radix in switches
    ]


def run_server(
    arms: list[Arm], arguments: argparse.Namespace, mask: int
) -> tuple[dict[Arm, Runs], str]:
    """All runs of the arms of a server, and its ledger."""
    arm = arms[0]
    flags: dict[str, Any] = {
        "disable_overlap_schedule": not arm.overlap,
        "disable_radix_cache": not arm.radix,
        "dtype": arguments.dtype,
        "device": arguments.device,
        "attention_backend": arguments.attention_backend,
    }
    if arm.use_graph is not None:
        flags[GRAPH_SWITCH] = not arm.use_graph
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace.jsonl"
        os.environ |= {"SGLANG_MTP_DEBUG_TRACE": str(trace), "SGLANG_MTP_FIXED_K": "1"}
        with sglang.Engine(model_path=arguments.model_path, **flags) as engine:
            answers = {arm: generate(engine, arm, arguments.new_tokens) for arm in arms}
            state = engine.get_server_info()["internal_states"][0]
        steps = read_trace(trace, mask)
    names = ("legacy_missing_tokens", "orphan_token_count", "overlap_token_count")
    runs = {
        arm: {key: Run.of(answer, steps) for key, answer in found.items()}
        for arm, found in answers.items()
    }
    return runs, "/".join(str(state[name]) for name in names)


def generate(
    engine: sglang.Engine, arm: Arm, new_tokens: int
) -> dict[tuple[str, int], dict[str, Any]]:
    """Answers by (mode and k, prompt)."""
    answers: dict[tuple[str, int], dict[str, Any]] = {}
    for (mode, more), k in itertools.product(MODES.items(), (2, 3)):
        params = {"max_new_tokens": new_tokens, "mtp_enabled": True, "mtp_k": k, **more}
        what = f"{mode} k={k}"
        for start in range(0, len(PROMPTS), arm.batch):
            indices = range(start, min(start + arm.batch, len(PROMPTS)))
            found = engine.generate(
                [PROMPTS[index] for index in indices],
                params,
                rid=[f"{arm.name}|{what}|{index}" for index in indices],
                return_logprob=True,
                top_logprobs_num=2,
            )
            answers |= {(what, i): answer for i, answer in zip(indices, found, strict=True)}
    return answers


def read_trace(path: Path, mask: int) -> dict[str, list[dict[str, Any]]]:
    """The first decoding steps of each request: from the one that ends the prompt on."""
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in path.read_text().splitlines():
        record = json.loads(line)
        found = steps[record["rid"]]
        if record["phase_before"] != "prefill" and len(found) < NUM_TRACED_STEPS:
            found.append(without_masks(record, mask))
    return steps


def without_masks(step: dict[str, Any], mask: int) -> dict[str, Any]:
    """A step without its masks, of which there may be more than k - 1 (padding of the batch)."""
    tokens = list(step["input"])
    while tokens[-1] == mask:
        tokens.pop()
    num_masks = step["q_len"] - len(tokens)
    if num_masks < step["k"] - 1:
        raise RuntimeError(f"{step['rid']}, step {step['step']}: {num_masks} masks are too few.")
    return {**step, "input": tokens, "positions": step["positions"][: len(tokens)]}


def same_steps(arm: Run, plainest: Run) -> str:
    """Empty if the traced steps agree, else what does not. A cached prefix is not fed, so the
    first step is compared from where the arm begins."""
    for number, (got, right) in enumerate(zip(arm.steps, plainest.steps, strict=True)):
        skipped = got["positions"][0] - right["positions"][0] if number == 0 else 0
        for name in STEP_FIELDS:
            expected = right[name]
            if name in ("input", "committed", "positions"):
                expected = expected[skipped:]
            if got[name] != expected:
                return f"step {number}, {name}: {got[name]}, expected {expected}"
    return ""


def wrong_graphs(arm: Arm, run: Run) -> str:
    """Empty if exactly the steps that should have replayed a graph did, else what did not. The
    first step feeds the prompt, and may have too many rows for any graph."""
    used = [step["can_run_cuda_graph"] for step in run.steps[1:]]
    wanted = bool(arm.use_graph)
    return "" if all(flag == wanted for flag in used) else f"steps replayed graphs: {used}"


def first_difference(left: list[int], right: list[int]) -> int | None:
    pairs = enumerate(zip(left, right))
    place = next((i for i, (a, b) in pairs if a != b), min(len(left), len(right)))
    return None if len(left) == len(right) == place else place


def compare(arm: Run, plainest: Run, what: str, max_gap: float, findings: Findings) -> None:
    findings.runs += 1
    place = first_difference(arm.output_ids, plainest.output_ids)
    if place is None:
        step = first_difference(arm.effective_k, plainest.effective_k)
        place = None if step is None else sum(plainest.effective_k[: step + 1]) - 1
    problem = same_steps(arm, plainest)
    if place is None and not problem and arm.finish == plainest.finish:
        findings.equal += 1
        return
    nearby = range(max(0, (place or 0) - 3), min((place or 0) + 4, len(plainest.top_logprobs)))
    if place is not None and any(plainest.margin(near) <= max_gap for near in nearby):
        findings.near_ties += 1
        return
    findings.differences.append(f"{what}: {problem or f'outputs differ at token {place}'}")


def judge(
    arm: Arm, runs: Runs, plainest: Runs, ledger: str, arguments: argparse.Namespace
) -> Findings:
    """Compares an arm with the plainest one."""
    found = Findings(arm.name, ledger)
    for key, run in runs.items():
        what = f"{key[0]}, prompt {key[1]}"
        compare(run, plainest[key], what, MAX_GAP[arguments.dtype], found)
        if wrong := wrong_graphs(arm, run):
            found.differences.append(f"{what}: {wrong}")
    if found.near_ties > max(1, MAX_SHARE * found.runs):
        found.differences.append(f"{found.near_ties} near-ties are too many")
    return found


def count_symptoms(found: Findings, runs: Runs, eos: set[int], mask: int) -> None:
    """Adds the shares of EOS, mask and token 0 to what was found of an arm."""
    tokens = [token for run in runs.values() for token in run.output_ids]
    found.eos = sum(token in eos for token in tokens) / len(tokens)
    found.mask, found.token_0 = (tokens.count(token) / len(tokens) for token in (mask, 0))
    if found.mask:
        found.differences.append("the mask token was emitted")


def print_findings(findings: list[Findings]) -> None:
    print_rows(
        {**asdict(found), "differences": len(found.differences), "is_clean": found.is_clean}
        for found in findings
    )
    for found in findings:
        for difference in found.differences[:5]:
            print(f"{found.name}: {difference}", file=sys.stderr)


def main() -> int:
    """Runs all arms; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model-path", default="demo")
    add("--dtype", default="float32", choices=tuple(MAX_GAP))
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--attention-backend", help="default: the device's")
    add("--new-tokens", type=int, default=48)
    add("--out", type=Path, help="also write the findings as JSON")
    arguments = parser.parse_args()
    model = load_model_config(arguments.model_path)
    mask = model.hf["mtp_mask_token_id"]
    device = Platform.probe().device if arguments.device == "auto" else arguments.device
    findings, plainest = [], Runs()
    for arms in tqdm(servers_of(device), desc="servers", unit="server"):
        runs_of, ledger = run_server(arms, arguments, mask)
        plainest = plainest or runs_of[arms[0]]
        for arm, runs in runs_of.items():
            findings.append(judge(arm, runs, plainest, ledger, arguments))
            count_symptoms(findings[-1], runs, set(model.eos_token_ids), mask)
    print_findings(findings)
    if arguments.out is not None:
        report = {
            **describe_environment(),
            "model": arguments.model_path,
            "dtype": arguments.dtype,
            "device": device,
            "attention_backend": arguments.attention_backend or "default",
            "arms": [asdict(item) for item in findings],
        }
        store(arguments.out, report)
    return 0 if all(item.is_clean for item in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
