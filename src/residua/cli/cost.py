"""`residua cost`: what designs cost, predicted without running them, or measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from residua.cli._flags import dtype_of, tell
from residua.lab.common.files import Record, Values
from residua.lab.common.tables import print_table

if TYPE_CHECKING:
    import torch

    from residua.lab.cost.predict import Cost
    from residua.lab.cost.targets import Target


def command(
    designs: list[str] = typer.Option(
        [], "--design", "-d", help="Design, such as delta:blocks=4; repeatable. standard is always included."
    ),
    size: str = typer.Option(
        "220M",
        help="Model size: demo, 220M, 350M, 533M, 1B, 3B, 7.6B, or DEPTHxWIDTH[xHEADS]; the options below override it.",
    ),
    config: Path = typer.Option(None, help="A Hugging Face config.json, or its directory, instead of --size."),
    depth: int = typer.Option(None, help="Number of Transformer blocks."),
    width: int = typer.Option(None, help="Model width."),
    heads: int = typer.Option(None, help="Number of attention heads."),
    vocab: int = typer.Option(None, help="Vocabulary size."),
    layout: str = typer.Option("attn,mlp", help="Sublayers of a block, such as swa:window=16,attn,mlp."),
    tokens: int = typer.Option(2048, help="Sequence length in tokens."),
    batch: int = typer.Option(1, help="Batch size; with --parallel, rows of a micro-batch."),
    dtype: str = typer.Option("float32", help="dtype of parameters and activations: float32, bfloat16 or float16."),
    path: str = typer.Option(
        "reference", help="reference: the plain PyTorch ops; fused: ideal kernels, a lower bound."
    ),
    measure: bool = typer.Option(False, "--measure", help="Also run the model and show measured values."),
    sweep: str = typer.Option(None, help="Vary one quantity: T=512:8192, window=4:64, L=4,8 or K=2:16."),
    asymmetry: bool = typer.Option(
        False, "--asymmetry", help="Compare the cost of an attention window over tokens and over layers."
    ),
    out: Path = typer.Option(None, help="With --asymmetry: directory for its plot and data."),
    parallel: str = typer.Option(
        None, help="Predict memory, traffic and time of every rank instead, such as pp=4,fsdp=8; axes pp, dp, fsdp, tp."
    ),
    schedule: str = typer.Option(
        "interleaved", help="With --parallel: pipeline schedule; gpipe, 1f1b, interleaved or zero-bubble."
    ),
    microbatches: int = typer.Option(None, help="With --parallel: micro-batches of a step; 2 pp by default."),
    virtual: int = typer.Option(
        None, help="With --parallel: pipeline stages on a rank; 2 by default where the schedule allows, else 1."
    ),
    whole: bool = typer.Option(False, "--whole", help="With --parallel: send the whole state over every cut."),
    teraflops: float = typer.Option(400.0, help="With --parallel: TFLOP/s that a device sustains."),
    inside: float = typer.Option(300.0, help="With --parallel: GB/s between devices of one machine."),
    between: float = typer.Option(50.0, help="With --parallel: GB/s per device between machines."),
    machine: int = typer.Option(8, help="With --parallel: devices in one machine."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Predict parameters, FLOPs, memory, state size, cache and communication of designs."""
    from residua.lab.cost.targets import from_hugging_face, sized

    shape = {"depth": depth, "width": width, "heads": heads, "vocab": vocab}
    if config is not None:
        given = [f"--{key}" for key, value in shape.items() if value is not None]
        if given:
            raise ValueError(f"{given[0]} cannot be combined with --config: {config} sets it")
        target = from_hugging_face(config, layout=layout)
    else:
        target = sized(size, layout=layout, **shape)
    kind = dtype_of(dtype, "float32", "bfloat16", "float16")
    if sum((measure, bool(sweep), asymmetry, parallel is not None)) > 1:
        raise ValueError("--measure, --sweep, --asymmetry and --parallel exclude each other; give one")
    if measure and (path != "reference" or dtype != "float32"):
        raise ValueError("--measure runs the reference path in float32; drop --path and --dtype")
    if out is not None and not asymmetry:
        raise ValueError("--out is for --asymmetry; use --json for the other tables")
    if asymmetry and (designs or batch != 1 or path != "reference"):
        raise ValueError("--asymmetry compares fixed placements of one sequence on the fused path; drop the designs, "
                         "--batch and --path")  # fmt: skip
    if asymmetry:
        _asymmetry(target, tokens, kind, out, as_json)
        return
    if target.foreign is not None:
        if measure or sweep or asymmetry:
            raise ValueError(
                f"of {target.foreign.title} only the design is counted; drop --measure, --sweep, --asymmetry"
            )
        designs = [target.foreign.design, *designs]
    names = list(dict.fromkeys(["standard", *designs])) if not sweep else (designs or ["standard"])
    if parallel is not None:
        from residua.lab.cost.timeline import Device

        device = Device(flops=1e12 * teraflops, inside=1e9 * inside, between=1e9 * between, machine=machine)
        how = {"schedule": schedule.replace("-", "_"), "microbatches": microbatches, "virtual": virtual,
               "incremental": not whole, "dtype": kind, "path": path, "device": device}  # fmt: skip
        _parallel(target, names, parallel, batch, tokens, how, as_json)
        return
    options = {"batch": batch, "dtype": kind, "path": path}
    if sweep:
        _sweep(target, names, sweep, tokens, options, as_json)
        return
    _compare(target, names, tokens, options, measure, as_json)


QUANTITIES: Mapping[str, tuple[str, str]] = {
    "parameters": ("parameters", "count"),
    "stream_parameters": ("  of the design", "count"),
    "flops": ("FLOPs per token, forward", "per token"),
    "stream_flops": ("  of the design", "per token"),
    "bytes_moved": ("memory traffic, bytes per token (upper bound)", "per token"),
    "stream_bytes_moved": ("  by the design", "per token"),
    "saved_bytes": ("saved for backward, bytes per token", "per token"),
    "stream_saved_bytes": ("  by the design", "per token"),
    "state_bytes": ("stream state, bytes per token", "per token"),
    "cut": ("largest pipeline cut, bytes per token", "per token"),
    "cache_bytes": ("decode cache, bytes", "bytes"),
    "halo_bytes": ("context-parallel halo, bytes", "bytes"),
    "key_value_bytes": ("  keys and values of full attention, bytes", "bytes"),
}
"""What the tables show: a title, and whether it is divided by the number of tokens."""


def _shown(values: Record, key: str, tokens: int) -> float | None:
    value = max(values["cut_bytes"].values()) if key == "cut" else values.get(key)
    return None if value is None else value / tokens if QUANTITIES[key][1] == "per token" else value


def _compare(target: Target, names: list[str], tokens: int, options: Values, measured: bool, as_json: bool) -> None:
    from residua.lab.cost import predict, run_and_count

    rows: dict[str, Values] = {}
    for name in names:
        chosen = target.of(name)
        cost = predict(chosen.config, tokens, build=chosen.build, **options)
        rows[name] = {"predicted": cost.to_json() | _foreign(target, cost)}
        if measured:
            if target.build is not type(target)(target.config).build:
                raise ValueError("--measure runs our own backbone, and this configuration has heads of another width "
                                 "or biases, which are only counted; measure a --size")  # fmt: skip
            rows[name]["measured"] = run_and_count(chosen.config, tokens, batch=options["batch"])
    every = tokens * options["batch"]
    if as_json:
        typer.echo(json.dumps({"tokens": tokens, "batch": options["batch"], "path": options["path"],
                               "model": target.config.to_json(), "designs": rows}, indent=2))  # fmt: skip
        return
    titles, lines = ["", *names], []
    if measured:
        titles = ["", *(f"{name}{what}" for name in names for what in ("", " measured", " error"))]
    for key, (title, _) in QUANTITIES.items():
        cells = [title]
        for row in rows.values():
            guess = _shown(row["predicted"], key, every)
            cells.append(_number(guess))
            if measured:
                found = _shown(row["measured"], key, every)
                cells += [_number(found), _error(guess, found)]
        lines.append(cells)
    print_table(titles, lines, width=240)
    typer.echo(
        f"{tokens} tokens x {options['batch']}, {target.config.depth} blocks of width {target.config.width}, "
        f"{options['path']} path. A multiply-add counts as two FLOPs. Saved for backward excludes the loss. Halo: what "
        "a context-parallel rank fetches from its neighbour for windows and convolutions; full attention needs all "
        "keys and values."
    )
    if target.foreign is not None:
        typer.echo(f"The layers of {target.foreign.title} are not ours: their parameters alone are counted.")


def _foreign(target: Target, cost: Cost) -> Values:
    """What is not known of a model whose layers are not ours, and the parameters, which are."""
    if target.foreign is None:
        return {}
    unknown = ("flops", "bytes_moved", "saved_bytes", "cache_bytes", "halo_bytes", "key_value_bytes")
    return {"parameters": target.foreign.parameters + cost.stream_parameters, **dict.fromkeys(unknown)}


def _sweep(target: Target, names: list[str], text: str, tokens: int, options: Values, as_json: bool) -> None:
    from residua.lab.cost.sweep import sweep, values_of

    key, _ = values_of(text)
    found: dict[str, dict[int, Cost]] = {name: sweep(target.of(name), text, tokens, **options) for name in names}
    if as_json:
        plain = {name: {str(value): cost.to_json() for value, cost in costs.items()} for name, costs in found.items()}
        typer.echo(json.dumps({"sweep": key, "path": options["path"], "designs": plain}, indent=2))
        return
    shown = ("parameters", "flops", "bytes_moved", "saved_bytes", "cut", "cache_bytes", "halo_bytes")
    lines = [
        [name, str(value), *(_number(_shown(cost.to_json(), one, cost.tokens * cost.batch)) for one in shown)]
        for name, costs in found.items()
        for value, cost in costs.items()
    ]
    print_table(["design", key, *(QUANTITIES[one][0] for one in shown)], lines, width=240)


def _asymmetry(target: Target, tokens: int, dtype: torch.dtype, out: Path | None, as_json: bool) -> None:
    from residua.lab.cost.asymmetry import QUANTITIES as ADDED
    from residua.lab.cost.asymmetry import asymmetry

    data = asymmetry(target, tokens=tokens, dtype=dtype)
    if out is not None:
        from residua.lab.plots.asymmetry import asymmetry as drawn
        from residua.lab.plots.save import save

        files = save({"asymmetry": lambda: drawn(data)}, out)
        (out / "asymmetry.json").write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        tell(" ".join(map(str, [*files, out / "asymmetry.json"])))
    if as_json:
        typer.echo(json.dumps(data, indent=2))
        return
    lines = [
        [label, str(window), *(_number(series[key][place]) for key in ("parameters", *ADDED))]
        for label, series in data["added"].items()
        for place, window in enumerate(data["windows"])
        if series["flops"][place] is not None
    ]
    print_table(["added by", "window", "parameters", *ADDED.values()], lines, width=240)
    typer.echo(
        f"Added to the standard model; {tokens} tokens, {str(dtype)[6:]}, fused path: a lower bound, not a measurement."
    )


def _parallel(target: Target, names: list[str], text: str, batch: int, tokens: int, how: Values, as_json: bool) -> None:
    from residua.cli._ranks import print_ranks
    from residua.lab.cost.ranks import predict_ranks
    from residua.scale.layout import Parallel

    layout = Parallel.parse(text)
    micro = how["microbatches"] or (2 * layout.pp if layout.pp > 1 else 1)
    found = {}
    for name in names:
        chosen = target.of(name)
        rows = batch * micro
        found[name] = predict_ranks(
            chosen.config, layout, rows=rows, tokens=tokens, build=chosen.build, **(how | {"microbatches": micro})
        ).to_json()
    if as_json:
        typer.echo(json.dumps({"model": target.config.to_json(), "designs": found}, indent=2))
        return
    for name, cost in found.items():
        print_ranks(name, cost)
    schedule = f" {found[names[0]]['schedule']}." if layout.pp > 1 else ""
    typer.echo(
        f"{layout}: {layout.ranks} ranks, {micro} micro-batches of {batch} x {tokens} tokens per replica.{schedule} "
        "Predicted peak of each rank; times assume that communication and compute do not overlap."
    )


def _number(value: float | None) -> str:
    """1234567 as 1.23M; small whole numbers as they are."""
    if value is None:
        return "-"
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            unit = 1e3 if letter == "k" else size
            return f"{value / unit:.4g}{letter}"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"


def _error(guess: float | None, found: float | None) -> str:
    if guess is None or found is None:
        return "-"
    if guess == found:
        return "exact"
    return f"{(guess - found) / found:+.1%}" if found else "-"
