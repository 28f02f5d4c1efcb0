"""Everything that shapes a model, in one frozen dataclass that goes into JSON and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

from residua.plan import Plan, Slot, parse_layout, split_loop
from residua.spec import Spec

MOST_PARAMETERS = 10**13
"""Of a model that is built, be it on no device at all: ten times the largest that anybody has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A Transformer of `depth` equal blocks of the sublayers in `layout`, whose stream is `design`."""

    vocab: int
    width: int = 128
    depth: int = 6
    heads: int = 4
    kv_heads: int | None = None
    """Key and value heads, shared by groups of query heads (GQA); as many as `heads` by default."""
    mlp_width: int | None = None
    """The hidden width of the SwiGLU MLP; 8/3 of the width, rounded up to a multiple of 16, by default."""
    layout: str = "attn,mlp"
    design: Spec = "standard"
    causal: bool = True
    """False makes an encoder: attention looks both ways."""
    qk_norm: bool = False
    """RMS-normalise queries and keys of every head."""
    rope_base: float = 10_000.0
    lane_norms: str = "shared"
    """`separate` gives q, k and v a norm of their own where a design feeds them apart (MUDD, DCA)."""
    tied: bool = True
    """The head's matrix is the embedding."""
    eps: float = 1e-9
    """RMSNorm epsilon. Small, because a design that starts by averaging n sources reads a stream n times too small;
    the model refuses an eps that would show."""
    init_std: float | None = None
    """Of every matrix; 0.5 / sqrt(width) by default, which is 0.02 at width 625. Matrices that write to the stream are
    divided by sqrt(number of sublayers)."""

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "depth", "heads", "kv_heads", "mlp_width"):
            value = getattr(self, name)
            if value is None and name in ("kv_heads", "mlp_width"):
                continue
            if not isinstance(value, Integral) or isinstance(value, bool):
                raise ValueError(f"{name} is a whole number, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        for name in ("rope_base", "eps", "init_std"):
            value = getattr(self, name)
            if name == "init_std" and value is None:
                continue
            if not isinstance(value, Real) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"{name} is a finite number, not {value!r}")
        for name, kind in (("layout", str), ("design", (str, Mapping)), ("lane_norms", str)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} is text, not {getattr(self, name)!r}")
        for name in ("causal", "qk_norm", "tied"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is true or false, not {getattr(self, name)!r}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} does not split into {self.heads} heads; choose a divisor")
        if (self.width // self.heads) % 2:
            raise ValueError(f"rotary positions need an even head width, not {self.width // self.heads}; change heads")
        if self.heads % self.shared_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.lane_norms not in ("shared", "separate"):
            raise ValueError(f"lane_norms must be shared or separate, not {self.lane_norms!r}")
        if self.eps < 0 or self.start_std <= 0:
            raise ValueError("eps must not be negative and init_std must be positive")
        if self.rope_base <= 0:
            raise ValueError(f"rope_base must be a positive number, not {self.rope_base}")
        _ = self.plan
        if self.least_parameters > MOST_PARAMETERS:
            raise ValueError(
                f"width {self.width:,}, depth {self.depth:,} and vocab {self.vocab:,} make a model of at least "
                f"{self.least_parameters:.2g} parameters; at most {MOST_PARAMETERS:.0e} are built"
            )

    @property
    def shared_heads(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def start_std(self) -> float:
        """Of every matrix at the start. A fixed 0.02 leaves narrow models asleep: at width 64 a run that reaches 2.41
        nats with this one is at 3.15 after the same 150 steps."""
        return 0.5 * self.width**-0.5 if self.init_std is None else self.init_std

    @property
    def hidden(self) -> int:
        """The MLP's hidden width."""
        return self.mlp_width or -(-8 * self.width // 48) * 16

    @property
    def least_parameters(self) -> int:
        """Those of the embedding and of the matrices of attention and MLPs: counted at once, without building them."""
        own = {"attn": 2 * self.width * (self.width + self.shared_heads * (self.width // self.heads))}
        own |= {"swa": own["attn"], "mlp": 3 * self.width * self.hidden}
        return self.vocab * self.width + self.depth * sum(own.get(slot.kind, 0) for slot in self.slots)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The sublayers of one block, with their options."""
        return parse_layout(split_loop(self.layout)[0])

    @property
    def plan(self) -> Plan:
        """Every site of the model."""
        return _plan(self.width, self.depth, self.layout, self.vocab, (self.shared_heads, self.width // self.heads))

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The inverse; an unknown field is an error that names it."""
        unknown = set(values) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(f"unknown model fields: {', '.join(sorted(unknown))}")
        return cls(**values)


@lru_cache(maxsize=64)
def _plan(width: int, depth: int, layout: str, vocab: int, kv: tuple[int, int]) -> Plan:
    """Made once: a comparison asks for the plans of its few sizes tens of thousands of times."""
    return Plan.regular(width, depth, layout, vocab=vocab, kv=kv)
