"""Speed and memory as ratios: one interleaved run, an A/A control, results as files that say how they were made."""

from residua.bench.timing import Ratio as Ratio
from residua.bench.timing import Timing as Timing
from residua.bench.timing import interleave as interleave
