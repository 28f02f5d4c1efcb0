"""Steps on the numbers modulo a prime, x -> x + c and x -> a x: one token each, none of them the identity.

They do not commute, so that a chain of them cannot be added up in one go; each can be undone, so that a uniform start
stays uniform whatever the chain. The prime p has 2 p - 3 steps: c = 1 ... p - 1, then a = 2 ... p - 1.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


def step_count(modulus: int) -> int:
    """How many different steps there are."""
    return 2 * modulus - 3


def trajectory(x: Int[Tensor, " b"], steps: Int[Tensor, "b k"], modulus: int) -> Int[Tensor, "b k"]:
    """The value after each of the steps."""
    seen = []
    for step in steps.unbind(1):
        x = torch.where(step < modulus - 1, x + step + 1, x * (step - modulus + 3)) % modulus
        seen.append(x)
    return torch.stack(seen, 1)
