"""Uses all additions of `additions.py` in one Engine. Run with the copy that has them, and the
folder of a model of the added family; prints what each page's addition gave, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import sglang
from sglang.srt.entrypoints.control_calls import CALL_ROUTES
from sglang.srt.observability.metrics import ServerFigures, exposition
from sglang.srt.observability.request_metrics import RequestMetrics

PROMPT, NUM_NEW = [5, 9, 3, 5, 9], 12


def main(model: str) -> dict[str, Any]:
    with sglang.Engine(
        model_path=model,
        attention_backend="eager",
        skip_tokenizer_init=True,
        max_total_tokens=1024,
        max_running_requests=4,
    ) as engine:

        def generate(**params: Any) -> dict[str, Any]:
            params |= {"max_new_tokens": NUM_NEW, "ignore_eos": True}
            answer: dict[str, Any] = engine.generate(input_ids=PROMPT, sampling_params=params)
            return answer

        greedy = generate(temperature=0)
        drawn = [generate(sampling_seed=7, top_a=top_a)["output_ids"] for top_a in (0.0, 1e6)]
        noted = engine.note_weights(note="trained")
        [state] = engine.get_server_info()["internal_states"]
    figures = ServerFigures(state, RequestMetrics(), num_slots=1024, model_name="twin")
    lines = exposition(figures).decode().splitlines()
    return {
        "tokens": greedy["output_ids"],
        "backend": engine.server_args.attention_backend,
        "num_drafts": greedy["meta_info"]["spec_proposed_drafts"],
        "drawn": drawn,
        "noted": noted["message"],
        "route": [route.path for route in CALL_ROUTES if "note" in route.path],
        "metric": [line for line in lines if line.startswith("sglang:ended_by_length_total{")],
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
