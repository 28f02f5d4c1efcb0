"""`residua doctor`: versions, kernels and caches, and how to install what is missing."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

import typer

from residua.cli import _device
from residua.cli._flags import show
from residua.lab.common.files import Values

EXTRAS = {
    "hf": ("transformers", "accelerate", "peft"),
    "eval": ("lm-eval",),
    "triton": ("triton",),
    "data": ("datasets",),
    "track": ("tensorboard", "trackio", "wandb"),
}
"""The extras of the package and what each brings."""

CORE = ("torch", "numpy", "safetensors", "jaxtyping", "filelock", "typer", "rich", "tokenizers", "jinja2", "matplotlib")


def command(
    device: str = typer.Option("cpu", "--device", help="cuda: check every kernel against float64 on a GPU too."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Print versions, threads, kernels and caches; exit 1 if a core package is missing, or if a kernel is wrong."""
    found = examine()
    if device != "cpu":
        found["gpu"] = _device.doctor(device)
    show(found, as_json, _print)
    if any(version is None for version in found["core"].values()) or found.get("gpu", {}).get("failed"):
        raise typer.Exit(1)


def examine() -> Values:
    """Everything the command prints."""
    import torch

    from residua import __version__, native
    from residua.cache import cache_root
    from residua.ops import _backend

    return {
        "residua": __version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "core": {name: _installed(name) for name in CORE} | {"torch": str(torch.__version__)},  # which names the build
        "extras": {extra: {name: _installed(name) for name in names} for extra, names in EXTRAS.items()},
        "backend": _backend.choice(),
        "strict": _backend.strict(),
        "kernels": _backend.kernels(),
        "native": native.status(),
        "cache": {"path": str(cache_root()), "bytes": _size(cache_root())},
    }


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0


def _print(found: Values) -> None:
    lines = [
        f"residua      {found['residua']} on Python {found['python']}, {found['machine']}",
        f"processor    {found['cores']} cores, {found['threads']} threads, {found['instructions']}",
        f"accelerator  {found['accelerator'] or 'none'}",
        "core         " + ", ".join(f"{name} {version or 'MISSING'}" for name, version in found["core"].items()),
    ]
    for extra, packages in found["extras"].items():
        absent = [name for name, version in packages.items() if version is None]
        have = ", ".join(f"{name} {version}" for name, version in packages.items() if version)
        cure = f"missing {', '.join(absent)}: pip install 'residua[{extra}]'" if absent else ""
        lines.append(f"extra {extra:<6} " + "; ".join(filter(None, (have, cure))))
    native = found["native"]
    kernels: dict[str, list[str]] = {}
    for op, on in found["kernels"].items():
        for device, name in on.items():
            kernels.setdefault(device if name == device else f"{device}, {name}", []).append(op)
    lines += [f"kernels      {where}: {', '.join(each)}" for where, each in sorted(kernels.items())]
    lines += [
        f"backend      {found['backend']}{', strict: a fallback is an error' if found['strict'] else ''}",
        f"native       {native['reason'] or '{binary} ({instructions})'.format_map(native)}",
        f"cache        {found['cache']['path']} ({found['cache']['bytes'] / 2**20:.1f} MiB)",
    ]
    typer.echo("\n".join(lines))
    if "gpu" in found:
        _device.show_check(found["gpu"])
