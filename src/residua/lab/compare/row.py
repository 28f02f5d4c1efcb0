"""A row of a comparison's table, and a run that broke."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from residua.lab.common.files import Record, Values
from residua.lab.common.stats import ALPHA, Difference, Spread

Broken = Record
"""A run that diverged: its folder, row and rate, and the step, site and message of the break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One design in one layout at one size."""

    label: str
    design: str
    layout: str
    size: str
    baseline: bool
    parameters: int
    stream_parameters: int
    mlp_width: int
    rates: Mapping[str, float]
    trials: int
    """Tuning runs that chose the rates."""
    edge: bool
    """The chosen rate is the smallest or largest of its grid: a better one may lie outside."""
    loss: Spread
    perplexity: Spread
    bits_per_byte: Spread
    difference: Difference | None
    """Of the validation loss from the baseline's; None for the baseline itself."""
    loss_at_equal_time: Spread | None
    """None where the runs of the table were made on several kinds of hardware."""
    speed: float | None
    """Tokens per processor second, over the baseline's; None where a clock did not move."""
    memory: float | None
    """Peak memory over the baseline's; both only of seeds on hardware of one kind."""
    hardware: str
    """What its seeds ran on, every kind once; empty where the runs do not say."""
    build: str
    """The torch and the kernels that its seeds were made with, every build once; empty where the runs do not say."""
    gradient_norm: float | None
    """The largest of any update of any seed, before clipping; None where the runs do not say."""
    spikes: int
    """Loss spikes over all seeds, as `lab.updates` counts them."""
    stable_rate: Mapping[str, float | bool] | None
    """The largest learning rate up to which every rate of the grid is stable; `open`: the grid ends there."""
    adjusted: float | None
    """The p-value of the difference, corrected for all rows of the table and for every look; None for a baseline."""
    speedup: Mapping[str, Record | None] | None
    """Effective speedup per token and per processor second; None for a baseline, and where there is no ladder."""
    routing: Mapping[str, float | None]
    """Means over seeds and sites; `deep_` those of the last third of the network."""

    def to_json(self) -> Values:
        """Plain values, with the verdict that the interval gives."""
        values = asdict(self)
        if self.difference is not None:
            values["difference"]["significant"] = None if self.adjusted is None else self.adjusted <= ALPHA
        return values
