"""The model card of a converted model: design, base, licence and identity check, from its config alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from residua._version import __version__
from residua.hf.anatomy import PREFIX, Model


def card(model: Model) -> str:
    """README.md for the model's directory or hub page."""
    config, stream = model.config, model.base_model.stream
    base = getattr(config, "base", "") or config.model_type.removeprefix(PREFIX)
    licence = getattr(config, "license", None)
    added = sum(each.numel() for each in stream.parameters())
    lines = [
        "---",
        "library_name: transformers",
        "tags: [residua, residual-stream]",
        *([f"license: {licence}"] if licence else []),
        *([f"base_model: {base}"] if "/" in base and not base.startswith((".", "/")) else []),
        "---",
        "",
        f"# {base} on `{stream.spec}`",
        "",
        f"A {config.model_type.removeprefix(PREFIX)} decoder whose residual stream is the design `{stream.name}` "
        f"({stream.paper}), made with residua {__version__}:",
        "",
        f"    {(stream.__doc__ or '').strip().splitlines()[0]}",
        "",
        f"- all options: `{', '.join(f'{key}={value}' for key, value in stream.options.items()) or 'none'}`",
        f"- layout: `{config.layout or 'as the base'}`",
        f"- parameters added: {added:,}, kept in float32 under `stream`",
        f"- licence: {licence or 'that of the base model'}; the conversion adds no condition",
        f"- identity at conversion: {_identity(config.identity)}",
        "",
        "```python",
        "import residua  # pip install residua[hf]; or trust_remote_code=True with the file beside this one",
        "from transformers import AutoModelForCausalLM",
        "",
        'model = AutoModelForCausalLM.from_pretrained("this directory or its hub name")',
        "```",
        "",
    ]
    return "\n".join(lines)


def licence_of(folder: Path) -> str | None:
    """The licence that the card of a downloaded model names at its top."""
    file = folder / "README.md"
    if not file.is_file():
        return None
    found = re.match(r"---\n(.*?)\n---", file.read_text(errors="replace"), re.DOTALL)
    named = re.search(r"^license: *(\S+)", found[1], re.MULTILINE) if found else None
    return named[1] if named else None


def _identity(report: Mapping[str, Any] | None) -> str:
    if not report:
        return "not checked"
    gaps = ", ".join(f"{name} {gap:.2g}" for name, gap in report["batches"].items())
    return f"max |logit difference| / RMS(logits) = {report['max_gap']:.2g} ({gaps}), bound {report['bound']:.2g}"
