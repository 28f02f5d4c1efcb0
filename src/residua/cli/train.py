"""`residua train`: one run. Its flags are the fields of `TrainConfig`."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from residua.cli._flags import read_settings, run_flags, running, sign
from residua.lab.common.files import Values
from residua.lab.train.config import TrainConfig, config_fields

if TYPE_CHECKING:
    from residua.lab.train.run import Result


def command(
    out: Path,
    config: Path | None,
    resume: str,
    track: list[str],
    parallel: str | None,
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
        chosen = resolve(config, {name: value for name, value in flags.items() if value is not None})
        if dry_run:
            if not first:
                return
            found = foresee(chosen)
            typer.echo(json.dumps(found, indent=2) if as_json else _foreseen(found))
            return
        if out is None:
            raise ValueError("--out is missing: give the output directory of the run, such as --out runs/a")
        if launched() > 1:
            # what goes wrong reaches `one_voice`, which tells it once
            with Display() if first else nullcontext() as display:
                result = train(chosen, out, resume=resume, track=track, on_event=display, parallel=parallel)  # type: ignore[arg-type]
            if not first:
                return
        else:
            with running(out) as display:
                result = train(chosen, out, resume=resume, track=track, on_event=display, parallel=parallel)  # type: ignore[arg-type]
        typer.echo(json.dumps(result.to_json(), indent=2) if as_json else _summary(result, out))


def resolve(file: Path | None, flags: Values) -> TrainConfig:
    """A config from a JSON or TOML file of fields, with the flags over it."""
    return TrainConfig.from_json(read_settings(file) | flags)


def foresee(config: TrainConfig) -> Values:
    """The size and cost of a run, from its configuration; the corpus is prepared for it."""
    from residua.lab.data import prepare
    from residua.model import measure

    tokens = prepare(config.corpus, config.tokenizer)
    sizes = measure(config.model(tokens.vocab), config.context)
    seen = config.steps * config.tokens_per_step
    held, narrow = max(sizes.state_floats.values()), config.dtype == "bfloat16" and not config.fp32_stream
    return {
        "config": config.to_json(),
        "vocab": tokens.vocab,
        "fingerprint": tokens.manifest["fingerprint"],
        "parameters": sizes.parameters,
        "stream_parameters": sizes.stream_parameters,
        "flops_per_token": sizes.flops_per_token,
        "stream_flops_per_token": sizes.stream_flops_per_token,
        # a backward pass costs two forwards, and recomputation one more
        "training_flops": (4 if config.checkpointed else 3) * sizes.flops_per_token * seen,
        "state_floats_per_token": held,
        "state_bytes_per_batch": held * config.batch * config.context * (2 if narrow else 4),
        "tokens": seen,
        "passes": seen / len(tokens.train),
    }


def _foreseen(found: Values) -> str:
    config = found["config"]
    return "\n".join(
        (
            f"design       {config['design']}, {config['depth']} blocks of {config['layout']}, width {config['width']}",
            f"corpus       {config['corpus']}, {config['tokenizer']}, {found['vocab']:,} tokens in the vocabulary, "
            f"fingerprint {found['fingerprint']}",
            f"parameters   {found['parameters']:,}, of which {found['stream_parameters']:,} added by the design",
            f"forward      {found['flops_per_token']:,.0f} FLOPs per token, of which "
            f"{found['stream_flops_per_token']:,.0f} by the design",
            f"training     {found['training_flops']:.3g} FLOPs for {found['tokens']:,} tokens, "
            f"{found['passes']:.2f} epochs",
            f"state        at most {found['state_floats_per_token']:,} numbers per token, "
            f"{found['state_bytes_per_batch'] / 2**20:.1f} MiB per batch",
        )
    )


def _summary(result: Result, out: Path) -> str:
    return (
        f"{result.design}: valid loss {result.loss:.4f}, perplexity {result.perplexity:.2f}, "
        f"{result.bits_per_byte:.4f} bits/byte after {result.tokens:,} tokens ({result.passes:.2f} epochs), "
        f"{result.time['tokens_per_second']:,.0f} tokens/s, in {out}"
    )


sign(
    command,
    config_fields(),
    **run_flags(),
    parallel=(
        str,
        typer.Option(
            None, "--parallel", metavar="dp=,fsdp=,tp=|auto", help="Under torchrun: how the processes share the work."
        ),
    ),
    dry_run=(bool, typer.Option(False, "--dry-run", help="Print parameters, FLOPs and state size, and stop.")),
    as_json=(bool, typer.Option(False, "--json", help="Print the result as JSON.")),
)
