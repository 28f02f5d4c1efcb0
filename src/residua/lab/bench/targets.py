"""The bars that the fast path was built to, each beside what the committed files say: met, missed or not measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import reduce
from itertools import product
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple

from residua.lab.bench import record
from residua.lab.bench.cases import PUBLIC, parse_shape
from residua.lab.bench.plain import CONTEXTS, EARLIER, PHASES, SHAPES
from residua.lab.bench.table import Sheet
from residua.lab.bench.timing import Measured
from residua.registry import names

STEPS = {
    "delta:blocks=4": 1.02, "attnres:blocks=4": 1.02, "delta": 1.08, "attnres": 1.08, "mudd": 1.15, "mhc": 1.15,
    "hyper": 1.15, "ddl": 1.03, "ddl:channels=4": 1.10,
}  # fmt: skip
"""Training steps over that of `standard`, at most."""

Find = Callable[[Measured], float]
Many = Callable[[Measured], dict[str, float]]


class Target(NamedTuple):
    """A quantity, its bar, and where the files hold it: a share, ratio, exponent or time; of several, the worst."""

    what: str
    bar: float
    at_least: bool
    find: Find | Many
    unit: str = "x"

    def met(self, found: float) -> bool:
        """Whether the bar is kept."""
        return found >= self.bar if self.at_least else found <= self.bar

    def worst(self, files: Measured) -> tuple[float, str]:
        """What the files hold, and which of several it is."""
        found = self.find(files)
        if not isinstance(found, dict):
            return found, ""
        if not found:
            raise KeyError(self.what)
        where = (min if self.at_least else max)(found, key=lambda name: found[name])
        return found[where], f" ({where})"


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
            found, where = target.worst(files)
        except KeyError:
            rows.append([*row, "-", "not measured"])
            continue
        except NotResolved as which:
            rows.append([*row, f"n.r.{which}", "not resolved"])
            continue
        rows.append([*row, f"{found:.4g}{target.unit}{where}", "met" if target.met(found) else "missed"])
    return Sheet("The bars", ["what", "bar", "measured", ""], rows, ["Of several quantities the worst is shown."])


def targets() -> Iterator[Target]:
    """The bars: of reads alone, of steps, of memory, of the plain and the compiled step, of windows and decoding."""
    yield from _reads()
    yield from _steps()
    for design, bar in (("delta", 1.12), ("attnres:blocks=4", 1.10), ("delta:blocks=4", 1.10)):
        yield Target(f"peak memory at 48 blocks, {design}", bar, False, _memory(design))
        yield Target(f"its growth, {design}", 1.05, False, _memory_growth(design), "")
    for phase in PHASES:
        yield Target(f"plain {phase}, of the fastest rival, every shape", 0.90, False, _plain(phase))
    yield Target("plain step at width 64, tokens a second over the earlier", 1.5, True, _earlier)
    yield Target("compiled step over eager, less the control, every design", 1.00, False, _compiled)
    yield from _windows()
    yield Target(
        "decode of a converted Llama, delta:blocks=4, speed over the base", 0.95, True,
        lambda files: 1 / files["decode"]["converted"]["over_base"]["delta:blocks=4"]["value"],
    )  # fmt: skip


def _reads() -> Iterator[Target]:
    for dtype in ("float32", "bfloat16"):
        yield Target(f"all reads of 48 blocks, full delta, {dtype}", 60, True, _stack(dtype))
    for dtype in ("float32", "bfloat16"):
        grown = _at("stack", "types", dtype, "growth", "delta")
        yield Target(f"their growth with depth, {dtype}", 1.5, False, grown, "")
    grown = _at("stack", "types", "float32", "growth", "delta:blocks=4")
    yield Target("growth at blocks=4", 1.05, False, grown, "")
    for dtype, counts in (("float32", (4, 8, 16, 24, 32, 64)), ("bfloat16", (4, 24, 64))):
        for shape in ("2048x256", "4096x512"):
            told = ", ".join(map(str, counts))
            yield Target(f"one read f+b of {told} sources, {dtype}, {shape}", 30, True, _single(shape, counts, dtype))
    for phase, bar in (("forward", 60.0), ("backward", 75.0)):
        yield Target(f"{phase} of a plain read's bandwidth, 4096x512, n=24", bar, True, _bandwidth(phase), " %")
    for phase in ("forward", "backward"):
        yield Target(f"groups of reads, {phase}, of a matrix product's rate", 80, True, _group(phase), " %")


def _steps() -> Iterator[Target]:
    for design, bar in STEPS.items():
        yield Target(f"training step, {design}", bar, False, _at("model", "ratios", design, "value"))
    yield Target("standard against itself (A/A)", 1, False, lambda files: 100 * files["model"]["control"], " %")


def _windows() -> Iterator[Target]:
    for phase, label, bar in (("forward", "forward, over masked SDPA", 25), ("both", "f+b", 8)):
        window = _op("window_attend", phase, "ratios", PUBLIC, tokens=8192, window=128)
        yield Target(f"window 128 at 8192 tokens, {label}", bar, True, lambda files, at=window: _resolved(at(files)))
    for phase in ("forward", "both"):
        grown = _at("ops", "growth", "window_attend float32", 1, phase)
        yield Target(f"growth of the window with tokens, {phase}", 1.05, False, grown, "")
    ring = _at("decode", "ring", "over_shortest", "32768", "value")
    yield Target("ring decode after 32k tokens over 1k", 1.1, False, ring)
    yield Target("a read at decode", 60, False, _at("decode", "read", "microseconds", "residua"), " us")


def _at(*keys: str | int) -> Find:
    """The number under these keys."""

    def find(files: Any) -> float:
        return reduce(getitem, keys, files)

    return find


def _op(op: str, *keys: str, **asked: object) -> Callable[[Measured], Any]:
    """What lies under these keys in the row of an op."""

    def find(files: Measured) -> Any:
        return reduce(getitem, keys, _row(files["ops"]["rows"], op=op, **asked))

    return find


def _row(rows: list[Measured], **asked: object) -> Measured:
    """The first row with these values."""
    for row in rows:
        if all(row.get(key) == value for key, value in asked.items()):
            return row
    raise KeyError(str(asked))


def _resolved(ratio: Measured, which: str = "") -> float:
    if not ratio["resolved"]:
        raise NotResolved(which)
    return float(ratio["value"])


def _stack(dtype: str) -> Find:
    return lambda files: _resolved(_row(files["stack"]["types"][dtype]["rows"], depth=48)["ratios"]["delta"])


def _single(shape: str, counts: tuple[int, ...], dtype: str) -> Many:
    tokens, width = parse_shape(shape)

    def find(files: Measured) -> dict[str, float]:
        asked = {
            n: _op("attend", "both", "ratios", PUBLIC, n=n, dtype=dtype, tokens=tokens, width=width) for n in counts
        }
        return {f"n={n}": _resolved(ratio(files), f" (n={n})") for n, ratio in asked.items()}

    return find


def _bandwidth(phase: str) -> Find:
    share = _op("attend", "bandwidth", f"{phase}_share", n=24, dtype="float32", tokens=4096, width=512)
    return lambda files: 100 * share(files)


def _group(phase: str) -> Find:
    """The rate of the first form's groups: all reads of a deep stack."""

    def find(files: Measured) -> float:
        part = _row(files["profile"]["forms"][0]["parts"], part=f"group of reads, {phase}")
        return 100 * part["multiplies"] / part["seconds"] / files["profile"]["multiplies_per_second"]

    return find


def _memory(design: str) -> Many:
    def find(files: Measured) -> dict[str, float]:
        at = files["memory"]["depths"].index(48)
        return {f"{tokens} tokens": of["ratios"][design][at] for tokens, of in files["memory"]["lengths"].items()}

    return find


def _memory_growth(design: str) -> Many:
    return lambda files: {f"{n} tokens": of["growth"][design] for n, of in files["memory"]["lengths"].items()}


def _plain(phase: str) -> Many:
    """Every shape and context, or the bar is not measured."""

    def find(files: Measured) -> dict[str, float]:
        rows = [row for row in files["plain"]["rows"] if row["phase"] == phase]
        for (depth, width), context in product(SHAPES, CONTEXTS):
            _row(rows, depth=depth, width=width, context=context)
        return {f"{row['depth']} x {row['width']}, {row['context']}": row["of_fastest"] for row in rows}

    return find


def _earlier(files: Measured) -> dict[str, float]:
    rows = [row for row in files["plain"]["rows"] if row["phase"] == "step" and row["width"] == 64]
    named = {f"{row['depth']} x 64, {row['context']}": row["ratios"][EARLIER] for row in rows}
    return {name: _resolved(ratio, f" ({name})") for name, ratio in named.items()}


def _compiled(files: Measured) -> dict[str, float]:
    """A compiled step is no slower where it is not by more than the eager one differs from itself."""
    found = {name: _row(files["compiled"]["designs"], design=name)["ratios"]["compiled"] for name in names()}
    return {design: ratio["value"] - ratio["control"] for design, ratio in found.items()}
