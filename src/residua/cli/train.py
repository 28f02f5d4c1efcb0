"""`residua train`: one run. Its flags are the fields of `TrainConfig`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from residua.cli._flags import read_settings, run_flags, running, sign
from residua.lab.common.files import Values
from residua.lab.train.config import TrainConfig, config_fields

if TYPE_CHECKING:
    from residua.lab.train.run import Result
    from residua.scale.layout import Pipes


def command(
    out: Path,
    config: Path | None,
    resume: str,
    track: list[str],
    size: str | None,
    schedule: list[str],
    parallel: str | None,
    microbatches: int | None,
    virtual: int | None,
    offload: bool,
    dry_run: bool,
    as_json: bool,
    **flags: Any,
) -> None:
    """Train one model. The same command resumes an interrupted run.

    On several devices: torchrun --nproc-per-node 8 -m residua train --parallel fsdp=8 ...
    """
    from residua.lab.train.display import Display
    from residua.lab.train.ranks import launched, one_voice
    from residua.lab.train.run import train

    with one_voice():
        first = os.environ.get("RANK", "0") == "0" or launched() == 1
        device = {name: flags.pop(name) for name in DEVICE}
        rate, pipes = schedules(schedule, microbatches, virtual)
        chosen = resolve(config, {name: value for name, value in (flags | rate).items() if value is not None}, size)
        if dry_run:
            if first:
                _dry_run(chosen, parallel, pipes, device, size, as_json)
            return
        if given := [f"--{name}" for name, value in device.items() if value is not None]:
            raise ValueError(f"{', '.join(given)}: of the device that --dry-run estimates for; a run needs none")
        if out is None:
            raise ValueError("--out is missing: give the output directory of the run, such as --out runs/a")
        how: Values = {"resume": resume, "track": track, "parallel": parallel, "pipes": pipes, "offload": offload}
        if launched() > 1:
            # what goes wrong reaches `one_voice`, which tells it once
            with Display() if first else nullcontext() as display:
                result = train(chosen, out, on_event=display, **how)
            if not first:
                return
        else:
            with running(out) as display:
                result = train(chosen, out, on_event=display, **how)
        typer.echo(json.dumps(result.to_json(), indent=2) if as_json else _summary(result, out))


def resolve(file: Path | None, flags: Values, size: str | None = None) -> TrainConfig:
    """A config from a named size, a JSON or TOML file of fields over it, and the flags over both."""
    given = read_settings(file) | flags
    if size is not None:
        from residua.lab.cost.recipes import recipe

        given = recipe(size, given)
    return TrainConfig.from_json(given)


def schedules(words: list[str], microbatches: int | None, virtual: int | None) -> tuple[Values, Pipes | None]:
    """--schedule says two things by words that differ: fields for the learning rate, and, with what else is said of
    stages, how a pipeline runs."""
    from residua.scale.layout import SCHEDULES, Pipes

    rate, found = Values(), Values()
    for word in words:
        name = word.replace("-", "_")
        if word in config_fields()["schedule"].choices:
            where, key = rate, word
        elif name in SCHEDULES:
            where, key = found, name
        else:
            raise ValueError(
                f"--schedule {word}: cosine or wsd for the learning rate, or, with pp, one of "
                f"{', '.join(SCHEDULES).replace('_', '-')}"
            )
        if where:
            raise ValueError(f"--schedule is given twice, as {where['schedule']} and {key}")
        where["schedule"] = key
    found |= {key: value for key, value in (("microbatches", microbatches), ("virtual", virtual)) if value is not None}
    return rate, Pipes(**found) if found else None


def _dry_run(
    config: TrainConfig, parallel: str | None, pipes: Pipes | None, numbers: Values, size: str | None, as_json: bool
) -> None:
    from residua.cli._ranks import print_ranks
    from residua.lab.cost.dry_run import foresee
    from residua.lab.cost.timeline import Device
    from residua.lab.train.ranks import launched

    scale = {name: DEVICE[name][0] * value for name, value in numbers.items() if value is not None}
    if "machine" in scale:
        scale["machine"] = int(scale["machine"])
    device = Device(**{"flops" if name == "teraflops" else name: value for name, value in scale.items()})
    processes = launched() if launched() > 1 else None
    found = foresee(config, parallel=parallel, pipes=pipes, device=device, processes=processes)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(_foreseen(found, size))
    print_ranks(config.design, found["plan"])
    typer.echo(
        "Predicted for the plain PyTorch ops; nothing was allocated. Memory is the peak of each rank; times assume "
        "that communication and compute do not overlap."
    )


def _foreseen(found: Values, size: str | None = None) -> str:
    config, plan = found["config"], found["plan"]
    batch = plan["batch"]
    seen = "not fetched" if found["fingerprint"] is None else f"fingerprint {found['fingerprint']}"
    epochs = "" if found["passes"] is None else f", {found['passes']:.2f} epochs"
    stages = f"; {plan['pipeline']}" if plan["pipeline"] else ""
    why = f": {plan['why']}" if plan["why"] else ""
    return "\n".join(
        (
            f"design       {config['design']}, {config['depth']} blocks of {config['layout']}, width {config['width']}",
            f"corpus       {config['corpus']}, {config['tokenizer']}, {found['vocab']:,} tokens in the vocabulary"
            f"{_named(size)}, {seen}",
            f"parameters   {found['parameters']:,}, of which {found['stream_parameters']:,} added by the design",
            f"forward      {found['flops_per_token']:,.0f} FLOPs per token, of which "
            f"{found['stream_flops_per_token']:,.0f} by the design",
            f"training     {found['training_flops']:.3g} FLOPs for {found['tokens']:,} tokens{epochs}",
            f"state        at most {found['state_floats_per_token']:,} numbers per token, "
            f"{found['state_bytes_per_batch'] / 2**20:.1f} MiB per batch",
            f"layout       {plan['layout']}{stages}{why}",
            f"batches      {batch['steps']:,} steps ({batch['warmup_steps']:,} of warm-up) of {batch['rows']} rows x "
            f"{batch['context']:,} = {batch['tokens']:,} tokens: {batch['copies']} copies x {batch['microbatches']} "
            f"micro-batches x {batch['rows_of_a_microbatch']} rows",
            f"time         {plan['seconds_a_step']:.3g} s a step, {plan['tokens_per_second']:,.0f} tokens/s, "
            f"{plan['hours']:.3g} hours in all, on the given device",
        )
    )


def _named(size: str | None) -> str:
    from residua.lab.cost.targets import PRESETS

    own = None if size is None else PRESETS.get(size)
    return "" if own is None else f" ({size} is counted with {own['vocab']:,})"


def _summary(result: Result, out: Path) -> str:
    return (
        f"{result.design}: valid loss {result.loss:.4f}, perplexity {result.perplexity:.2f}, "
        f"{result.bits_per_byte:.4f} bits/byte after {result.tokens:,} tokens ({result.passes:.2f} epochs), "
        f"{result.time['tokens_per_second']:,.0f} tokens/s, in {out}"
    )


DEVICE: Mapping[str, tuple[float, str]] = {
    "teraflops": (1e12, "With --dry-run: TFLOP/s that a device sustains; 400 by default."),
    "inside": (1e9, "With --dry-run: GB/s between devices of one machine; 300 by default."),
    "between": (1e9, "With --dry-run: GB/s per device between machines; 50 by default."),
    "machine": (1, "With --dry-run: devices in one machine; 8 by default."),
}
"""What a time is estimated for: the unit of every number, and its help."""

sign(
    command,
    {name: field for name, field in config_fields().items() if name != "schedule"},
    **run_flags(),
    size=(
        str,
        typer.Option(
            None,
            "--size",
            metavar="demo|220M|350M|533M|1B|3B|7.6B|6x128",
            help="Shape and recipe of a named size, or a shape as DEPTHxWIDTH[xHEADS]; the other flags override it.",
        ),
    ),
    schedule=(
        list[str],
        typer.Option(
            [],
            "--schedule",
            metavar="cosine|wsd|gpipe|1f1b|...",
            help=f"{config_fields()['schedule'].help} [default: cosine] With pp also the pipeline's: gpipe, 1f1b, "
            "interleaved or zero-bubble [default: 1f1b]; give it twice to set both.",
            show_default=False,
        ),
    ),
    parallel=(
        str,
        typer.Option(
            None,
            "--parallel",
            metavar="pp=,dp=,fsdp=,tp=|auto",
            help="Under torchrun: how the processes share the work.",
        ),
    ),
    microbatches=(
        int,
        typer.Option(
            None, "--microbatches", help="With pp: parts of a step's rows on one copy; about 2 pp by default."
        ),
    ),
    virtual=(
        int,
        typer.Option(
            None, "--virtual", help="With pp: stages on a rank; 2 by default where the schedule allows, else 1."
        ),
    ),
    offload=(
        bool,
        typer.Option(
            False, "--offload", help="With fsdp: keep pieces, gradients and the optimizer's state in host memory."
        ),
    ),
    dry_run=(
        bool,
        typer.Option(
            False,
            "--dry-run",
            help="Print size, plan of shards and stages, memory of every rank, bytes over links and estimated time, "
            "and stop; nothing is allocated.",
        ),
    ),
    **{name: (float, typer.Option(None, f"--{name}", help=text)) for name, (_, text) in DEVICE.items()},
    as_json=(bool, typer.Option(False, "--json", help="Print the result as JSON.")),
)
