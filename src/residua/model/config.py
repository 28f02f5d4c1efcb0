"""Everything that shapes a model, in one frozen dataclass that goes into JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from residua.plan import Plan, Slot, parse_layout, split_loop
from residua.spec import Spec


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
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
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
        _ = self.plan

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
    def slots(self) -> tuple[Slot, ...]:
        """The sublayers of one block, with their options."""
        return parse_layout(split_loop(self.layout)[0])

    @property
    def plan(self) -> Plan:
        """Every site of the model."""
        kv = self.shared_heads, self.width // self.heads
        return Plan.regular(self.width, self.depth, self.layout, vocab=self.vocab, kv=kv)

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
