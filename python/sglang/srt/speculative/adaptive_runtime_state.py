"""SGLang's path of the adaptive policy and of what each number of drafts owns."""

from sglang.srt.lookahead.ema import AdaptiveController as AdaptiveController
from sglang.srt.lookahead.round_options import SpecRuntimeState as SpecRuntimeState
