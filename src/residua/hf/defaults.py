"""How a design enters a trained network: the options with which it starts as that network.

Training from scratch keeps each paper's own start. A conversion fills in these options where the spec does not give
them; what then does not start as the base is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from residua.plan import Plan
from residua.registry import build, design
from residua.spec import Spec, Value, parse, render_value
from residua.stream import Stream

BOUND = 1e-5
"""max |difference of a logit| / RMS of the logits, in float32, that counts as the same network."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One design's way in."""

    options: Mapping[str, Value] = field(default_factory=dict)
    exact: bool = False
    """A gate is zero: not one bit may differ."""
    eps: bool = False
    """The norms see the stream times a constant, and forget it but for their eps: the bound is widened by what that
    eps explains, eps / (2 rms^2), measured on the same batches."""
    refusal: str | None = None


ENTRIES: Mapping[str, Entry] = MappingProxyType(
    {
        "standard": Entry(exact=True),
        "denseformer": Entry(exact=True),
        "mudd": Entry(exact=True),
        "dca": Entry(),
        "attnres": Entry({"total": True}),
        "delta": Entry({"gate": "alpha"}, exact=True),
        "ddl": Entry({"start": "standard"}, exact=True),
        "depthswa": Entry({"enter": "add", "gate": "alpha"}, exact=True),
        "hyper": Entry(eps=True),
        "mhc": Entry(eps=True),
        "elc": Entry(
            refusal="its layers never add what they read to what they make, so that no setting of its weights is the "
            "base network, and a gate would be another design; train it from scratch"
        ),
        "vertical": Entry(
            refusal="it mixes normalised layer outputs, whose scale the base's residual sum needs, so that no setting "
            "of its weights is the base network; train it from scratch"
        ),
    }
)
"""Designs of other packages may be missing: they enter with the options given, if they start as the base."""


def entry(spec: Spec, plan: Plan) -> tuple[Stream[Any], Entry]:
    """The design as it enters a trained network, with what is expected of its start."""
    name, options = parse(spec)
    design(name)  # an unknown one is said to be unknown, and not refused
    found = ENTRIES.get(name, Entry())
    if found.refusal is not None:
        raise ValueError(f"{name} cannot enter a trained network: {found.refusal}")
    stream = build(_filled(name, options, found), plan)
    if stream.starts == "no":
        raise ValueError(
            f"{stream.spec} does not start as the base network, and converting to it would spoil the model"
            + _cure(name, options, found, plan)
        )
    exact = found.exact and stream.starts == "standard"
    return stream, Entry(found.options, exact, found.eps or stream.starts == "eps")


def _filled(name: str, options: Mapping[str, Value], found: Entry) -> dict[str, Any]:
    """The design with what its entry adds to the options given."""
    added = {key: value for key, value in found.options.items() if key not in options}
    if name == "delta" and options.get("centered"):
        added.pop("gate", None)  # centred reads add nothing at the start
    return {"name": name, **options, **added}


def _cure(name: str, options: Mapping[str, Value], found: Entry, plan: Plan) -> str:
    """The option to leave out, where one alone is the reason; those that an entry sets come first."""
    for key in sorted(options, key=lambda each: each not in found.options):
        rest = {each: value for each, value in options.items() if each != key}
        try:
            starts = build(_filled(name, rest, found), plan).starts
        except ValueError:
            continue
        if starts != "no":
            instead = f", which is {render_value(found.options[key])} in a conversion" if key in found.options else ""
            return f"; leave out {key}{instead}"
    return ""
