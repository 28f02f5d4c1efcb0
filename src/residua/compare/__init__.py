"""Comparing designs fairly: one recipe, tuned rates, seeds, paired statistics, cost beside quality."""

from residua.compare.plan import ComparePlan as ComparePlan
from residua.compare.plan import Size as Size
from residua.compare.plan import Tune as Tune
from residua.compare.plan import read_plan as read_plan
from residua.compare.run import compare as compare
