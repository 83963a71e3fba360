"""Writes the measured part of docs/mtp.md from benchmark/results/.

`--check` changes nothing and exits with 1 if the page does not hold what the results say.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from make_readme_table import insert

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "mtp.md"
RESULTS = ROOT / "benchmark" / "results"


def quality(result: dict[str, Any]) -> str:
    """Tokens per step and what they cost in text, of the bundled model."""
    predicted, losses = result["prediction"], result["held_out_loss"]
    loss = {k: v["512"]["overall"]["nats_per_token"] for k, v in losses.items()}
    rows = "\n".join(
        f"| {name} | {item['tokens_per_step']:.2f} | {item['equal_to_greedy']:.0%} |"
        f" {item['mean_agreeing_prefix']:.0%} | {item['nats_per_token']:.2f} |"
        for name, item in predicted["own_text"].items()
    )
    greedy = next(iter(predicted["own_text"].values()))["greedy_nats_per_token"]
    accepted = ", ".join(f"{share:.2f}" for share in predicted["real_text"]["marginal"])
    return f"""\
`tiny-code`, {predicted["prompts"]} prompts of held-out packages, {predicted["new_tokens"]} new
tokens, greedy; tokens per step count only texts with less than 20 % repeated 4-grams. "Same text"
is the share of outputs equal to plain greedy, "agreeing" how far outputs agree on average,
nats/token are those of the text under one token per step (plain greedy text: {greedy:.2f}).

| | tokens/step | same text | agreeing | nats/token |
|---|---|---|---|---|
{rows}

Behind real text the model confirms what mask 1..7 says, given its own tokens before it, in
{accepted} of the cases.
Training raised its loss with one token per step from {loss["before"]:.3f} to {loss["after"]:.3f}
nats/token ({loss["after"] / loss["before"] - 1:+.1%}). {result["device"]},
`benchmark/results/train_mtp_tiny_code.json`.
"""


def speed(result: dict[str, Any]) -> str:
    """Tokens per second on a CPU, beside plain decode."""
    names = list(result["rows"][0]["kinds"])
    columns = [f"{row['requests']} at once" for row in result["rows"]]
    lines = []
    for name in names:
        cells = [row["kinds"][name] for row in result["rows"]]
        shown = " | ".join(f"{c['tok_s']:,.0f} ({c['ratio_to_plain']:.2f}x)" for c in cells)
        lines.append(f"| {name} | {shown} | {cells[0]['tokens_per_step']:.2f} |")
    machine, versions = result["machine"], result["versions"]
    commit = result["commit"][:12] + (" with local changes" if result.get("dirty") else "")
    rows = "\n".join(lines)
    return f"""\
On a CPU, tokens per second (and beside plain decode in the same round) by requests at once, and
tokens per step of one:

| | {" | ".join(columns)} | tokens/step |
|---|{"---|" * (len(columns) + 1)}
{rows}

{machine["cpu"]}, {machine["cores"]} cores, torch {versions["torch"]}; commit {commit};
`{result["command"]}`.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    old = PAGE.read_text(encoding="utf-8")
    trained = json.loads((RESULTS / "train_mtp_tiny_code.json").read_text(encoding="utf-8"))
    timed = json.loads((RESULTS / "mtp_cpu.json").read_text(encoding="utf-8"))
    new = insert(old, f"{quality(trained)}\n{speed(timed)}")
    if args.check:
        if new != old:
            print("docs/mtp.md is out of date: python benchmark/make_mtp_tables.py")
        return int(new != old)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
