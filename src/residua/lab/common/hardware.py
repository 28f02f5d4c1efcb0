"""What a speed was measured on: two speeds compare only where this is the same."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def hardware(device: torch.device) -> str:
    """The kind of a device: a GPU by its name, a processor by its model and the instructions that torch uses."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{processor()}, {torch.backends.cpu.get_cpu_capability()}"


def processor() -> str:
    """The model of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")
    except OSError:
        return platform.processor() or "unknown"
