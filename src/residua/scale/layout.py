"""dp=2,fsdp=4: how the processes of a run are laid out, checked in one go before anything starts.

    pp    stages of whole blocks, one after the other
    dp    whole copies of the model, each on rows of its own
    fsdp  one copy, of which every process keeps a piece; each process has rows of its own
    tp    matrices are split, and the stream over tokens; these processes share their rows

The last axis changes fastest: neighbours in rank, which the fastest links connect, are neighbours in tp.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Self

from residua.model import ModelConfig, measure

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp", "fsdp", "tp")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
"""Of pipelines: what `residua.scale.schedules` has engines for."""

STATE_BYTES = 16
"""Of a parameter in training: itself, its gradient and the two moments of AdamW, in float32."""
ACTIVATION_FLOATS = 24
"""Numbers that a block keeps of a token for its backward pass, in widths: a coarse figure, for `choose` alone."""
USABLE = 0.85
"""The part of a device's memory that a plan may fill."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipes:
    """How a step runs through the stages of `pp`; without it, nothing is asked of this."""

    schedule: str = "1f1b"
    """One of `SCHEDULES`."""
    microbatches: int | None = None
    """Parts of a step's rows on one copy of the model; None: chosen by `residua.scale.schedules.settled`."""
    virtual: int | None = None
    """Stages on a rank; None: 2 where the schedule allows several, and 1 elsewhere."""

    def __str__(self) -> str:
        return f"{self.schedule}, {self.microbatches} micro-batches, {self.virtual} stages a rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How many processes stand along each axis."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1
    pp: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """`dp=2,fsdp=4` as a layout; an axis that is not named is 1."""
        found: dict[str, int] = {}
        for part in filter(None, text.split(",")):
            axis, _, count = (piece.strip() for piece in part.partition("="))
            if axis not in AXES or axis in found or not count.isdigit() or int(count) < 1:
                raise ValueError(
                    f"parallel {text!r}: {part!r} is not one of {', '.join(f'{axis}=N' for axis in AXES)}, each "
                    "once and N at least 1; write such as dp=2,fsdp=4, or auto"
                )
            found[axis] = int(count)
        return cls(**found)

    def __str__(self) -> str:
        return ",".join(f"{axis}={count}" for axis, count in self.to_json().items() if count > 1) or "dp=1"

    def to_json(self) -> dict[str, int]:
        """The axes, outermost first."""
        counts = asdict(self)
        return {axis: counts[axis] for axis in AXES}

    @property
    def ranks(self) -> int:
        """Processes in all."""
        return self.pp * self.dp * self.fsdp * self.tp

    @property
    def copies(self) -> int:
        """Groups of processes that have rows of their own."""
        return self.dp * self.fsdp

    def copy_of(self, rank: int) -> int:
        """Which of the `copies` a rank works for."""
        return rank // self.tp % self.copies

    @property
    def sharded(self) -> bool:
        """Whether a process holds a part of the model: pieces of parameters, or some of the blocks."""
        return self.fsdp > 1 or self.tp > 1 or self.pp > 1

    def check(self, model: ModelConfig, ranks: int, *, batch: int | None = None, context: int | None = None) -> None:
        """Refuse what cannot be, all of it in one error."""
        wrong = []
        if self.ranks != ranks:
            product = " x ".join(f"{axis} {count}" for axis, count in self.to_json().items() if count > 1) or "1"
            wrong.append(f"{product} is {self.ranks} processes and {ranks} were started")
        if self.pp > model.depth:
            wrong.append(f"pp={self.pp} asks for more stages than there are blocks, {model.depth}")
        if batch is not None and batch % self.copies:
            wrong.append(f"batch {batch} does not split over dp x fsdp = {self.copies}; choose a multiple")
        if self.tp > 1:
            kept = model.shared_heads
            if model.heads % self.tp or kept % self.tp:
                wrong.append(f"tp={self.tp} does not divide the {model.heads} heads and {kept} key heads")
            if context is not None and context % self.tp:
                wrong.append(f"tp={self.tp} does not divide the context of {context} tokens")
        if self.pp > 1 and self.tp > 1:
            wrong.append("pp and tp together are not supported; use pp with fsdp or dp")
        if self.pp > 1 and model.plan.loop is not None:
            wrong.append("blocks that repeat cannot be cut into stages; drop pp, or loop from the layout")
        if wrong:
            raise ValueError(f"parallel {self}: {'; '.join(wrong)}")

    def mesh(self, device: str = "cpu") -> DeviceMesh:
        """The mesh of all axes, in the process group that there is: `mesh["fsdp"]`, `mesh["dp", "fsdp"]`, ..."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh(device, tuple(self.to_json().values()), mesh_dim_names=AXES)


def choose(model: ModelConfig, ranks: int, memory: int, *, rows: int, context: int) -> tuple[Parallel, str]:
    """A layout of `ranks` processes with `memory` bytes each, and why: as little sharding as fits.

    rows: of the global batch, of which every process has its share. The estimate is coarse on purpose; `residua cost`
    has the careful one.
    """
    sizes = measure(model, context)
    state = STATE_BYTES * sizes.parameters
    share = -(-rows // ranks)
    largest = max(sizes.state_floats.values())
    kept = 4 * share * context * (ACTIVATION_FLOATS * model.width * model.depth + 2 * largest + 2 * model.vocab)
    room = USABLE * memory
    gib = 2.0**30
    why = (
        f"{sizes.parameters:,} parameters are {state / gib:.2f} GiB with gradients and moments, activations about "
        f"{kept / gib:.2f} GiB, and a process has {memory / gib:.2f} GiB"
    )
    fitting = [n for n in range(1, ranks + 1) if ranks % n == 0 and state / n + kept <= room]
    if not fitting:
        return Parallel(fsdp=ranks), f"{why}: not even fsdp={ranks} is sure to fit, and nothing shards more"
    least = fitting[0]
    chosen = Parallel(dp=ranks // least, fsdp=least)
    said = "every process can hold a copy" if least == 1 else f"pieces of 1/{least} are the largest that fit"
    return chosen, f"{why}: {said}, so {chosen}"
