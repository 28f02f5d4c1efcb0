"""NUMERICS counts the changes of our own arithmetic that change a loss: start, batches, updates, designs, kernels.

A record of a run is taken in place of the run only where this number is the same. What torch, a processor or a compiler
rounds otherwise is not counted here; a record says what it was made with, and the table says so where that differs.
tests/train/test_numerics.py holds the losses of small runs to this number.
"""

NUMERICS = 2
