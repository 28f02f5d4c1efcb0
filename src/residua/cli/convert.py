"""`residua convert`: a Hugging Face decoder on another residual stream, checked to be the same network, and saved."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from residua.cli._flags import dtype_of, path_option, show
from residua.extras import need
from residua.hf.anatomy import Model, Tokenizer
from residua.lab.common.files import LITTER, contents

if TYPE_CHECKING:
    import torch


def command(
    model: str = typer.Argument(..., help="Directory of a Hugging Face decoder, or its hub name."),
    design: str = typer.Option(
        None, "--design", "-d", help="Design, such as delta:blocks=4; leave it out for a released Delta checkpoint."
    ),
    out: Path = path_option(..., "--out", "-o", help="Output directory; must be new or empty."),
    layout: str = typer.Option(None, help="Insert sublayers, as in swa:window=16,attn,mlp."),
    dtype: str = typer.Option("auto", help="dtype to load: auto, float32, bfloat16 or float16."),
    shard: str = typer.Option("5GB", "--max-shard-size", help="Maximum size of a weight file."),
    revision: str = typer.Option(None, help="Branch, tag or commit on the hub."),
    seed: int = typer.Option(0, help="Random seed of the new parameters."),
    check: bool = typer.Option(True, help="Check before saving that the logits equal the base model's."),
    to: str = typer.Option(
        None, "--to", help="From a converted model: standard, its base (if the design has no effect), or onnx."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Convert a Hugging Face checkpoint to another design with the same logits; writes nothing if they would change."""
    need("hf", "transformers", "accelerate")
    if not 0 <= seed < 2**63:
        raise ValueError(f"--seed {seed}: it is from 0 to below 2**63")
    if out.exists() and (not out.is_dir() or contents(out)):
        raise ValueError(f"{out} exists and is not empty; choose another directory")
    kind = None if dtype == "auto" else dtype_of(dtype, "auto", "float32", "bfloat16", "float16")
    if to is not None:
        if design is not None or layout is not None:
            raise ValueError("--to takes a design out of a converted model; drop --design and --layout")
        _out_of(model, to, out, shard, kind, revision, as_json)
        return
    from residua.hf.convert import convert
    from residua.hf.official import is_official, load_official
    from residua.hf.storage import load_tokenizer

    tokenizer = load_tokenizer(model) if Path(model).is_dir() else None
    if is_official(Path(model)):
        if design is not None or layout is not None:
            raise ValueError(
                f"{model} is a released Delta checkpoint, which already has a design; drop --design and --layout"
            )
        found = load_official(Path(model), dtype=kind)
    else:
        if design is None:
            raise ValueError("--design is missing, such as --design delta:blocks=4; residua designs lists them")
        found = convert(
            model, design, layout=layout, tokenizer=tokenizer, dtype=kind or "auto", revision=revision, check=check,
            seed=seed, say=None if as_json else typer.echo,
        )  # fmt: skip
    _save(found, tokenizer if tokenizer is not None else load_tokenizer(model, revision=revision), out, shard)
    stream, named = found.base_model.stream, found.named_parameters()
    added = sum(each.numel() for name, each in named if ".stream." in name or ".inserted." in name)
    report = {
        "out": str(out),
        "base": model,
        "architecture": found.config.model_type,
        "design": stream.spec,
        "stream": found.config.stream,
        "layout": found.config.layout,
        "parameters_added": added,
        "identity": found.config.identity,
    }
    show(report, as_json, lambda _: typer.echo(f"saved to {out}: {added:,} parameters added, {stream.spec}"))


def _out_of(
    source: str, to: str, out: Path, shard: str, kind: torch.dtype | None, revision: str | None, as_json: bool
) -> None:
    """Take a converted model to a form that needs no residua; one of another kind than a language model is refused."""
    from transformers import AutoModelForCausalLM

    from residua.hf.complete import load
    from residua.hf.export import export_onnx
    from residua.hf.restore import restore
    from residua.hf.storage import load_config, load_tokenizer

    if to not in ("standard", "onnx"):
        raise ValueError(f"--to must be standard or onnx, not {to!r}")
    config = load_config(source, revision=revision)
    model = load(AutoModelForCausalLM, source, config, dtype=kind or "auto", revision=revision or "main")
    tokenizer = load_tokenizer(source, revision=revision)
    if to == "standard":
        _save(restore(model, tokenizer=tokenizer), tokenizer, out, shard)
    else:
        _write(out, lambda folder: export_onnx(model, folder / "model.onnx"), tokenizer)
    show({"out": str(out), "from": source, "to": to}, as_json, lambda _: typer.echo(f"saved to {out}: {to}"))


def _save(model: Model, tokenizer: Tokenizer, out: Path, shard: str) -> None:
    _write(out, lambda folder: model.save_pretrained(folder, max_shard_size=shard), tokenizer)


def _write(out: Path, write: Callable[[Path], None], tokenizer: Tokenizer) -> None:
    """Write to a temporary directory and rename it: the output is complete or absent."""
    scratch = out.absolute().with_name(f".{out.name}.writing")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        write(scratch)
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        if out.is_dir():
            for name in LITTER:
                (out / name).unlink(missing_ok=True)
            out.rmdir()
        scratch.replace(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
