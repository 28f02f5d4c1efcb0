"""What a GPU's compiler makes of every Triton kernel, which takes no GPU: registers, spills and shared memory.

A launch is not run but compiled, specialised to its arguments as Triton does, for processors of four kinds. A kernel
without spills keeps its numbers where it computes.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from residua import ops
from residua.lab.bench import record
from residua.lab.bench.timing import Measured
from residua.lab.common.files import write_text
from residua.lab.gpu.cases import CASES, KernelCase, Outputs
from residua.ops import _triton, _triton_registry

Argument = Tensor | int | float | str | torch.dtype | None
"""What a kernel is launched with: tensors, sizes and settings."""


class Target(NamedTuple):
    """A processor to compile for."""

    name: str
    backend: str
    arch: int | str
    lanes: int
    """Threads of a warp."""
    shared: int
    """Bytes of shared memory that one program may have."""
    registers: int
    """Of 32 bits, that all threads of a processor share."""


TARGETS = (
    Target("sm_80", "cuda", 80, 32, 163 << 10, 1 << 16),
    Target("sm_90", "cuda", 90, 32, 227 << 10, 1 << 16),
    Target("sm_100", "cuda", 100, 32, 227 << 10, 1 << 16),
    Target("gfx942", "hip", "gfx942", 64, 64 << 10, 1 << 17),
)
"""A100, H100, B200 and MI300."""

SHAPES = ((torch.bfloat16, 768), (torch.bfloat16, 4096), (torch.float32, 96), (torch.float64, 1280))
"""Types and widths that are compiled, odd ones too."""

_NAMES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int64: "i64",
}  # fmt: skip


class Usage(NamedTuple):
    """Of one kernel, compiled."""

    kernel: str
    warps: int
    registers: int
    """A thread."""
    spills: int
    """Bytes a thread that do not fit its registers."""
    shared: int
    """Bytes a program."""
    widest: int
    """Bytes of its widest load; 0 where it loads nothing, or where the code does not say."""

    def fits(self, target: Target) -> bool:
        """Whether it runs there, and without spills."""
        threads = self.warps * target.lanes
        return not self.spills and self.shared <= target.shared and self.registers * threads <= target.registers


class Compiler:
    """A launcher that compiles for a target what it is given, once for each specialisation."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.found: dict[str, Usage] = {}

    def __call__(
        self, kernel: Any, grid: object, where: Tensor, *arguments: Argument, warps: int = 4, num_stages: int = 3,
        **settings: Argument,
    ) -> None:  # fmt: skip
        from triton import compile
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        signature, constants, hints = _specialised(kernel, arguments, settings)
        key = repr((kernel.__name__, signature, constants, hints, warps, num_stages))
        if key in self.found:
            return
        target = GPUTarget(self.target.backend, self.target.arch, self.target.lanes)
        options = {"num_warps": warps, "num_stages": num_stages}
        done = compile(ASTSource(kernel, signature, constants, hints), target=target, options=options)
        read: Any = _nvidia if self.target.backend == "cuda" else _amd
        registers, spills, widest = read(done.asm, self.target.arch)
        self.found[key] = Usage(kernel.__name__, warps, registers, spills, done.metadata.shared, widest)


def _specialised(
    kernel: Any, arguments: Sequence[Argument], settings: dict[str, Argument]
) -> tuple[dict[str, str], dict[str, Argument], dict[tuple[int, ...], list[list[str | int]]]]:
    """The signature, the constants and the hints that Triton would compile these arguments with."""
    signature: dict[str, str] = {}
    constants: dict[str, Argument] = {}
    hints: dict[tuple[int, ...], list[list[str | int]]] = {}
    for i, parameter in enumerate(kernel.params):
        value = arguments[i] if i < len(arguments) else settings.pop(parameter.name)
        if isinstance(value, Tensor):
            signature[parameter.name] = "*" + _NAMES[value.dtype]
            divisible = value.data_ptr() % 16 == 0
        elif parameter.is_constexpr or value is None or (value == 1 and not parameter.annotation_type):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        else:
            signature[parameter.name] = parameter.annotation_type or "i32"
            divisible = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
        if divisible:
            hints[(i,)] = [["tt.divisibility", 16]]
    if settings:
        raise ValueError(f"{kernel.__name__} takes no {', '.join(sorted(settings))}")
    return signature, constants, hints


def _nvidia(code: Any, arch: int) -> tuple[int, int, int]:
    """Registers, bytes of spills and bytes of the widest load."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code["cubin"])
        file.flush()
        usage = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name)
    registers, stack = (int(re.findall(rf"{what}:(\d+)", usage)[-1]) for what in ("REG", "STACK"))
    loads = re.findall(r"ld\.global(?:\.\w+?)*?(?:\.v(\d))?\.b(\d+)", code["ptx"])
    widest = max((int(many or 1) * int(bits) // 8 for many, bits in loads), default=0)
    # a call, as of a 64-bit division, has a frame on the stack too: the assembler says what a spill is
    return registers, _spilled(code["ptx"], arch) if stack else 0, widest


def _spilled(text: str, arch: int) -> int:
    """Bytes of registers that the assembler stores to memory, compiling as Triton does."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(text)
        name, out = sm_arch_from_capability(arch), str(file.with_suffix(".cubin"))
        said = _output(
            get_ptxas(arch).path, "-lineinfo", "-v", "--regAllocOptLevel=2", f"--gpu-name={name}", str(file), "-o", out
        )
    return sum(int(one) for one in re.findall(r"(\d+) bytes spill stores", said))


def _output(*command: str) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    return ran.stdout + ran.stderr


def _amd(code: Any, arch: str) -> tuple[int, int, int]:
    text = code["amdgcn"]

    def number(what: str) -> int:
        return sum(int(one) for one in re.findall(rf"\.{what}:\s*(\d+)", text))

    loads = re.findall(r"(?:global|buffer)_load_dword(?:x(\d))?\b", text)
    widest = max((4 * int(many or 1) for many in loads), default=0)
    # a scalar register that is put into a lane of a vector register stays a register
    return number("vgpr_count"), number("private_segment_fixed_size"), widest


def compiled(case: KernelCase, dtype: torch.dtype, width: int, target: Target) -> list[Usage]:
    """Every kernel of a case, forward and backward."""
    given = [one.requires_grad_(case.graded) for one in case.draw(5, width, 3, dtype)]
    compiler = Compiler(target)
    with ExitStack() as stack:
        stack.enter_context(_triton_registry.serving("cpu"))
        stack.enter_context(ops.backend("triton", strict=True))
        stack.enter_context(_triton.launching(compiler))
        stack.enter_context(torch.set_grad_enabled(case.graded))
        made: Outputs = case.run(*given)
        if case.graded:
            outs = made if isinstance(made, tuple) else (made,)
            torch.autograd.backward([one for one in outs if one.grad_fn], [one for one in outs if one.grad_fn])
    return list(compiler.found.values())


def measure(cases: Iterable[KernelCase] = CASES, targets: Iterable[Target] = TARGETS) -> Measured:
    """The table: every kernel of every case at every shape, and what it takes of each target."""
    import triton

    rows: dict[tuple[str, str, str, int], Measured] = {}
    for case in cases:
        for dtype, width in SHAPES:
            if dtype not in case.types:
                continue
            for target in targets:
                for usage in compiled(case, dtype, width, target):
                    name = str(dtype).removeprefix("torch.")
                    row = rows.setdefault((case.name, usage.kernel, name, width), {"warps": usage.warps, "targets": {}})
                    row["targets"][target.name] = _worst(row["targets"].get(target.name), usage, target)
    keys = ("case", "kernel", "dtype", "width")
    return {
        "triton": triton.__version__, "sources": digest(),
        "rows": [dict(zip(keys, key, strict=True)) | row for key, row in rows.items()],
    }  # fmt: skip


def _worst(before: Measured | None, usage: Usage, target: Target) -> Measured:
    """Of one kernel at one shape, whatever it was specialised to."""
    found = {
        "registers": usage.registers, "spills": usage.spills, "shared": usage.shared, "widest": usage.widest,
        "fits": usage.fits(target),
    }  # fmt: skip
    if before is None:
        return found
    return {key: (min if key in ("widest", "fits") else max)(one, found[key]) for key, one in before.items()}


def write(path: Path, measured: Measured, command: str) -> None:
    """A results file of the table, a row a line."""
    rows = ",\n".join(f"    {json.dumps(row)}" for row in measured["rows"])
    head = json.dumps({key: one for key, one in measured.items() if key != "rows"})[1:-1]
    first = f'"format": {record.FORMAT}, "command": {json.dumps(command)}'
    write_text(path, f'{{{first},\n  "kernels": {{{head}, "rows": [\n{rows}\n  ]}}}}\n')


def digest() -> str:
    """Of every source that decides what is compiled: the kernels, their launches and the cases."""
    from residua.lab.gpu import cases

    folder = Path(ops.__file__).parent
    files = [Path(__file__), Path(cases.__file__), *folder.glob("_triton*.py"), *folder.glob("*/triton*.py")]
    total = hashlib.sha256()
    for file in sorted(files, key=lambda one: one.name + one.parent.name):
        total.update(file.read_bytes())
    return total.hexdigest()
