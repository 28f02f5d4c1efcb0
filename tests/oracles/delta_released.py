"""The released order of `tests.oracles.delta`: in blocks, d_n = h - d_{n-1}, pushed after a block's first read."""

from functools import partial

from tests.oracles import delta

forward = partial(delta.forward, compat="released")
