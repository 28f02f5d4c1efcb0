"""An exported model runs where there is no residua, once its library is loaded; designs export with open sizes."""

import os
import re
import subprocess
import sys
import sysconfig

import pytest
import torch
from torch import nn

import residua
from residua import ops
from residua.model import ModelConfig, Transformer
from residua.native import operators
from residua.native.sealed import Unavailable
from residua.testing import assert_close

pytestmark = pytest.mark.slow
BATCH, TOKENS = torch.export.Dim("batch"), torch.export.Dim("tokens")
EXPORTED = dict.fromkeys((*residua.names(), "ddl:channels=2"), "attn,mlp") | {"standard": "conv,swa:window=3,mlp"}
"""Every design, and a layout: tracing takes a second each."""

RUN = """
import sys, torch
from safetensors.torch import load_file, save_file
torch.ops.load_library(sys.argv[1])
model = torch._inductor.aoti_load_package(sys.argv[2])
given = load_file(sys.argv[3])
found = model(given["x"])
assert not [name for name in sys.modules if name.split(".")[0] == "residua"]
save_file({"found": found}, sys.argv[3] + ".out")
"""


class EveryOp(nn.Module):
    """One call of each op that has a kernel, so that one small model stands for the operators of all."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.linspace(-1, 1, 8))
        self.null = nn.Parameter(torch.tensor([0.3]))
        self.taps = nn.Parameter(torch.linspace(0, 1, 24).view(3, 8))

    def forward(self, x):
        x = ops.attend(self.query, (x, x.sin(), x.cos()), null=self.null, heads=2, total=True)
        x = ops.shortconv(x, x[:, :0].new_zeros(x.shape[0], 2, 8), self.taps)
        for weights in (self.query[:2], self.taps[:2], x[..., :2].movedim(-1, 0)):
            x = ops.mix(weights, (x, x.cos()))
        lanes = ops.mix(x[..., :4].movedim(-1, 0).unflatten(0, (2, 2)), (x, x.sin())).movedim(0, 2)
        turns = [function(x[0, :, :1] + 0 * x[0, :, :2]) for function in (torch.cos, torch.sin)]
        for rotation in (None, tuple(turns)):
            x = ops.token_attend(x, x[..., :4].detach(), x.cos()[..., 4:], rotation, width=4)
        square = ops.sinkhorn(lanes[..., :4].unflatten(-1, (2, 2))[..., 0, :, :], iterations=3)
        x, H = ops.read_remix(square[..., 0], square, ops.remix(square, lanes))
        for centered in (False, True):
            x = ops.normed_project(x, self.taps.T @ self.taps, self.query, eps=0.1, centered=centered)
        return ops.delta_write(H, x, x[..., :2], x[..., 0].sigmoid(), eps=0.5)


def operators_of(graph):
    return {str(node.target).split(".")[1] for node in graph.nodes if str(node.target).startswith("residua.")}


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning")  # torch's own
def test_exported_model_runs_in_a_process_without_residua(tmp_path):
    model, generator = EveryOp(), torch.Generator().manual_seed(0)
    exported = torch.export.export(
        model, (torch.randn(2, 5, 8, generator=generator),), dynamic_shapes=({0: BATCH, 1: TOKENS},)
    )
    registered = set(re.findall(r'library\.impl\("(\w+)"', operators.SOURCE.read_text()))
    assert operators_of(exported.graph) == registered
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}
    package = torch._inductor.aoti_compile_and_package(
        exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=options
    )
    from safetensors.torch import load_file, save_file

    x, numbers = torch.randn(3, 7, 8, generator=generator), tmp_path / "numbers"
    save_file({"x": x}, numbers)
    home = tmp_path / "environment"  # of its own, into which only the dependencies are put: residua is not there
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [home / "bin" / "python", "-c", RUN, operators.write(tmp_path / "deploy"), package, numbers],
        env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    with torch.no_grad():
        assert_close(load_file(str(numbers) + ".out")["found"], model(x))


def test_operators_in_c_have_the_schemas_of_python():
    text = re.sub(r'"\s*"', "", operators.SOURCE.read_text())
    for name, schema in re.findall(r'library\.def\("(\w+)(\(.*?)"\)', text):
        declared = str(getattr(torch.ops.residua, name).default._schema)
        assert declared.replace("residua::", "") == name + schema


def test_operators_need_a_compiler_and_say_so(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/compiler")
    with pytest.raises(Unavailable, match=r"no C\+\+ compiler: CXX=/no/such/compiler is not on the PATH"):
        operators.write(tmp_path)


@pytest.mark.parametrize("design", EXPORTED)
def test_design_exports_with_open_batch_and_time(design):
    """In one graph whose every operator is torch's or one of the library."""
    shape = {"vocab": 11, "width": 8, "depth": 1, "heads": 1, "layout": EXPORTED[design]}
    model = Transformer(ModelConfig(**shape, design=design), seed=0).double().eval()
    ids = torch.arange(30).reshape(3, 10) % 11
    exported = torch.export.export(model, (ids[:2, :7].contiguous(),), dynamic_shapes=({0: BATCH, 1: TOKENS},))
    kernels = operators_of(exported.graph)
    assert kernels <= set(re.findall(r'library\.impl\("(\w+)"', operators.SOURCE.read_text()))
    with torch.no_grad():
        assert_close(exported.module()(ids), model(ids))
