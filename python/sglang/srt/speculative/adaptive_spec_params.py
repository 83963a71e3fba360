"""SGLang's path of `lookahead/ema.py`. No torch."""

from sglang.srt.lookahead.ema import (
    AdaptiveSpeculativeParams as AdaptiveSpeculativeParams,
)
