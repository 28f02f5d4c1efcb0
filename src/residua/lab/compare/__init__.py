"""Comparing designs fairly: one recipe, tuned rates, seeds, paired statistics, cost beside quality."""

from residua.lab.compare.plan import ComparePlan as ComparePlan
from residua.lab.compare.plan import Size as Size
from residua.lab.compare.plan import Tune as Tune
from residua.lab.compare.plan import read_plan as read_plan
from residua.lab.compare.results import Results as Results
from residua.lab.compare.run import compare as compare
from residua.lab.compare.series import read_series as read_series
