"""Speed and memory as ratios: one interleaved run, an A/A control, results as files that say how they were made."""

from residua.lab.bench.timing import Ratio as Ratio
from residua.lab.bench.timing import Timing as Timing
from residua.lab.bench.timing import interleave as interleave
