"""The model card's part on multi-token prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

OLD_LIMIT = (
    "- The mask token is there for multi-token decoding; these base weights were not taught to fill"
    " it.\n"
)
NEW_LIMIT = (
    "- Several tokens per step without `mtp_verify` change the text: see the table of multi-token"
    " prediction.\n"
)
HEADINGS = ("## Held-out packages", "## Samples (not picked)", "## Limits")
BASE_ROWS = {
    "| held-out loss |": "| held-out loss of the base model |",
    "| loss on training text |": "| the same on training text |",
}
TAUGHT_ROW = (
    "\n| held-out loss of these weights | {nats_per_token:.3f} nats/token, {bits_per_byte:.3f} "
    "bits/byte, accuracy {accuracy:.3f} (one token per step, 512-token windows) |"
)
SECTION = """## Multi-token prediction

The weights in this folder are the base model's after a second training that teaches it to predict
the next tokens from mask tokens behind its input (docs/mtp.md of the project):

    {command}

{seconds:.0f} s on one {device} (commit {commit}), {steps:,} steps; the model is its own teacher.
The folder after `--base` holds the base model, as it was at that commit. All figures are in
`benchmark/results/train_mtp_tiny_code.json`, of the held-out packages below.

Loss with one token per step, before and after: {before:.3f} and {after:.3f} nats/token in
512-token windows ({change:+.1%}), {before_long:.3f} and {after_long:.3f} in {long}-token windows.
The losses by package and by position below are those of the base model.

Behind {positions:,} positions of real text: how often the model, given its own tokens before it,
confirms what mask 1..7 says, and (last row) how often it says the same after the real text instead.

| offset | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
| --- | --- | --- | --- | --- | --- | --- | --- |
| alone | {marginal} |
| with all before it | {accepted} |
| after real text | {real_marginal} |

Text of its own, {prompts} held-out prompts of 128 tokens continued by {new} tokens, greedy,
float32. Tokens per step count only continuations with less than 20 % repeated 4-grams (in brackets:
all). `k=8 tau 0.9` takes up to 8 tokens per step while the probability of each reaches 0.9, `k=3
static` always 3; `verified` keeps only what one token per step would have said too (checked for
every text; departures at a near-tie of two logits: {near_ties}). The last columns compare the text
with that of one token per step: share of equal texts, share of the tokens before the first
difference, nats/token as one token per step sees them (its own text: {plain_nats:.3f}).

| | tokens/step | equal text | agreeing prefix | nats/token |
| --- | --- | --- | --- | --- |
{rows}

"""


def _cells(shares: list[float]) -> str:
    return " | ".join(f"{share:.2f}" for share in shares)


def prediction_section(results: dict[str, Any]) -> str:
    """Markdown of the section, from the results of train_mtp.py."""
    losses, predicted = results["held_out_loss"], results["prediction"]
    before, after = losses["before"], losses["after"]
    long = max(before, key=int)
    rows = [
        f"| {name} | {item['tokens_per_step'] or 0:.2f} ({item['tokens_per_step_all']:.2f}) |"
        f" {item['equal_to_greedy']:.2f} | {item['mean_agreeing_prefix']:.2f} |"
        f" {item['nats_per_token']:.3f} |"
        for name, item in predicted["own_text"].items()
    ]

    def loss(table: dict[str, Any], context: str) -> float:
        return float(table[context]["overall"]["nats_per_token"])

    return SECTION.format(
        command=results["command"],
        seconds=results["training"]["seconds"],
        device=results["device"],
        commit=results["commit"],
        steps=results["training"]["steps"],
        before=loss(before, "512"),
        after=loss(after, "512"),
        change=loss(after, "512") / loss(before, "512") - 1,
        before_long=loss(before, long),
        after_long=loss(after, long),
        long=long,
        positions=predicted["real_text"]["positions"],
        marginal=_cells(predicted["real_text"]["marginal"]),
        accepted=_cells(predicted["real_text"]["accepted"]),
        real_marginal=_cells(predicted["real_text"]["real_marginal"]),
        prompts=predicted["prompts"],
        new=predicted["new_tokens"],
        near_ties=sum(predicted["near_ties"].values()),
        plain_nats=next(iter(predicted["own_text"].values()))["greedy_nats_per_token"],
        rows="\n".join(rows),
    )


def read_base_card(folder: Path) -> str:
    """The card of a base model's folder.

    Raises:
        ValueError: if train_base.py did not write it (the weights may be taught already).
    """
    card = (folder / "README.md").read_text()
    if any(part not in card for part in (OLD_LIMIT, *BASE_ROWS, *HEADINGS)):
        raise ValueError(
            f"{folder} is not a folder that train_base.py wrote, or its weights were taught "
            "several tokens per step already: give --base the base model's folder."
        )
    return card


def extend_card(card: str, results: dict[str, Any], samples: str) -> str:
    """The base model's card with the section on prediction and new samples."""
    taught = results["held_out_loss"]["after"]["512"]["overall"]
    for name, new_name in BASE_ROWS.items():
        card = card.replace(name, new_name)
    card = card.replace("\n\n## Training\n", TAUGHT_ROW.format(**taught) + "\n\n## Training\n", 1)
    place, start, end = (card.find(heading) for heading in HEADINGS)
    card = card[:start] + f"## Samples (not picked)\n\n{samples}\n\n" + card[end:]
    card = card.replace(OLD_LIMIT, NEW_LIMIT)
    return card[:place] + prediction_section(results) + card[place:]
