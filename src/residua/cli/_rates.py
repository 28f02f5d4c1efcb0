"""Learning rates as they are typed."""

from __future__ import annotations


def grid(flag: str, text: str) -> list[float]:
    """`1e-3,2e-3` as numbers; none of an empty text."""
    try:
        return [float(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--{flag} {text}: write numbers with commas, such as 1e-3,2e-3") from None
