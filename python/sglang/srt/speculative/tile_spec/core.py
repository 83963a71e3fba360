"""SGLang's path of the arithmetic of cuts, which go by measured sizes alone (`LatencyTable`)."""

from sglang.srt.lookahead.cut import Calibration as Calibration
from sglang.srt.lookahead.cut import LatencyTable as LatencyTable
from sglang.srt.lookahead.cut import compute_optimal_k as compute_optimal_k
from sglang.srt.step.price_table import Curve

PiecewiseLinearLatency = Curve  # of steps that replay no graph
