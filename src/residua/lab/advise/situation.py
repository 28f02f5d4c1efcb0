"""What is asked: the goal, the model, how it is trained and served, and what it may cost."""

from __future__ import annotations

from dataclasses import dataclass, field

from residua.lab.cost.targets import Target, sized

GOALS = {
    "quality": "a lower loss at the same size",
    "shortcut": "a shortcut that can erase and rewrite, not only add",
    "local": "better mixing of neighbouring tokens",
    "depth": "late layers that can read early ones again",
}
PARALLEL = {
    "none": "one device, or copies of the model",
    "pipeline": "the blocks are split between devices",
    "context": "the tokens are split between devices",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One question."""

    goal: str = "quality"
    target: Target = field(default_factory=sized)
    tokens: int = 2048
    parallel: str = "none"
    checkpoint: bool = False
    """A trained model exists and must not change its answers before it is trained on."""
    memory: float | None = None
    """The most activation memory, in multiples of the standard network's; None for no limit."""
    latency: float | None = None
    """The most time a token, in multiples of the standard network's."""

    def __post_init__(self) -> None:
        for name, known in (("goal", GOALS), ("parallel", PARALLEL)):
            if getattr(self, name) not in known:
                raise ValueError(f"--{name} is {', '.join(known)}, not {getattr(self, name)!r}")
        if self.tokens < 1:
            raise ValueError(f"--context {self.tokens} must be at least 1 token")
        for name in ("memory", "latency"):
            limit = getattr(self, name)
            if limit is not None and not limit >= 1:
                raise ValueError(f"--{name} must be at least 1 (a multiple of the standard network's), not {limit:g}")

    def to_json(self) -> dict[str, object]:
        """Plain values."""
        return {
            "goal": self.goal,
            "model": self.target.config.to_json(),
            "context": self.tokens,
            "parallel": self.parallel,
            "checkpoint": self.checkpoint,
            "memory": self.memory,
            "latency": self.latency,
        }
