"""The tables of README.md, docs/mtp.md, docs/pause.md and docs/reliability.md."""

from __future__ import annotations

from benchmark.report.markdown import Result, measured_by, table, verdict


def engine_vs_transformers(results: list[Result]) -> str:
    """Tokens per second of the Engine beside transformers, start-up and idle CPU."""
    (result,) = results
    rows = "\n".join(
        f"| {row['requests']} | {row['engine_tok_s']:,.0f} | {row['transformers_tok_s']:,.0f}"
        f" | **{row['ratio']:.2f}x** | {row['asked']:g}x |"
        for row in result["rows"]
    )
    machine, versions = result["machine"], result["versions"]
    return f"""\
| requests at once | Engine, tokens/s | `generate` one by one, tokens/s | ratio | goal |
|---|---|---|---|---|
{rows}

Server ready in {result["startup_s"]:.1f} s; an idle server uses {result["idle_cpu_percent"]:.1f} %
of a core.

{machine["cpu"]}, {machine["cores"]} cores; Python {versions["python"]}, torch {versions["torch"]},
transformers {versions["transformers"]};
{measured_by(result)}.
"""


def train_mtp(results: list[Result]) -> str:
    """Tokens per step and what they cost in text, of the bundled model."""
    (result,) = results
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


def mtp_cpu(results: list[Result]) -> str:
    """Tokens per second on a CPU, beside plain decode."""
    (result,) = results
    names = list(result["rows"][0]["kinds"])
    columns = [f"{row['requests']} at once" for row in result["rows"]]
    lines = []
    for name in names:
        cells = [row["kinds"][name] for row in result["rows"]]
        shown = " | ".join(f"{c['tok_s']:,.0f} ({c['ratio_to_plain']:.2f}x)" for c in cells)
        lines.append(f"| {name} | {shown} | {cells[0]['tokens_per_step']:.2f} |")
    machine, versions = result["machine"], result["versions"]
    rows = "\n".join(lines)
    return f"""\
On a CPU, tokens per second (and beside plain decode in the same round) by requests at once, and
tokens per step of one:

| | {" | ".join(columns)} | tokens/step |
|---|{"---|" * (len(columns) + 1)}
{rows}

{machine["cpu"]}, {machine["cores"]} cores, torch {versions["torch"]};
{measured_by(result)}.
"""


def costly_requests(results: list[Result]) -> str:
    """One line per kind of costly request."""
    (result,) = results
    rows = [
        [
            name,
            f"{kind['plain_median']:.0f}",
            f"{kind['costly_median']:.0f}",
            f"{kind['ratio']:.2f}",
            verdict(kind["ratio"], result["min_ratio"], is_least=True),
        ]
        for name, kind in result["kinds"].items()
    ]
    asked = f"{result['min_ratio']:g} or more"
    return table(["beside", "plain: events/s", "costly: events/s", "ratio", asked], rows)


def pause_latency(results: list[Result]) -> str:
    """One line per case, with overlap and without beside each other."""
    (result,) = results
    rows = result["rows"]
    lines = []
    for row in (row for row in rows if row["overlap"]):
        same = ("phase", "kind", "mode")
        other = next(r for r in rows if not r["overlap"] and all(r[n] == row[n] for n in same))
        cells = [_pause(row), _token(row), _pause(other), _token(other)]
        lines.append(f"| {row['phase']}, {row['kind']}, {row['mode']} | {' | '.join(cells)} |")
    machine = result["machine"]
    newline = "\n"
    return f"""\
{result["requests"]} requests run; medians, as a client of the Engine sees them. A pause is
counted in steps of the kind in flight, the first token after `continue_generation` in decode steps,
or in first chunks of {result["chunk"]} prompt tokens where prompts are computed (again).

| in flight, kind, mode | pause | first token | pause, no overlap | first token, no overlap |
|---|---|---|---|---|
{newline.join(lines)}

{machine["cpu"]}, {machine["cores"]} cores; {measured_by(result)}.
"""


def _pause(row: Result) -> str:
    return f"{row['pause_ms']:.0f} ms, {row['pause_in_steps']:.1f} steps"


def _token(row: Result) -> str:
    if "token_after" not in row:
        return "-"
    unit = "chunks" if row["token_after"] == "first chunk" else "steps"
    return f"{row['resume_ms']:.0f} ms, {row['token_after_in_steps']:.1f} {unit}"
