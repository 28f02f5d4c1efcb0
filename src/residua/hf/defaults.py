"""How a design enters a trained network: with the options that its `conversion` declares.

Training from scratch keeps each paper's own start. A conversion fills in those options where the spec does not give
them; what then does not start as the base is refused, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from residua.plan import Plan
from residua.registry import build, design
from residua.spec import Spec, Value, parse, render_value
from residua.stream import Conversion, Stream

BOUND = 1e-5
"""max |difference of a logit| / RMS of the logits, in float32, that counts as the same network."""


def entry(spec: Spec, plan: Plan) -> tuple[Stream, Conversion]:
    """The design as it enters a trained network, with what is expected of its start."""
    name, options = enterable(spec)
    cls, found = design(name), design(name).conversion
    stream = build({"name": name, **cls.entering(options)}, plan)
    if stream.starts == "no":
        raise ValueError(
            f"{stream.spec} does not start as the base network, and converting to it would spoil the model"
            + _cure(cls, options, plan)
        )
    return stream, replace(
        found, exact=found.exact and stream.starts == "standard", eps=found.eps or stream.starts == "eps"
    )


def enterable(spec: Spec) -> tuple[str, dict[str, Value]]:
    """The name and options of a design that may enter: what is wrong with it whatever the model is said here."""
    name, options = parse(spec)
    name, options = design(name).upgraded(options)
    refusal = design(name).conversion.refusal
    if refusal is not None:
        raise ValueError(f"{name} cannot enter a trained network: {refusal}")
    return name, options


def _cure(cls: type[Stream], options: Mapping[str, Value], plan: Plan) -> str:
    """The option to leave out, where one alone is the reason; those that the conversion sets come first."""
    set_here = cls.conversion.options
    for key in sorted(options, key=lambda each: each not in set_here):
        rest = {each: value for each, value in options.items() if each != key}
        try:
            starts = build({"name": cls.name, **cls.entering(rest)}, plan).starts
        except ValueError:
            continue
        if starts != "no":
            instead = f", which is {render_value(set_here[key])} in a conversion" if key in set_here else ""
            return f"; leave out {key}{instead}"
    return ""
