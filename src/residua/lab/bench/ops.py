"""One op against its public, plain and compiled forms: ratios, share of the memory bandwidth, growth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from residua.lab.bench.cases import COMPILED, OURS, PLAIN, PUBLIC, OpCase
from residua.lab.bench.device import current
from residua.lab.bench.timing import Form, Measured, Timing, exponent, interleave
from residua.testing import error

READ = "plain read"
AGREEMENT = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float64: 1e-12}
"""How far the output of another form may lie from ours (RMS over RMS) to count as the same op."""


def measure(case: OpCase, seconds: float) -> Measured:
    """Every form of a case, forward and forward + backward, each in one interleaved run."""
    _agree(case)
    forward, both = (_run(case, how, seconds) for how in (case.forward, case.both))
    row: Measured = {
        "op": case.op,
        **case.shape,
        "forward": _summary(case, forward),
        "both": _summary(case, both),
    }
    if case.traffic[0]:
        row["bandwidth"] = _bandwidth(case, forward, both)
    return row


def compile(case: OpCase) -> None:
    """Run the compiled form of a case once, which leaves it in Inductor's cache for `measure`."""
    if COMPILED in case.forms:
        case.forward(COMPILED)()
        case.both(COMPILED)()


def growth(rows: Sequence[Measured], over: str) -> dict[str, float] | None:
    """The exponents of our forward and forward + backward time in `over`, at the widest shape that varies in it.

    `over` is a key of the shape (tokens, n). None where the rows do not vary in it, or do not have it.
    """
    if not rows or over not in rows[0]:
        return None
    fixed = [key for key in ("tokens", "width", "n", "window") if key in rows[0] and key != over]
    last = {key: rows[-1][key] for key in fixed}
    alike = [row for row in rows if all(row[key] == last[key] for key in fixed)]
    sizes = [row[over] for row in alike]
    if len(set(sizes)) < 2:
        return None
    return {phase: exponent(sizes, [row[phase]["seconds"][OURS] for row in alike]) for phase in ("forward", "both")}


def _run(case: OpCase, how: Callable[[str], Form], seconds: float) -> Timing:
    # a sum over as many bytes as the forward reads: the fastest this core gets data at that moment
    read = torch.ones(_read_bytes(case) // 4, device=current()).sum
    return interleave({form: how(form) for form in case.forms} | {READ: read}, controlled=OURS, seconds=seconds)


def _summary(case: OpCase, timing: Timing) -> Measured:
    return {
        "seconds": {form: timing.typical(form) for form in case.forms},
        "ratios": {
            form: timing.ratio(OURS, form, OURS).to_json() for form in (PUBLIC, PLAIN, COMPILED) if form in case.forms
        },
    }


def _read_bytes(case: OpCase) -> int:
    return max(1 << 22, int(case.traffic[0] * case.unit))


def _bandwidth(case: OpCase, forward: Timing, both: Timing) -> dict[str, float]:
    """Least traffic over time, as a share of the plain read of the same run; the backward is the difference."""
    speed = [_read_bytes(case) / timing.typical(READ) for timing in (forward, both)]
    backward = both.typical(OURS) - forward.typical(OURS)
    return {
        "read_gigabytes_a_second": speed[0] / 1e9,
        "forward_share": case.traffic[0] * case.unit / forward.typical(OURS) / speed[0],
        "backward_share": case.traffic[1] * case.unit / max(backward, 1e-9) / speed[1],
    }


def _agree(case: OpCase) -> None:
    with torch.no_grad():
        ours = case.forms[OURS]()
        for form, run in case.forms.items():
            found = error(case.same.get(form, lambda y: y)(run()), ours)
            if found > AGREEMENT[ours.dtype]:
                raise RuntimeError(f"{case.label()}: the {form} form differs from ours by {found:.1e}; not the same op")
