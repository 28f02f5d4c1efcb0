"""`residua convert`: a Hugging Face decoder on another residual stream, checked to be the same network, and saved."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import typer

from residua.extras import need


def command(
    model: str = typer.Argument(..., help="Directory of a Hugging Face decoder, or its hub name."),
    design: str = typer.Option(
        None, "--design", "-d", help="Design, such as delta:blocks=4; leave it out for a released Delta checkpoint."
    ),
    out: Path = typer.Option(..., "--out", "-o", help="Output directory; must be new or empty."),
    layout: str = typer.Option(None, help="Insert sublayers, as in swa:window=16,attn,mlp."),
    dtype: str = typer.Option("auto", help="dtype to load: auto, float32, bfloat16 or float16."),
    shard: str = typer.Option("5GB", "--max-shard-size", help="Maximum size of a weight file."),
    revision: str = typer.Option(None, help="Branch, tag or commit on the hub."),
    seed: int = typer.Option(0, help="Random seed of the new parameters."),
    check: bool = typer.Option(True, help="Check before saving that the logits equal the base model's."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Convert a Hugging Face checkpoint to another design with the same logits; writes nothing if they would change."""
    need("hf", "transformers", "accelerate")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty; choose another directory")
    found, tokenizer = _convert(model, design, layout, dtype, revision, seed, check, quiet=as_json)
    _save(found, tokenizer, out, shard)
    stream = found.base_model.stream
    report = {
        "out": str(out),
        "base": model,
        "architecture": found.config.model_type,
        "design": stream.spec,
        "stream": found.config.stream,
        "layout": found.config.layout,
        "parameters_added": _added(found),
        "identity": found.config.identity,
    }
    if as_json:
        typer.echo(json.dumps(report, indent=2))
    else:
        typer.echo(f"saved to {out}: {report['parameters_added']:,} parameters added, {stream.spec}")


def _convert(
    model: str,
    design: str | None,
    layout: str | None,
    dtype: str,
    revision: str | None,
    seed: int,
    check: bool,
    quiet: bool,
) -> tuple[Any, Any]:
    import torch

    from residua.hf.convert import convert
    from residua.hf.official import is_official, load_official
    from residua.hf.storage import load_tokenizer

    if dtype not in ("auto", "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype is auto, float32, bfloat16 or float16, not {dtype!r}")
    kind = None if dtype == "auto" else getattr(torch, dtype)
    if is_official(Path(model)):
        if design is not None or layout is not None:
            raise ValueError(
                f"{model} is a released Delta checkpoint, which already has a design; drop --design and --layout"
            )
        return load_official(Path(model), dtype=kind), load_tokenizer(model)
    if design is None:
        raise ValueError("--design is missing, such as --design delta:blocks=4; residua designs lists them")
    tokenizer = load_tokenizer(model) if Path(model).is_dir() else None
    found = convert(
        model, design, layout=layout, tokenizer=tokenizer, dtype=kind or "auto", revision=revision, check=check,
        seed=seed, say=None if quiet else typer.echo,
    )  # fmt: skip
    return found, tokenizer if tokenizer is not None else load_tokenizer(model)


def _save(model: Any, tokenizer: Any, out: Path, shard: str) -> None:
    """Write to a temporary directory and rename it: the output is complete or absent."""
    scratch = out.absolute().with_name(f".{out.name}.writing")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        model.save_pretrained(scratch, max_shard_size=shard)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        if out.is_dir():
            out.rmdir()
        scratch.replace(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _added(model: Any) -> int:
    return sum(each.numel() for name, each in model.named_parameters() if ".stream." in name or ".inserted." in name)
