"""A training step and a decoding step of every design on fake CUDA tensors: what would be sent to a GPU, without one.

Not collected by itself: `test_cuda_traced.py` runs it in a process whose PyTorch believes in a device.
"""

import importlib
import pkgutil

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from residua import ops, registry
from residua.model import Cache, ModelConfig, Transformer, token_loss
from residua.ops import _triton_registry

ROWS, TOKENS = 8, 128  # times a width of 64: as many numbers as reads are begun in groups for
DESIGNS = [*registry.names(), "delta:blocks=2", "ddl:channels=2,compress=token,expand=conv"]
KERNELS = {
    "attnres": {"attend_group"}, "delta": {"attend_group"}, "depthswa": {"attend_qkv"}, "mudd": {"mix"},
    "ddl:channels=2,compress=token,expand=conv": {"delta_write", "shortconv"},
    "hyper": {"remix"}, "mhc": {"sinkhorn", "remix"}, "standard": {"window_attend", "shortconv"},
}  # fmt: skip
"""Some that must run, so that a design which went another way would be noticed."""


class Watched(TorchDispatchMode):
    """What reaches the device, and what would make the host wait for it."""

    def __init__(self):
        super().__init__()
        self.calls, self.wrong = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [one for one in pytree.tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
        for tag in (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape):
            if tag in function.tags and not self._by_numbers(function, args):
                self.wrong.append(f"{function}: {tag.name}")
        if any(one.device.type != "cuda" for one in tensors):
            self.wrong.append(f"{function}: on {sorted({str(one.device) for one in tensors})}")
        if function.namespace != "prim":  # asks a tensor for its device; a fake one that is new is asked once more
            self.calls.append((str(function), [(tuple(one.shape), one.dtype) for one in tensors]))
        return out

    @staticmethod
    def _by_numbers(function, args):
        """Indexing is by a mask, whose sum decides the shape, or by numbers."""
        if function is not torch.ops.aten.index.Tensor:
            return False
        return not any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


@pytest.fixture
def references(monkeypatch):
    """The calls of definitions and plain forms, which nothing on a GPU is left to."""
    called = []
    for op in {served.split("_")[0] for served in _triton_registry.SERVED} | set(_triton_registry.SERVED):
        try:
            folder = importlib.import_module(f"residua.ops.{op}")
        except ModuleNotFoundError:
            continue
        for module in pkgutil.iter_modules(folder.__path__):
            if module.name in ("reference", "linear", "chunked"):
                plain = importlib.import_module(f"{folder.__name__}.{module.name}")
                for name in ("attend", "weights", op):
                    if callable(getattr(plain, name, None)):
                        where = f"{op}.{module.name}.{name}"
                        monkeypatch.setattr(plain, name, lambda *a, where=where, **o: called.append(where))
    assert called == []
    return called


def on_fake_cuda(model, mode):
    """The model with parameters and buffers that are fake, and on the device."""
    for module in model.modules():
        for name, one in list(module._parameters.items()):
            if one is not None:
                module._parameters[name] = nn.Parameter(_like(one))
        for name, one in list(module._buffers.items()):
            if one is not None:
                module._buffers[name] = _like(one)
    return model


def _like(one):
    return torch.empty(one.shape, dtype=one.dtype, device="cuda")


def built(design, mode):
    # a layout that has every sublayer with a kernel of its own
    layout = "swa:window=4,conv,attn,mlp" if design == "standard" else "attn,mlp"
    config = ModelConfig(vocab=16, width=64, depth=2, heads=2, design=design, layout=layout)
    real = Transformer(config, seed=0)
    with mode:
        return on_fake_cuda(real, mode)


@pytest.mark.parametrize("design", DESIGNS)
def test_training_step_never_waits(design, references):
    """No value, no shape and no copy goes through the host; the second step is the first again, which a graph of one
    replays; and every op with a kernel runs it."""
    mode = FakeTensorMode()
    model = built(design, mode)
    with mode, ops.backend("auto", strict=True):
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64, device="cuda")
        with Watched() as first:
            loss = token_loss(model(ids), ids)
            loss.backward()
        with Watched() as second:
            token_loss(model(ids), ids)
    assert not first.wrong
    assert not references
    assert first.calls[: len(second.calls)] == second.calls
    assert all(isinstance(one.grad, FakeTensor) for one in model.parameters())
    kernels = {name.split(".")[1] for name, _ in first.calls if name.startswith("residua_triton.")}
    assert {f"{name}_backward" for name in kernels if not name.endswith("_backward")} <= kernels
    if design in KERNELS:
        assert KERNELS[design] <= kernels


def test_optimizer_of_a_captured_step_never_waits():
    mode = FakeTensorMode()
    model = built("attnres", mode)
    with mode:
        for one in model.parameters():
            one.grad = torch.empty_like(one)
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True, foreach=True)
        optimizer.step()  # makes its state
        with Watched() as watched:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert watched.calls
    assert not watched.wrong


@pytest.mark.parametrize("design", DESIGNS)
def test_decoding_step_never_waits(design, references):
    """One more token after a prompt: the same, and what it calls does not depend on how many came before."""
    mode = FakeTensorMode()
    model = built(design, mode).eval()
    with mode, torch.no_grad(), ops.backend("auto", strict=True):
        cache = Cache()
        model(torch.zeros(2, 4, dtype=torch.int64, device="cuda"), cache=cache)
        token, runs = torch.zeros(2, 1, dtype=torch.int64, device="cuda"), []
        model(token, cache=cache)  # finds the buffers of keys and values full, and they double
        for _ in range(2):
            with Watched() as watched:
                model(token, cache=cache)
            runs.append(watched)
    assert not runs[0].wrong
    assert not references
    assert [name for name, _ in runs[0].calls] == [name for name, _ in runs[1].calls]


@pytest.mark.parametrize(
    "waits", [lambda x: x.nonzero(), lambda x: x[x > 0], lambda x: x.sum().item()], ids=["where", "mask", "number"]
)
def test_shapes_and_numbers_of_the_device_are_refused(waits):
    """Fake tensors have no values: what asks for one fails by itself."""
    with FakeTensorMode(), Watched(), pytest.raises(RuntimeError):
        waits(torch.zeros(4, device="cuda"))


@pytest.mark.parametrize(
    "copies", [lambda x: x.to("cpu"), lambda x: x + torch.eye(4).to("cuda"), lambda x: x.new_tensor([1.0, 2.0])]
)
def test_copies_through_the_host_are_found(copies):
    with FakeTensorMode(), Watched() as watched:
        copies(torch.zeros(4, device="cuda"))
    assert watched.wrong


def test_every_op_of_a_design_has_a_triton_kernel():
    """The backbone's own are torch's on a GPU: its norms, its attention and what becomes of a loss. So are a norm with
    a matrix behind it and a sum over channels: a product, and what a compiler fuses."""
    backbone = {
        "attention_step", "cached_attend", "gated_mlp", "project", "rms_norm", "swiglu", "token_attend", "unembed_loss",
    }  # fmt: skip
    plain = {"normed_project", "compress"}
    found = ops.kernels()
    assert backbone <= found.keys()
    assert {op for op, on in found.items() if on.get("cuda") != "triton"} == backbone | plain
