"""What came out of a run: result.json, written last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from residua.lab.common.expect import expect
from residua.lab.common.files import Record, Values

RESULT = {
    **dict.fromkeys(("design", "config", "fingerprint", "checkpoint"), str),
    **dict.fromkeys(("parameters", "stream_parameters", "steps", "tokens"), int),
    **dict.fromkeys(("passes", "loss", "perplexity", "bits_per_byte"), float),
    "time": dict.fromkeys(("seconds", "cpu_seconds", "tokens_per_second", "peak_memory"), float),
    "execution?": [str],
}
"""What result.json holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came out. Everything but `time` is the same for every run of the config on one machine."""

    design: str
    config: str
    """The config's digest."""
    fingerprint: str
    """Of the data."""
    parameters: int
    stream_parameters: int
    """Those of the residual design."""
    steps: int
    tokens: int
    passes: float
    """How often the tokens seen are the training split."""
    loss: float
    """Nats per token of the validation set, as are the next two."""
    perplexity: float
    bits_per_byte: float
    checkpoint: str
    """The last one, below the run directory."""
    time: Mapping[str, float]
    """Seconds and processor seconds of all updates, tokens per second over them, bytes of memory at the peak."""
    execution: Sequence[str] = ()
    """What made the updates: backend, kernels, instructions, threads, torch. Several texts of a run that was resumed
    with others than it began with: its last bits are then those of no single machine."""

    def to_json(self) -> Values:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Record, where: object = "a result") -> Result:
        """The inverse; a wrong or missing field is an error that names it, and `where`."""
        expect(where, values, RESULT)
        if unknown := set(values) - {field.name for field in fields(cls)}:
            raise ValueError(f"{where} has {', '.join(sorted(unknown))}, which a result does not; of another version?")
        return cls(**values)
