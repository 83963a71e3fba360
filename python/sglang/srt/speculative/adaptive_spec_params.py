"""SGLang's path of `lookahead/ema.py`."""

from sglang.srt.lookahead.ema import AdaptiveSpeculativeParams as AdaptiveSpeculativeParams
