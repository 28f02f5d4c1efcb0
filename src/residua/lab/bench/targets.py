"""The bars that the fast path was built to, each beside what the committed files say: met, missed or not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from residua.lab.bench import record
from residua.lab.bench.cases import PUBLIC, parse_shape
from residua.lab.bench.table import Sheet
from residua.lab.bench.timing import Measured


class Target(NamedTuple):
    """A quantity, its bar, and where the files hold it: a share, ratio, exponent or time."""

    what: str
    bar: float
    at_least: bool
    find: Callable[[Measured], float]
    unit: str = "x"

    def met(self, found: float) -> bool:
        """Whether the bar is kept."""
        return found >= self.bar if self.at_least else found <= self.bar


class NotResolved(Exception):
    """The files hold a quantity that its control does not resolve."""


def gathered(folder: Path) -> Measured:
    """The files of a folder as one; several of `ops` are one list of rows."""
    found: Measured = {}
    for file in sorted(folder.glob("*.json")):
        measured = record.read(file)
        if "ops" in measured and "ops" in found:
            found["ops"]["rows"] += measured["ops"]["rows"]
            found["ops"]["growth"] |= measured["ops"]["growth"]
        else:
            found |= measured
    return found


def judged(files: Measured) -> Sheet:
    """Every bar, as a table."""
    rows = []
    for target in targets():
        sign = ">=" if target.at_least else "<="
        row = [target.what, f"{sign} {target.bar:g}{target.unit}"]
        try:
            found = target.find(files)
        except KeyError:
            rows.append([*row, "-", "not measured"])
            continue
        except NotResolved:
            rows.append([*row, "n.r.", "not resolved"])
            continue
        rows.append([*row, f"{found:.3g}{target.unit}", "met" if target.met(found) else "missed"])
    return Sheet("The bars", ["what", "bar", "measured", ""], rows, [])


def targets() -> Iterator[Target]:
    """The bars, in the order of the document that sets them."""
    for shape in ("2048x256", "4096x512"):
        yield Target(f"one read f+b, float32, n=24, {shape}", 30, True, _read(shape, 24))
    for shape in ("2048x256", "4096x512"):
        for n in (4, 8, 16, 32, 64):
            yield Target(f"one read f+b, float32, n={n}, {shape}", 25, True, _read(shape, n))
    for shape in ("2048x256", "4096x512"):
        yield Target(f"one read f+b, bfloat16, n=24, {shape}", 40, True, _read(shape, 24, "bfloat16"))
    for phase, bar in (("forward", 60.0), ("backward", 75.0)):
        yield Target(f"{phase} of a plain read's bandwidth, 4096x512, n=24", bar, True, _bandwidth(phase), " %")
    yield Target("all reads of 48 blocks, full", 50, True, _at("stack", "rows", -1, "ratios", "delta", "value"))
    yield Target("their growth with depth", 1.6, False, _at("stack", "growth", "delta"), "")
    yield Target("growth at blocks=4", 1.05, False, _at("stack", "growth", "delta:blocks=4"), "")
    for design, bar, alone in (("attnres:blocks=4", 1.05, 1.04), ("delta:blocks=4", 1.05, 1.04), ("delta", 1.15, 1.08),
                               ("ddl", 1.10, None), ("ddl:channels=4", 1.25, None)):  # fmt: skip
        yield Target(f"training step, {design}, less the control", bar, False, _step(design))
        if alone is not None:
            yield Target(f"its machinery, {design}, where no step is resolved", alone, False, _machinery(design))
    for design, bar in (("attnres:blocks=4", 1.10), ("delta:blocks=4", 1.10), ("delta", 1.20)):
        yield Target(f"peak memory at 48 blocks, {design}", bar, False, _memory(design))
        yield Target(f"its growth, {design}", 1.05, False, _at("memory", "growth", design), "")
    for phase, label, bar in (("forward", "forward, over masked SDPA", 25), ("both", "f+b", 8)):
        window = _op("window_attend", phase, "ratios", PUBLIC, tokens=8192, window=128)
        yield Target(f"window 128 at 8192 tokens, {label}", bar, True, _resolved(window))
    for phase in ("forward", "both"):
        grown = _at("ops", "growth", "window_attend float32", 1, phase)
        yield Target(f"growth of the window with tokens, {phase}", 1.05, False, grown, "")
    ring = _at("decode", "ring", "over_shortest", "32768", "value")
    yield Target("ring decode after 32k tokens over 1k", 1.1, False, ring)
    yield Target("a read at decode", 60, False, _at("decode", "read", "microseconds", "residua"), " us")
    yield Target(
        "decode of a converted Llama, delta:blocks=4, speed over the base", 0.95, True,
        lambda files: 1 / files["decode"]["converted"]["over_base"]["delta:blocks=4"]["value"],
    )  # fmt: skip


def _at(*keys: str | int) -> Callable[[Measured], float]:
    """The number under these keys."""

    def find(files: Any) -> float:
        return reduce(getitem, keys, files)

    return find


def _op(op: str, *keys: str, **asked: object) -> Callable[[Measured], Any]:
    """What lies under these keys in the row of an op."""

    def find(files: Measured) -> Any:
        for row in files["ops"]["rows"]:
            if row["op"] == op and all(row.get(key) == value for key, value in asked.items()):
                return reduce(getitem, keys, row)
        raise KeyError(op)

    return find


def _resolved(find: Callable[[Measured], Measured]) -> Callable[[Measured], float]:
    def resolved(files: Measured) -> float:
        ratio = find(files)
        if not ratio["resolved"]:
            raise NotResolved
        return float(ratio["value"])

    return resolved


def _read(shape: str, n: int, dtype: str = "float32") -> Callable[[Measured], float]:
    tokens, width = parse_shape(shape)
    return _resolved(_op("attend", "both", "ratios", PUBLIC, n=n, dtype=dtype, tokens=tokens, width=width))


def _bandwidth(phase: str) -> Callable[[Measured], float]:
    share = _op("attend", "bandwidth", f"{phase}_share", n=24, dtype="float32", tokens=4096, width=512)
    return lambda files: 100 * share(files)


def _machinery(design: str) -> Callable[[Measured], float]:
    return lambda files: 1 + files["model"]["machinery"][design]


def _memory(design: str) -> Callable[[Measured], float]:
    return lambda files: files["memory"]["ratios"][design][files["memory"]["depths"].index(48)]


def _step(design: str) -> Callable[[Measured], float]:
    """A ratio passes if it would with the control's half-width taken off; an unresolved one is no measurement."""

    def find(files: Measured) -> float:
        found = files["model"]
        if not found["resolved"]:
            raise KeyError(design)
        return found["ratios"][design]["value"] - found["ratios"][design]["control"]

    return find
