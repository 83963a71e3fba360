"""The tables of docs/mtp.md, docs/models.md and docs/reliability.md."""

from __future__ import annotations

from benchmark.report.markdown import Result, table, verdict


def train_mtp(result: Result) -> str:
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

After real text, the model confirms what mask 1..7 says, given its own tokens before it, in
{accepted} of the cases.
Training raised its loss with one token per step from {loss["before"]:.3f} to {loss["after"]:.3f}
nats/token ({loss["after"] / loss["before"] - 1:+.1%}). {result["device"]},
`benchmark/results/train_mtp_tiny_code.json`.
"""


def costly_requests(result: Result) -> str:
    """One line per kind of costly request."""
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


def fp8_quality(result: Result) -> str:
    """One line per figure of the bundled model."""
    rows = [
        [name, f"{found['plain']:.3f}", f"{found['fp8']:.3f}", f"{found['ratio']:.4f}"]
        for name, found in result["figures"].items()
    ]
    return table(["bundled model", "as it is", "`--quantization fp8`", "ratio"], rows)


def expert_model(result: Result) -> str:
    """One line per batch of decode steps, and one for prompts."""
    rows = [
        [
            f"decode step, batch of {row['requests']}",
            f"{row['ms']:.2f} ms",
            f"{row['experts_used']:.1f} ({row['least_used']} to {row['most_used']})",
            f"{row['read_ms']:.2f} ms",
            f"{row['over_reading']:.2f}",
            *_asked(row["over_reading"], row["at_most"], is_least=False),
        ]
        for row in result["decodes"]
    ]
    own, dense = result["prompts"]
    rows.append(
        [
            f"prompt of {result['prompt_tokens']:,} tokens",
            f"{own['ms']:.1f} ms, {own['tflop_s']:.0f} TFLOP/s",
            "",
            f"{dense['geometry']}: {dense['ms']:.1f} ms, {dense['tflop_s']:.0f} TFLOP/s",
            f"{result['of_dense']:.2f}",
            *_asked(result["of_dense"], result["at_least"], is_least=True),
        ]
    )
    most = max(result["decodes"], key=lambda row: row["requests"])
    head = ["", "time", "experts of a layer that a step uses", "beside", "ratio", "asked", ""]
    return (
        f"{table(head, rows)}\n"
        f"`{result['geometry']}`; a step is beside the time of reading the weights of the experts"
        f" that its routers chose, all others but the embedding, and KV, at"
        f" {result['copy_tb_s']:g} TB/s; a prompt is beside a dense model's. An expert gets"
        f" {most['mean_share']:.2%} of its layer's choices on average, with a batch of"
        f" {most['requests']} it is {most['least_share']:.2%} to {most['largest_share']:.2%}.\n"
    )


def _asked(reached: float, asked: float | None, is_least: bool) -> list[str]:
    """The two last cells of a line."""
    if asked is None:
        return ["", ""]
    return [f"{'>=' if is_least else '<='} {asked:g}", verdict(reached, asked, is_least)]


def ledger(result: Result) -> str:
    """One line per count of a ledger of seeds, and one below on its sittings."""
    failures = result["failures"]
    mended = sum("mended_in" in each for each in failures)
    counts = {**result["counts"], "failed": len(failures), "of these mended since": mended}
    text = table(["counted", "number"], [[name, f"{count:,}"] for name, count in counts.items()])
    sittings = [each for each in result["sittings"] if "last" in each]
    commits = ", ".join(dict.fromkeys(each["commit"] for each in sittings))
    hours = sum(each["seconds"] for each in sittings) / 3600
    number = "One sitting" if len(sittings) == 1 else f"{len(sittings)} sittings"
    return f"{text}\n{number}, {hours:.1f} hours on a CPU, of commit {commits}.\n"


def faults(result: Result) -> str:
    """One line per process: the functions and faults, and what became of the server."""
    found: dict[str, list[tuple[str, str, bool]]] = {}
    for name, fault in result["faults"].items():
        process, _, rest = name.partition(": ")
        action, _, place = rest.partition(" in ")
        found.setdefault(process, []).append((place, action, fault["error"] is None))
    rows = [
        [
            process,
            ", ".join(f"`{place}`" for place in dict.fromkeys(each[0] for each in cases)),
            ", ".join(dict.fromkeys(each[1] for each in cases)),
            f"{sum(each[2] for each in cases)} of {len(cases)}",
        ]
        for process, cases in found.items()
    ]
    text = table(["process", "while it is in", "faults", "as it must be"], rows)
    return f"{text}\nCommit {result['commit']}.\n"
