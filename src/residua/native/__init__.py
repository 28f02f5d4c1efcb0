"""Kernels in plain C: no framework headers, no instructions of the machine that built them, one shared library."""

from residua.native.build import Unavailable as Unavailable
from residua.native.library import status as status
