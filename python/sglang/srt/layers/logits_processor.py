"""Gives, under SGLang's path, log-probabilities from logits. They are in `srt/layers/logprobs.py`;
`srt/layers/sampler.py` asks for them, and `ModelRunner.compute_logits` makes the logits."""

from __future__ import annotations

from sglang.srt.layers.logprobs import (
    LogprobTensors as LogprobTensors,
)
from sglang.srt.layers.logprobs import (
    query_logprobs as query_logprobs,
)
from sglang.srt.layers.logprobs import (
    query_prompt_logprobs as query_prompt_logprobs,
)
