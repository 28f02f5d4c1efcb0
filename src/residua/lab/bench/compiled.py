"""A training step under torch.compile over the same step in eager mode, design by design.

Three forms of one model take turns: eager; compiled, with the kernels as operators of the graph; and, for the first
design that calls a kernel, compiled without them, from the references, which Inductor fuses as it likes. The control is
the eager step against itself. A graph takes much longer to make than to run, and a deeper model repeats its kernels: a
few blocks stand for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from residua import ops
from residua.lab.bench.timing import Form, Measured, interleave
from residua.model import ModelConfig, Transformer, token_loss
from residua.native.library import counted

EAGER, COMPILED, FUSED = "eager", "compiled", "fused"


def forms(design: str, depth: int, width: int, rows: int, tokens: int) -> dict[str, Form]:
    """Forward and backward of a language model's loss, in the three forms."""
    torch._dynamo.reset()  # one function is compiled for few models before dynamo gives up
    config = ModelConfig(vocab=1024, width=width, depth=depth, heads=max(1, width // 64), design=design)
    model = Transformer(config)
    ids = torch.randint(config.vocab, (rows, tokens + 1), generator=torch.Generator().manual_seed(0))

    def step(form: Callable[..., torch.Tensor], backend: str) -> Form:
        def run() -> None:
            model.zero_grad(set_to_none=True)
            with ops.backend(backend):
                token_loss(form(ids[:, :-1]), ids[:, 1:]).backward()

        return run

    whole: Any = torch.compile(model, fullgraph=True, dynamic=False)
    fused: Any = torch.compile(model, fullgraph=True, dynamic=False)
    return {EAGER: step(model, "auto"), COMPILED: step(whole, "auto"), FUSED: step(fused, "reference")}


def compiled(
    designs: Sequence[str], depth: int, width: int, rows: int, tokens: int, tell: Callable[[str], None]
) -> Iterator[tuple[str, dict[str, Form]]]:
    """The forms that are timed of every design, each after its first run, which compiles it."""
    known = set[str]()
    for name in designs:
        tell(f"compiling {name}")
        named = forms(name, depth, width, rows, tokens)
        with counted() as calls:
            named[EAGER]()
        if not calls.keys() - known:
            named.pop(FUSED)
        known |= calls.keys()
        for form in named.values():
            form()
        yield name, named


def measure(
    designs: Sequence[str],
    *,
    depth: int,
    width: int,
    rows: int,
    tokens: int,
    seconds: float,
    pairs: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Measured:
    """Compiled over eager and fused over eager, each design in an interleaved run of its own."""
    found = []
    for name, named in compiled(designs, depth, width, rows, tokens, tell):
        with counted() as calls:
            named[COMPILED]()
        timing = interleave(named, controlled=EAGER, seconds=seconds, least=pairs)
        ratios = {form: timing.ratio(EAGER, form, EAGER).to_json() for form in named if form != EAGER}
        found.append(
            {"design": name, "seconds": timing.typical(EAGER), "kernel_calls": sum(calls.values()), "ratios": ratios}
        )
    return {"depth": depth, "width": width, "rows": rows, "tokens": tokens, "designs": found}
