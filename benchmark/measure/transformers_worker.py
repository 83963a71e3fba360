"""transformers' `generate`, one prompt after the other, for engine_vs_transformers.py.

Reads a job per line from its input (JSON: prompts, num_threads, new_tokens) and answers each with
a line; sleeps in between. An empty job only asks whether the model is loaded. The OpenMP settings
are torch's own, since transformers is alone on the machine while it is timed.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


def run(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(job["num_threads"])
    # No end-of-text id: every request makes all its tokens, as `ignore_eos` does.
    config = GenerationConfig(max_new_tokens=job["new_tokens"], do_sample=False, pad_token_id=0)
    output_ids = []
    start = time.perf_counter()
    for prompt in job["prompts"]:
        ids = torch.tensor([prompt])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        output_ids.append(output[0, len(prompt) :].tolist())
    return {"seconds": time.perf_counter() - start, "output_ids": output_ids}


@torch.inference_mode()
def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(run(model, job) if job else {}), flush=True)


if __name__ == "__main__":
    main()
