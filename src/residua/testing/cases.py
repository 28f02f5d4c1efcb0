"""What the laws run over: a small model of every design, option and layout; and the tolerances they are judged by."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from residua.model import ModelConfig, Transformer
from residua.options import options_of
from residua.registry import build, design, names, wrappers
from residua.runner import Execution
from residua.spec import parse, render

TOLERANCE = {
    torch.float64: (1e-12, 1e-11),
    torch.float32: (2e-6, 5e-6),
    torch.bfloat16: (6e-3, 1e-2),
}
"""RMS error over RMS reference allowed to the values and the gradients of an op, by type."""


PLAIN = Execution(group=0)
GROUPED = Execution(least=0)
"""Every read for itself, and reads together, however few the tokens."""


def error(actual: Tensor, expected: Tensor) -> float:
    """RMS(actual - expected) / RMS(expected), in float64; infinite where either is not finite."""
    actual, expected = actual.detach().double(), expected.detach().double()
    if actual.shape != expected.shape:
        raise AssertionError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    if not (actual.isfinite().all() and expected.isfinite().all()):
        return math.inf
    gap, size = (actual - expected).square().mean().sqrt(), expected.square().mean().sqrt()
    return 0.0 if gap == 0 else (gap / size).item()


def assert_close(actual: Tensor, expected: Tensor, what: str = "values", *, gradient: bool = False) -> None:
    """Fail where the error exceeds the table's row for the narrower of the two types."""
    dtype = min(actual.dtype, expected.dtype, key=lambda one: one.itemsize)
    found, allowed = error(actual, expected), TOLERANCE[dtype][gradient]
    assert found <= allowed, f"{what}: relative error {found:.3g}, allowed {allowed:.3g}"


@dataclass(frozen=True)
class Case:
    """A design with its options in one layout."""

    spec: str
    layout: str = "attn,mlp"
    causal: bool = True

    def __str__(self) -> str:
        return f"{self.spec}-{self.layout}{'' if self.causal else '-encoder'}"

    def config(self, **changes: Any) -> ModelConfig:
        """A model small enough to check thoroughly: 3 blocks of width 16."""
        settings: dict[str, Any] = {
            "vocab": 23, "width": 16, "depth": 3, "heads": 2, "kv_heads": 1, "mlp_width": 24, "init_std": 0.3,
            "layout": self.layout, "design": self.spec, "causal": self.causal,
        }  # fmt: skip
        return ModelConfig(**(settings | changes))

    def model(self, *, moved: bool = True, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
        """The model in float64; `moved`: every parameter of the stream away from its start."""
        model = Transformer(self.config(**changes), seed=1)
        if moved:
            generator = torch.Generator().manual_seed(2)
            with torch.no_grad():
                for parameter in model.stream.parameters():
                    parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        return model.to(dtype)


def ids(rows: int = 2, tokens: int = 9) -> Tensor:
    """Token ids, the same at every call."""
    return torch.randint(23, (rows, tokens), generator=torch.Generator().manual_seed(3))


LAYOUTS = (
    ("attn,mlp", True),
    ("swa:window=3,attn,mlp", True),
    ("conv,attn,canon,swa:window=4:mode=local,mlp", True),
    ("attn,mlp", False),
    ("attn,mlp,loop:passes=2:blocks=1..", True),
)
"""The layouts, and whether causal, that every design is checked in: every sublayer kind, an encoder, and a loop."""


def specs(name: str) -> list[str]:
    """The spec strings of a design's own cases."""
    return [render(name, parse(f"{name}:{case}")[1]) if case else name for case in design(name).cases]


def cases(*only: str) -> list[Case]:
    """Every option case of every design (or of those named) in the first layout, and in each other layout one case of
    every way in which the design's cases meet it, the default first. Without names, also the cases of every wrapper.

    Options act inside the stream and a layout outside it, so that their product says most things several times.
    """
    families = [specs(name) for name in only or names()]
    families += [] if only else [list(wrapper.cases) for wrapper in wrappers().values()]
    found = [Case(spec, *LAYOUTS[0]) for family in families for spec in family]
    for family in families:
        for layout in LAYOUTS[1:]:
            told: dict[object, Case] = {}
            for case in (Case(spec, *layout) for spec in family):
                told.setdefault(meeting(case), case)
            found += told.values()
    return found


def meeting(case: Case) -> object:
    """All that passes between a design and a layout: whether tokens are mixed, how many lanes each site is fed, which
    sites mix or have no norm of the backbone's, and sources of which kinds (their names without numbers)."""
    # real parameters, for they are few, and the meta device takes four times as long
    with torch.random.fork_rng(devices=[]):
        stream = build(case.spec, case.config().plan)
    sites = [(stream.feeds(site), stream.takes_norm(site), stream.sources(site)) for site in stream.plan.readers]
    kinds = frozenset(re.sub(r"\d+", "", source) for *_, sources in sites for source in sources)
    return stream.mixes_tokens, tuple((*rest, bool(sources)) for *rest, sources in sites), kinds


def uncovered(name: str) -> list[str]:
    """Option values of a design that none of its cases uses: both values of a bool, every word of a choice, and
    one value other than the default of a number."""
    given = [parse(spec)[1] for spec in specs(name)]
    missing = []
    for key, option in options_of(design(name)).items():
        used = {values.get(key, option.default) for values in given}
        wanted = option.choices or ((True, False) if option.kind is bool else ())
        missing += [f"{key}={value}" for value in wanted if value not in used]
        if not wanted and not used - {option.default}:
            missing.append(f"{key} other than {option.default}")
    return missing
