"""Every Triton kernel compiles to machine code for real GPUs, which takes none: the interpreter accepts more than the
compiler does, and says nothing about registers, shared memory and the width of loads."""

import re
import subprocess

import pytest
import torch

from residua.ops import _triton

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from residua.ops.attend.triton import attend
from residua.ops.delta_write.triton import delta_write
from residua.ops.mix.triton import mix
from residua.ops.remix.triton import remix
from residua.ops.window_attend.triton import window_attend

pytestmark = pytest.mark.slow

NAMES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64", torch.int64: "i64",
}  # fmt: skip


class Compiler:
    """Stands in for the launcher: compiles what would be launched, specialised to its arguments as Triton does."""

    def __init__(self, folder, target):
        self.folder, self.target = folder, target
        self.kernels = {}

    def __call__(self, kernel, grid, where, *arguments, warps=4, num_stages=3, **settings):
        signature, constants, hints = {}, {}, {}
        for i, parameter in enumerate(kernel.params):
            value = arguments[i] if i < len(arguments) else settings.pop(parameter.name)
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + NAMES[value.dtype]
                divisible = value.data_ptr() % 16 == 0
            elif parameter.is_constexpr or value is None or (value == 1 and not parameter.annotation_type):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
                continue
            else:
                signature[parameter.name] = parameter.annotation_type or "i32"
                divisible = value % 16 == 0
            if divisible:
                hints[(i,)] = [["tt.divisibility", 16]]
        assert not settings, f"{kernel.__name__} takes no {sorted(settings)}"
        options = {"num_warps": warps, "num_stages": num_stages}
        done = triton.compile(ASTSource(kernel, signature, constants, hints), target=self.target, options=options)
        self.kernels.setdefault(kernel.__name__, []).append((done.asm["ptx"], done.asm["cubin"], done.metadata.shared))

    def names(self):
        return set(self.kernels)

    def bytes_a_load(self):
        """Of each kernel, the bytes of its widest load."""
        return {
            name: min(
                max(
                    int(many or 1) * int(bits) // 8
                    for many, bits in re.findall(r"ld\.global(?:\.\w+?)*?(?:\.v(\d))?\.b(\d+)", code)
                )
                for code, *_ in found
            )
            for name, found in self.kernels.items()
        }

    def usage(self):
        """Of each kernel, registers a thread, bytes of stack that they spill to, and shared memory."""
        tool = triton.knobs.nvidia.cuobjdump.path
        found = {}
        for name, codes in self.kernels.items():
            for _, code, shared in codes:
                (self.folder / "code").write_bytes(code)
                text = subprocess.run(
                    [tool, "--dump-resource-usage", self.folder / "code"], capture_output=True, text=True, check=True
                ).stdout
                registers, stack = (int(re.search(rf"{what}:(\d+)", text).group(1)) for what in ("REG", "STACK"))
                found.setdefault(name, []).append((registers, stack, shared))
        return found


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """What the test would have launched."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiler = Compiler(tmp_path, GPUTarget("cuda", 80, 32))
    monkeypatch.setattr(_triton, "launch", compiler)
    return compiler


def value(*shape, dtype=torch.bfloat16):
    return torch.zeros(*shape, dtype=dtype, requires_grad=True)


def through(function, *arguments, **options):
    """Forward and backward."""
    function(*arguments, **options).sum().backward()


def assert_fits(compiler):
    """Every kernel keeps its numbers in registers and its blocks in the shared memory of small GPUs too."""
    for name, one in compiler.usage().items():
        for registers, stack, shared in one:
            # a 64-bit division is a call, whose frame is on the stack too
            assert stack <= 32, f"{name} spills {stack} bytes beyond {registers} registers"
            assert shared <= 99 * 1024, f"{name} takes {shared} bytes of shared memory"


@pytest.mark.parametrize(
    ("dtype", "width", "options"),
    [
        (torch.bfloat16, 768, {}),
        (torch.bfloat16, 4096, {}),
        (torch.float32, 96, {"heads": 3, "total": True, "centered": True, "null": value(1)}),
        (torch.float64, 1280, {"null": value(1)}),
    ],
    ids=["bfloat16-768", "bfloat16-4096", "float32-96-heads", "float64-1280"],
)
def test_triton_attend_compiles(compiler, dtype, width, options):
    defaults = {"eps": 1e-6, "null": None, "heads": 1, "total": False, "centered": False}
    through(attend, value(width), tuple(value(1, 5, width, dtype=dtype) for _ in range(3)), **defaults | options)
    # 16 bytes at a time, though the addresses come out of a table
    assert compiler.bytes_a_load() == {"_forward_kernel": 16, "_backward_kernel": 16}
    assert_fits(compiler)


@pytest.mark.parametrize(
    "shape", [(3,), (3, 1280), (3, 1, 5), (4, 3, 1, 5)], ids=["static", "channel", "token", "lane"]
)
def test_triton_mix_compiles(compiler, shape):
    through(mix, value(*shape, dtype=torch.float32), tuple(value(1, 5, 1280) for _ in range(3)))
    assert compiler.names() == {
        "_forward_kernel",
        "_channel_backward_kernel" if len(shape) == 2 else "_backward_kernel",
    }
    assert set(compiler.bytes_a_load().values()) == {16}
    assert_fits(compiler)


def test_triton_remix_compiles(compiler):
    through(remix, value(1, 5, 4, 5, dtype=torch.float32), value(1, 5, 4, 768))
    assert set(compiler.bytes_a_load().values()) == {16}
    assert_fits(compiler)


@pytest.mark.parametrize("channels", [1, 4])
def test_triton_delta_write_compiles(compiler, channels):
    beta = value(1, 5, dtype=torch.float32)
    through(delta_write, value(1, 5, channels, 768), value(1, 5, 768), value(1, 5, channels), beta, eps=1e-3)
    assert set(compiler.bytes_a_load().values()) == {16}
    assert_fits(compiler)


@pytest.mark.parametrize(
    ("mode", "dtype", "heads", "tokens", "width", "causal", "bias"),
    [
        ("sliding", torch.bfloat16, 4, 200, 128, True, False),
        ("sliding", torch.bfloat16, 1, 1, 64, True, False),
        ("local", torch.float16, 2, 40, 64, False, True),
        ("local", torch.float32, 2, 40, 80, True, True),
    ],
    ids=["bfloat16-128", "decode", "float16-bias", "float32-80"],
)
def test_triton_window_attend_compiles(compiler, mode, dtype, heads, tokens, width, causal, bias):
    through(
        window_attend, value(1, heads, tokens, width, dtype=dtype),
        *(value(1, 1, tokens, width, dtype=dtype) for _ in "kv"),
        window=16, mode=mode, queries=None, keys=None, causal=causal,
        bias=value(heads, 16 if causal else 31) if bias else None,
    )  # fmt: skip
    assert compiler.names() == {"bounds_kernel", "forward_kernel", "query_backward_kernel", "key_backward_kernel"}
    assert_fits(compiler)
