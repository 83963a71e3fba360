"""Small tasks for lm-eval, with their documents, and its log of samples as it writes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_TOKENS = 24
STOPS = ["\n\n", "return"]
# A beginning, and what may follow; the first is right. No token holds parts of both: lm-eval
# divides such a token, and then measures ids that no text has.
CHOICES = (
    ("import os\nimport ", ("sys", "banana", "sys\n\nclass Reader:\n    pass")),
    ("def add(a, b):\n    return a", (" + b", " banana", " - c")),
    ("for i in range(10):", ("\n    print(i)", " fish", "\nprint")),
    ("class Point:\n    def __init__(", ("self, x, y):", "cls):", "é, ü):")),
    ("with open(path) as ", ("f:", "path:", "9:")),
    ("if __name__ == ", ('"__main__":', "None:", "x:")),
    ("try:\n    value = int(text)\nexcept ", ("ValueError:", "Elephant:", ":")),
    ("x = [1, 2, 3]\nprint(len", ("(x))", "(y))", "[0]))")),
)
TEXTS = (
    "import os\n",
    "def add(a, b):\n    return a + b\n\n\nclass Reader:\n    def read(self):\n        pass\n",
    '"""Grüße."""\n\nNAMES = ["ä", "ö"]\n',
    "x",
)


@dataclass(frozen=True)
class Sample:
    """One value that lm-eval has measured.

    Attributes:
        kind: `loglikelihood`, `loglikelihood_rolling` or `generate_until`.
        context: what stands before; of a rolling one the whole text; a chat as JSON.
        continuation: of a log-likelihood.
        stops, num_tokens: of a generation.
        logprob: a sum over the continuation; 0 for a generation.
        is_greedy: None where lm-eval has no such value.
        text: what was generated.
    """

    kind: str
    context: str
    continuation: str = ""
    stops: tuple[str, ...] = ()
    num_tokens: int = 0
    logprob: float = 0.0
    is_greedy: bool | None = None
    text: str = ""


def _task(name: str, documents: Path, **fields: Any) -> dict[str, Any]:
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
        "test_split": "test",
        **fields,
    }


_KINDS: dict[str, dict[str, Any]] = {
    "code_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": 0,
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    },
    "code_texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "code_answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": STOPS, "max_gen_toks": NUM_TOKENS, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match"}],
    },
}
TASKS = tuple(_KINDS)


def write_tasks(folder: Path) -> None:
    """Writes the tasks, JSON being YAML too, and the documents that they name."""
    folder.mkdir()
    beginnings = [{"text": text, "choices": list(choices)} for text, choices in CHOICES]
    documents = {
        "code_choices": beginnings,
        "code_texts": [{"text": text} for text in TEXTS],
        "code_answers": beginnings,
    }
    for name, fields in _KINDS.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(document) + "\n" for document in documents[name]))
        (folder / f"{name}.yaml").write_text(json.dumps(_task(name, path, **fields)))


def read_samples(folder: Path, task: str) -> list[Sample]:
    """Reads the samples that lm-eval has logged of a task under its output folder."""
    (path,) = folder.rglob(f"samples_{task}_*.jsonl")
    kind = str(_KINDS[task]["output_type"])
    return [
        sample
        for line in path.read_text(encoding="utf-8").splitlines()
        for sample in _samples_of(kind, json.loads(line))
    ]


def _samples_of(kind: str, entry: dict[str, Any]) -> Iterator[Sample]:
    calls = entry["arguments"].values()
    for call, (answer,) in zip(calls, entry["resps"], strict=True):
        context, second = call["arg_0"], call.get("arg_1")
        if isinstance(context, list):
            (context,) = context
        if kind == "generate_until":
            stops, num_tokens = tuple(second["until"]), second["max_gen_toks"]
            yield Sample(kind, context, stops=stops, num_tokens=num_tokens, text=answer)
        elif kind == "loglikelihood_rolling":
            yield Sample(kind, context, logprob=float(answer))
        else:
            logprob, is_greedy = float(answer[0]), str(answer[1]) == "True"
            yield Sample("loglikelihood", context, second, logprob=logprob, is_greedy=is_greedy)
