"""SGLang's path of the arithmetic in `lookahead/cut.py`."""

from sglang.srt.lookahead.cut import Calibration as Calibration
from sglang.srt.lookahead.cut import LatencyTable as LatencyTable
from sglang.srt.lookahead.cut import PiecewiseLinearLatency as PiecewiseLinearLatency
from sglang.srt.lookahead.cut import compute_optimal_k as compute_optimal_k
