"""Does lm-eval, as it is, measure with a server of this runtime what transformers measures?

    python test/clients/check_lm_eval.py

Makes an environment for lm-eval, starts a server of the bundled model, and runs three small tasks
in several ways (WAYS): choices by log-likelihood, log-likelihoods of whole texts, and generated
texts. Every value is compared with one that transformers computes. No task needs a download. Writes
benchmark/results/lm_eval.json, and exits with 1 if a value differs.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _client_checks import (
    BUILD,
    DEMO_MODEL,
    client_python,
    demo_server,
    installed_version,
    plain_environ,
)
from _lm_eval_tasks import TASKS, Sample, read_samples, write_tasks
from _transformers_oracle import Oracle

from benchmark.command import make_parser, store
from benchmark.environment import describe_environment

PACKAGES = ("lm-eval[api]==0.4.13", "transformers>=5.0")
TOLERANCE = 5e-4  # of a sum of log-probabilities, both in float32


@dataclass(frozen=True)
class Way:
    """A way of asking the server.

    Attributes:
        tokenizer: `huggingface`: lm-eval's own, of the model's folder; `remote`: the server's, by
            its routes; `none`.
        sends_ids: prompts are token ids, else texts.
        begins_with_bos: whether the prompts of token ids, or their texts, do.
        batch_size: prompts in one request.
        num_concurrent: requests at once.
        is_chat: generated texts alone are asked for, as answers in chats.
    """

    name: str
    tokenizer: str
    sends_ids: bool
    begins_with_bos: bool
    batch_size: int = 1
    num_concurrent: int = 1
    is_chat: bool = False

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("code_answers",) if self.is_chat else TASKS

    @property
    def model(self) -> tuple[str, ...]:
        """Words of lm-eval's command line."""
        if self.is_chat:
            return ("--model", "local-chat-completions", "--apply_chat_template")
        return ("--model", "local-completions")

    def model_args(self, url: str) -> str:
        """For lm-eval's command line. The prefix is named, since id 0 is none to a remote one."""
        values = {
            "base_url": f"{url}/v1/{'chat/' * self.is_chat}completions",
            "model": "demo",
            "tokenizer_backend": self.tokenizer,
            "tokenized_requests": self.sends_ids,
            "add_bos_token": self.begins_with_bos,
            "custom_prefix_token_id": 0,
            "num_concurrent": self.num_concurrent,
            "max_retries": 1,
        }
        if self.tokenizer == "huggingface":
            values["tokenizer"] = str(DEMO_MODEL)
        return ",".join(f"{name}={value}" for name, value in values.items())


# Texts get a BOS by the server, and lm-eval counts it only if its own tokenizer adds one. The
# remote one never does, so for this model it goes with token ids.
WAYS = (
    Way("token ids", "huggingface", True, True),
    Way("token ids, without BOS, batches", "huggingface", True, False, batch_size=4),
    Way("token ids, at once", "huggingface", True, True, num_concurrent=4),
    Way("texts", "huggingface", False, True),
    Way("texts, batches", "huggingface", False, True, batch_size=4),
    Way("remote tokenizer, token ids", "remote", True, False),
    Way("chats", "none", False, False, is_chat=True),
)


def main() -> int:
    parser = make_parser(__doc__, "lm_eval")
    parser.add_argument(
        "--environment", type=Path, default=BUILD / "lm-eval", help="folder for lm-eval's packages"
    )
    arguments = parser.parse_args()
    result = describe_environment()
    python = client_python(arguments.environment, *PACKAGES)
    result["lm_eval"] = installed_version(python, "lm_eval")
    oracle = Oracle(DEMO_MODEL)
    with demo_server() as url:
        result["ways"] = [check_way(way, python, url, oracle) for way in WAYS]
    store(arguments.out, result)
    wrong = [
        f"{way['way']}: {name}"
        for way in result["ways"]
        for name, task in way["tasks"].items()
        if task["wrong"] or not task["compared"]
    ]
    print(f"Wrong: {'; '.join(wrong) or 'none'}")
    return 1 if wrong else 0


def check_way(way: Way, python: Path, url: str, oracle: Oracle) -> dict[str, Any]:
    """All tasks in one way, compared sample by sample."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder / "tasks")
        run_lm_eval(way, python, url, folder)
        tasks = {
            task: compare(read_samples(folder / "out", task), way, oracle) for task in way.tasks
        }
    print(f"{way.name}: {json.dumps(tasks)}", flush=True)
    return {"way": way.name, "tasks": tasks}


def run_lm_eval(way: Way, python: Path, url: str, folder: Path) -> None:
    """Runs the tasks.

    Raises:
        SystemExit: with what lm-eval has written, if it ends with an error.
    """
    command = [str(python), "-m", "lm_eval", "run", *way.model]
    command += ["--model_args", way.model_args(url), "--tasks", *way.tasks]
    command += ["--include_path", str(folder / "tasks"), "--output_path", str(folder / "out")]
    command += ["--batch_size", str(way.batch_size), "--log_samples", "--seed", "1"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    environ = {**plain_environ(), **offline, "LMEVAL_LOG_LEVEL": "ERROR"}
    ended = subprocess.run(command, env=environ, cwd=folder, text=True, capture_output=True)
    if ended.returncode != 0:
        raise SystemExit(f"lm-eval ended with {ended.returncode}:\n{ended.stderr}")


def compare(samples: list[Sample], way: Way, oracle: Oracle) -> dict[str, Any]:
    """Counts the values that were compared and those that are wrong, and tells how far a
    log-likelihood is off."""
    wrong, largest = 0, 0.0
    for sample in samples:
        if sample.kind == "generate_until":
            wrong += sample.text != expected_text(sample, way, oracle)
            continue
        is_rolling = sample.kind == "loglikelihood_rolling"
        if is_rolling:
            logprob, is_greedy = oracle.whole_text(sample.context, way.begins_with_bos), None
        else:
            logprob, is_greedy = oracle.continuation(
                sample.context, sample.continuation, way.begins_with_bos
            )
        difference = abs(sample.logprob - logprob)
        largest = max(largest, difference)
        wrong += difference > TOLERANCE or sample.is_greedy != is_greedy
    found = {"compared": len(samples), "wrong": wrong}
    return found | ({"largest_difference": round(largest, 6)} if largest else {})


def expected_text(sample: Sample, way: Way, oracle: Oracle) -> str:
    """Returns the text that transformers generates in place of a sample."""
    if way.is_chat:
        return oracle.answer(json.loads(sample.context), sample.stops, sample.num_tokens)
    begins_with_bos = way.begins_with_bos
    return oracle.generate(sample.context, begins_with_bos, sample.stops, sample.num_tokens)


if __name__ == "__main__":
    raise SystemExit(main())
