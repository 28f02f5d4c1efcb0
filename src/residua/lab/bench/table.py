"""Measurements as tables: one list of headed rows, drawn on a terminal or written as Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from residua.lab.bench.cases import COMPILED, OURS, PLAIN, PUBLIC
from residua.lab.bench.model import RESOLUTION
from residua.lab.bench.timing import Measured, Ratio
from residua.lab.common.tables import print_table


class Sheet(NamedTuple):
    """A table and what must be said under it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]


def sheets(measured: Measured) -> list[Sheet]:
    """The tables of whatever was measured."""
    return [make(measured[kind]) for kind, make in _MAKERS.items() if kind in measured]


def markdown(sheet: Sheet) -> str:
    """The table and its notes, for a document."""
    lines = [f"**{sheet.title}**", "", "| " + " | ".join(sheet.columns) + " |"]
    lines += ["|" + "|".join("---" if i == 0 else "---:" for i in range(len(sheet.columns))) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in sheet.rows]
    return "\n".join([*lines, "", *sheet.notes]) + "\n"


def show(sheet: Sheet) -> None:
    """The table on the terminal."""
    print_table(sheet.columns, sheet.rows, sheet.notes, title=sheet.title)


def ratio(found: Measured | None) -> str:
    """`12.3x`, `n.r.` where the run could not resolve it, a dash where it was not measured."""
    if found is None:
        return "-"
    return str(Ratio(**{key: value for key, value in found.items() if key != "resolved"}))


def _ops(measured: Measured) -> Sheet:
    rows = []
    for row in measured["rows"]:
        size = next(f"{key}={row[key]}" for key in ("n", "values", "streams", "window") if key in row)
        lanes = f" lanes={row['lanes']}" if row.get("lanes") else ""
        case = f"{row['op']} {row['tokens']}x{row['width']} {size}{lanes} {row['dtype']}"
        for phase, label in (("forward", "fwd"), ("both", "f+b")):
            found = row[phase]["ratios"]
            share = row.get("bandwidth", {}).get("forward_share" if phase == "forward" else "backward_share")
            rows.append(
                [
                    case if phase == "forward" else "",
                    label,
                    f"{1e3 * row[phase]['seconds'][OURS]:.2f}",
                    *(ratio(found.get(form)) for form in (PUBLIC, PLAIN, COMPILED)),
                    f"{100 * found[PUBLIC]['control']:.0f} %",
                    "-" if share is None else f"{100 * share:.0f} %",
                ]
            )
    notes = [
        "public, pytorch, compiled: slowdown of that implementation; n.r.: not resolved, within the control "
        "(A/A: ours against itself). bandwidth: minimum traffic over time, as a share of a plain read in the same run "
        "(for f+b, of the backward alone)."
    ]
    notes += [
        f"{name}: our time grows as {over}^{power['forward']:.2f} forward, {over}^{power['both']:.2f} f+b."
        for name, (over, power) in measured.get("growth", {}).items()
    ]
    columns = ["op", "", "ms", "public", "pytorch", "compiled", "A/A", "bandwidth"]
    return Sheet("One op against published code, plain PyTorch and torch.compile", columns, rows, notes)


def _stack(measured: Measured) -> Sheet:
    first = next(iter(measured["types"].values()))
    depths = [row["depth"] for row in first["rows"]]
    rows = []
    for dtype, found in measured["types"].items():
        for name in found["rows"][0]["seconds"]:
            took = [f"{1e3 * row['seconds'][name]:.1f}" for row in found["rows"]]
            power = found["growth"].get(name)
            faster = found["rows"][-1]["ratios"].get(name)
            control = f"{100 * faster['control']:.0f} %" if faster else "-"
            rows.append([f"{name}, {dtype}", *took, "-" if power is None else f"L^{power:.2f}", ratio(faster), control])
    title = (
        f"All reads and writes of a stack, forward and backward, ms, {measured['tokens']} tokens x {measured['width']}"
    )
    columns = ["", *(f"L={depth}" for depth in depths), "growth", f"public at L={depths[-1]}", "A/A"]
    return Sheet(title, columns, rows, ["growth: of the time above that of standard."])


LEAST = 0.005
"""Of a step: the share of a part that is worth a line."""


def _profile(measured: Measured) -> Sheet:
    rows = []
    for form in measured["forms"]:
        rows.append([form["what"], f"{1e3 * form['seconds']:.2f}", "", "", "", ""])
        for part in sorted(form["parts"], key=lambda one: -one["seconds"]):
            took = part["seconds"]
            rows.append([
                f"· {part['part']}", f"{1e3 * took:.2f}",
                f"{100 * took / form['seconds']:.0f} %", f"{part.get('calls', '-')}",
                *(f"{100 * part[key] / took / measured[bound]:.0f} %" if key in part else "-"
                  for key, bound in (("multiplies", "multiplies_per_second"), ("bytes", "bytes_per_second"))),
            ])  # fmt: skip
    for one in measured["added"]:
        parts = [part for part in one["parts"] if abs(part["seconds"]) >= LEAST * one["of"]]
        named = [(f"a training step of {one['design']}, above `standard`", one["seconds"])]
        named += [(f"· {part['part']}", part["seconds"]) for part in parts]
        rows += [[what, f"{1e3 * took:.2f}", f"{100 * took / one['of']:.1f} %", "", "", ""] for what, took in named]
    step = measured["step"]
    notes = [
        f"a training step ({step['depth']} x {step['width']}, {step['rows']} x {step['tokens']} tokens): what a part "
        f"takes more than in `standard`'s, and its share of that whole step, from {100 * LEAST:g} % on. "
        f"of matmul: multiplications with additions a second over those of a matrix product on the same core "
        f"({measured['multiplies_per_second'] / 1e9:.0f} billion); of a plain sum: least traffic over that of a sum "
        f"({measured['bytes_per_second'] / 1e9:.1f} GB/s). Shares may add up to more than all: watched runs are slower."
    ]
    return Sheet("Where the time goes", ["", "ms", "share", "calls", "of matmul", "of a plain sum"], rows, notes)


def _model(measured: Measured) -> Sheet:
    rows = [
        [name, f"{found['value']:.3f}", f"{found['low']:.3f} to {found['high']:.3f}", f"{100 * found['control']:.1f} %",
         f"{100 * measured['machinery'][name]:.1f} %", _served(measured["served"][name])]
        for name, found in measured["ratios"].items()
    ]  # fmt: skip
    said = "resolves" if measured["control"] <= RESOLUTION else "does NOT resolve"
    groups, rounds = len(measured["controls"]), [found["rounds"] for found in measured["ratios"].values()]
    notes = [
        f"standard takes {1e3 * measured['step_seconds']:.0f} ms; its control {said} {100 * RESOLUTION:.0f} % "
        f"({groups} interleaved runs with a standard and a control each, {min(rounds)} to {max(rounds)} rounds). "
        "machinery: the design's own reads and writes alone, over that step. kernels: the ops with a fast path that "
        "they call."
    ]
    title = (
        f"A training step over that of `standard`, {measured['depth']} x {measured['width']}, "
        f"{measured['rows']} x {measured['tokens']} tokens"
    )
    return Sheet(title, ["design", "step", "95 % interval", "A/A", "machinery", "kernels"], rows, notes)


def _served(found: Measured) -> str:
    """`attend, mix`, or what runs instead of a kernel."""
    without = f"no fast path: {', '.join(found['references'])} by the reference" if found["references"] else ""
    return ", ".join(found["kernels"] + [without] * bool(without)) or "no fast path: PyTorch's operations"


def _memory(measured: Measured) -> Sheet:
    rows = [
        [name, tokens, *(f"{one / 2**20:.1f}" if name == "standard" else f"{ratio:.2f}x" for one, ratio in zip(
            found, of["ratios"].get(name, found), strict=True)), f"L^{of['growth'][name]:.2f}" if of["growth"] else "-"]
        for tokens, of in measured["lengths"].items()
        for name, found in of["bytes"].items()
    ]  # fmt: skip
    columns = ["design", "tokens", *(f"{depth} blocks" for depth in measured["depths"]), "growth"]
    title = "Peak memory of a training step (standard in MiB, others over it)"
    return Sheet(title, columns, rows, ["Resident high-water above model and inputs, one process each."])


def _decode(measured: Measured) -> Sheet:
    read, ring = measured["read"], measured["ring"]
    rows = [[f"one read, {read['sources']} sources x {read['width']}", f"{read['microseconds']['residua']:.1f}",
             f"public form {ratio(read['ratio'])}"]]  # fmt: skip
    for length, took in ring["microseconds"].items():
        found = ring["over_shortest"].get(length)
        over = f"{found['value']:.2f} of the shortest (A/A {100 * found['control']:.0f} %)" if found else ""
        rows.append([f"window {ring['window']} after {length} tokens", f"{took:.0f}", over])
    for kind, first, of in (("model", "standard", ""), ("converted", "base", " in a converted Llama")):
        for name, took in measured.get(kind, {}).get("microseconds", {}).items():
            model, found = measured[kind], measured[kind][f"over_{first}"].get(name)
            over = f"{found['value']:.2f} of {first} (A/A {100 * found['control']:.0f} %)" if found else ""
            label = "the Llama itself" if name == "base" else f"{name}{of}"
            rows.append([f"{label}, {model['depth']} x {model['width']}", f"{took:.0f}", over])
    notes = [] if "converted" in measured else ["Converted models were not timed: no residua[hf], or on a GPU."]
    return Sheet("Decoding one token, batch 1", ["what", "microseconds", ""], rows, notes)


def _plain(measured: Measured) -> Sheet:
    rows = []
    for row in measured["rows"]:
        found, took = row["ratios"], row["seconds"]["residua"]
        tokens = row["rows"] * (1 if row["phase"] == "decode" else row["context"])
        rows.append(
            [
                f"{row['depth']} x {row['width']}, {row['context']}",
                row["phase"],
                f"{1e3 * took:.2f}",
                f"{tokens / took:,.0f}",
                *(ratio(found.get(name)) for name in ("plain", "llama", "earlier")),
                f"{row['of_fastest']:.2f}",
                f"{100 * found['plain']['control']:.1f} %",
            ]
        )
    notes = [
        f"Vocabulary {measured['vocabulary']}, float32. forward: logits of a batch; step: loss, gradients, clipping, "
        "AdamW; decode: one token after the context, batch 1. Times of others over ours: plain, a careful form in "
        "PyTorch alone; llama, transformers' own; earlier, our narrow step without kernels, with all logits and an "
        "allocator that returns pages. of fastest: our time over that of the faster rival."
    ]
    columns = ["blocks x width, context", "", "ms", "tokens/s", "plain", "llama", "earlier", "of fastest", "A/A"]
    return Sheet("`standard` against the same network written by others", columns, rows, notes)


def _compiled(measured: Measured) -> Sheet:
    rows = []
    for one in measured["designs"]:
        found = one["ratios"]
        rows.append([
            one["design"], f"{1e3 * one['seconds']:.1f}",
            *(f"{found[form]['value']:.3f}" if form in found else "-" for form in ("compiled", "fused")),
            f"{found['compiled']['low']:.3f} to {found['compiled']['high']:.3f}",
            f"{100 * found['compiled']['control']:.1f} %", str(one["kernel_calls"]),
        ])  # fmt: skip
    title = (
        f"A compiled training step over the eager one, {measured['depth']} x {measured['width']}, "
        f"{measured['rows']} x {measured['tokens']} tokens"
    )
    notes = [
        "compiled: the kernels as operators of the graph; fused: without them, the references as Inductor fuses them, "
        "for the first design that calls a kernel; interval and A/A of the first. kernels: calls of C a compiled step."
    ]
    return Sheet(title, ["design", "eager ms", "compiled", "fused", "95 % interval", "A/A", "kernels"], rows, notes)


def _kernels(measured: Measured) -> Sheet:
    """Of every kernel the worst of its types and widths."""
    worst: dict[tuple[str, str], list[Measured]] = {}
    for row in measured["rows"]:
        worst.setdefault((row["case"], row["kernel"].strip("_").removesuffix("_kernel")), []).append(row)
    targets = list(measured["rows"][0]["targets"])
    rows = []
    for (case, kernel), found in worst.items():
        cells = [[row["targets"][target] for row in found] for target in targets]
        taken = [(max(one["registers"] for one in cell), max(one["shared"] for one in cell)) for cell in cells]
        spills = max(one["spills"] for cell in cells for one in cell)
        rows.append(
            [case, kernel, *(f"{registers}, {shared / 1024:.0f} KiB" for registers, shared in taken), f"{spills}"]
        )
    widths = ", ".join(dict.fromkeys(f"{row['dtype']} {row['width']}" for row in measured["rows"]))
    note = f"Compiled by Triton {measured['triton']}; the worst of {widths}. spills: bytes a thread."
    return Sheet("Registers a thread and shared memory a program", ["op", "kernel", *targets, "spills"], rows, [note])


def _check(measured: list[Measured]) -> Sheet:
    rows = [
        [row["case"], row["dtype"], row["shape"],
         *("-" if row[key] is None else f"{row[key]:.1e}" for key in ("output", "gradient")), row["reason"] or "right"]
        for row in measured
    ]  # fmt: skip
    columns = ["kernel", "type", "tokens x width x n", "output", "gradient", ""]
    return Sheet("Every kernel against float64: relative errors", columns, rows, [])


def _read(measured: Measured) -> Sheet:
    rows = [["residua", f"{measured['microseconds']:.0f}", f"{100 * measured['share']:.0f} %"]]
    rows += [[f"{name}, as reported", f"{took}", "-"] for name, took in measured["public"].items()]
    title = f"One read, forward: {measured['n']} sources of {measured['tokens']} x {measured['width']}, bfloat16"
    note = f"{measured['bytes'] / 1e9:.2f} GB; A/A {100 * measured['control']:.0f} %. Reported numbers are of an H100."
    return Sheet(title, ["", "microseconds", "of a plain sum"], rows, [note])


_MAKERS: dict[str, Callable[[Any], Sheet]] = {
    "check": _check, "read": _read, "kernels": _kernels,
    "ops": _ops, "stack": _stack, "profile": _profile, "model": _model, "memory": _memory, "decode": _decode,
    "plain": _plain, "compiled": _compiled,
}  # fmt: skip
