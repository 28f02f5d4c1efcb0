"""The rules of the house that a machine can check."""

import ast
import importlib
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch._dynamo.exc import Unsupported

import residua
from residua.testing import LAWS, LAYOUTS, Case, check, uncovered
from tests.conftest import LONG

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "src" / "residua").rglob("*.py"))


def python(code: str, **environment: str) -> str:
    """Run code in a fresh interpreter; its output."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True, text=True, check=False, env=os.environ | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light():
    """`import residua` adds under 0.3 s to `import torch` and brings neither triton, transformers nor plotting. A
    process may be slow because of others: one of three has to be quick."""
    for _ in range(3):
        spent, heavy = json.loads(
            python("""
            import json, sys, time
            import torch
            start = time.process_time()
            import residua
            spent = time.process_time() - start
            heavy = {"triton", "transformers", "matplotlib", "datasets", "rich", "typer"} & set(sys.modules)
            print(json.dumps([spent, sorted(heavy)]))
            """)
        )
        assert heavy == []
        if spent < 0.3:
            return
    pytest.fail(f"`import residua` takes {spent:.2f} s")


def test_most_things_have_a_type():
    """Not one word in a hundred lines is `Any`."""
    assert sum(len(re.findall(r"\bAny\b", path.read_text())) for path in SOURCES) < 400


def test_files_that_begin_first_exist():
    assert [name for name in LONG if not (ROOT / "tests" / name).is_file()] == []


def test_everyday_names_open_from_the_root():
    """`residua.compare` and its like are listed, found where they live, and brought by nothing but asking for them."""
    for name, home in residua._DOORS.items():
        assert name in dir(residua)
        assert getattr(residua, name) is getattr(importlib.import_module(home), name)
    with pytest.raises(AttributeError, match="no attribute 'door'"):
        residua.door
    python("""
    import sys, residua
    assert not [name for name in sys.modules if name.startswith(("residua.hf", "residua.lab", "residua.model"))]
    """)


def test_plan_and_spec_do_not_know_torch():
    python("""
    import importlib.util, sys, types
    package = types.ModuleType("residua")
    package.__path__ = [importlib.util.find_spec("residua").submodule_search_locations[0]]
    sys.modules["residua"] = package  # the package without its __init__, which brings torch
    import residua.plan
    assert residua.plan.Plan.regular(8, 2).depth == 2
    assert "torch" not in sys.modules, "plan.py imported torch"
    """)


def test_sources_are_stacked_in_references_alone():
    """A stream hands its sources to an op as a tuple; only a reference may stack them."""
    for file in (ROOT / "src" / "residua" / "streams").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.stack":
                stacked = ast.unparse(node.args[0])
                plain = re.fullmatch(r"[\w.]*(sources|values|done|partial)( \+ .*)?", stacked)
                assert not plain, f"{file.name} stacks its sources: {ast.unparse(node)}"


def test_nothing_is_unpickled():
    for file in SOURCES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert "pickle" not in names, file
            if isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in ("torch.load", "pickle.load", "pickle.loads"), file


def test_backbone_names_no_design():
    for file in (ROOT / "src" / "residua" / "model").glob("*.py"):
        strings = {node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)}
        assert not strings & (set(residua.names()) - {"standard"}), file


def test_every_module_opens_with_a_docstring():
    for file in SOURCES:
        assert ast.get_docstring(ast.parse(file.read_text())), f"{file} has no docstring"


def test_types_say_what_they_hold():
    """`Any` is for what other packages hand over without a type: fewer than 400 uses in src."""
    names = (node for file in SOURCES for node in ast.walk(ast.parse(file.read_text())))
    assert sum(isinstance(node, ast.Name) and node.id == "Any" for node in names) < 400


def test_version_is_written_once():
    cited = re.search(r"^version: (\S+)", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited
    assert cited.group(1) == residua.__version__
    assert (
        "version"
        not in re.search(r"\[project\](.*?)\n\[", (ROOT / "pyproject.toml").read_text(), re.S)
        .group(1)
        .split("dynamic")[0]
    )


TOY = '''
"""A stream that forgets a little at every write."""

from torch import Tensor

from residua import Read, Stream, register


@register("leaky")
class Leaky(Stream[Tensor]):
    """h <- (1 - leak) h + f(norm(h))."""

    paper = "none: a test"
    cases = ("", "leak=0.5")

    def __init__(self, plan, *, leak: float = 0.1):
        super().__init__(plan)
        self.leak = leak

    @property
    def starts(self):
        return "no"

    def open(self, x, past=None):
        return x

    def read(self, h, site, norm):
        return Read(norm(h))

    def write(self, h, site, read, y):
        return (1 - self.leak) * h + y
'''


@pytest.mark.slow
def test_new_design_is_one_file_and_one_import(tmp_path, monkeypatch):
    """A toy design in one file, imported in one line, obeys every law, is listed, and is covered by its cases."""
    (tmp_path / "leaky_design.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    import leaky_design  # noqa: F401

    try:
        assert "leaky" in residua.names()
        assert uncovered("leaky") == []
        for spec in ("leaky", "leaky:leak=0.5"):
            check(spec, LAYOUTS[:1])
        from residua.cli.designs import describe

        assert describe("leaky", residua.Plan.regular(16, 2))["equation"] == "h <- (1 - leak) h + f(norm(h))."
    finally:
        residua.unregister("leaky")


PLAIN = {
    "open": "def open(self, x, past=None): return x",
    "read": "def read(self, h, site, norm): return Read(norm(h))",
    "write": "def write(self, h, site, read, y): return h + y",
}
BROKEN = {
    "state_is_tensors": {
        "open": "def open(self, x, past=None): return [x]",
        "read": "def read(self, h, site, norm): return Read(norm(h[0]))",
        "write": "def write(self, h, site, read, y): return [h[0] + y]",
    },
    "pure": {"write": "def write(self, h, site, read, y): return h.add_(y)"},
    "causal": {"read": "def read(self, h, site, norm): return Read(norm(h + h.mean(1, keepdim=True)))"},
    "starts_as_declared": {"write": "def write(self, h, site, read, y): return h - y"},
    "every_parameter_learns": {"read": "def read(self, h, site, norm): return Read(norm(h * self.scale))"},
    "decode": {"open": "def open(self, x, past=None): return x - x[:, :1]"},
    "cut_anywhere": {
        "open": "def open(self, x, past=None): self.seen = [x]; return x",
        "read": "def read(self, h, site, norm): return Read(norm(h if h is self.seen[-1] else 2 + h))",
        "write": "def write(self, h, site, read, y): self.seen.append(h + y); return self.seen[-1]",
    },
    "weights_reproduce_the_read": {
        "sources": "def sources(self, site): return ('h',)",
        "routing": "def routing(self, h, site): return Routing((h,), h.new_full((1, 1, *h.shape[:2], 1), 0.5))",
    },
    "sizes_are_true": {
        "open": "def open(self, x, past=None): return (x,)",
        "read": "def read(self, s, site, norm): return Read(norm(s[-1]))",
        "write": "def write(self, s, site, read, y): return (*s, s[-1] + y) if y.shape[1] > 2 else (s[-1] + y,)",
    },
    "shapes_and_types": {"read": "def read(self, h, site, norm): return Read(norm(h, h))"},
    "checkpointing": {"write": "def write(self, h, site, read, y): self.n += 1; return h + y * (1 + 0.1 * self.n)"},
    "start_survives_a_framework": {"reset": "def reset(self, generator=None): pass"},
    "bfloat16": {
        "read": "def read(self, h, site, norm): return Read(norm((h.float() * 64).to(torch.int8).to(h) / 64))"
    },
    "one_graph": {"read": "def read(self, h, site, norm): print(end=''); return Read(norm(h)) if h.sum() else None"},
    "configuration_round_trips": {"config": "config = {'name': 'standard'}"},
}
ATTENDING = {
    "execution": "def evaluated(self, *read): return super().evaluated(*read) + 0.01",
    "gradient_mode": "def evaluated(self, *read): return super().evaluated(*read).detach()",
}
"""For every law, a design that breaks it: a law that cannot fail would not be one."""


@pytest.mark.parametrize("law", LAWS)
def test_law_catches_a_design_that_breaks_it(law):
    scales = law in ("every_parameter_learns", "start_survives_a_framework")
    body = ATTENDING[law] if law in ATTENDING else "\n    ".join((PLAIN | BROKEN[law]).values())
    init = f"""
    def __init__(self, plan):
        super().__init__(plan)
        self.scale = nn.Parameter(torch.ones(1)) if {scales} else None
    """
    code = f'''
import torch
from torch import nn
from residua import Read, Routing, Stream, register
from residua.streams import AttnRes

@register("broken")
class Broken({"AttnRes" if law in ATTENDING else "Stream"}):
    """h <- h."""
    paper = "none: a test"
    starts = "standard"
    n = 0
    {"" if law in ATTENDING else init}
    {body}
'''
    exec(compile(code, "broken", "exec"), {"__name__": "broken"})
    try:
        with pytest.raises((AssertionError, Unsupported)):
            LAWS[law](Case("broken"))
    finally:
        residua.unregister("broken")


@pytest.mark.slow
def test_shapes_are_checked_at_run_time():
    """Every annotated signature holds its shapes in a forward and a backward of every design, with every option and in
    three layouts: jaxtyping's import hook with beartype, in a process of its own because the hook must come before the
    import."""
    python(
        """
        from jaxtyping import install_import_hook
        with install_import_hook("residua", "beartype.beartype"):
            import residua
            from residua.model import Cache, Transformer, token_loss
            from residua.testing import LAYOUTS, Case, ids, specs
            import residua.ops.attend
        import torch
        cases = [Case(spec) for name in residua.names() for spec in specs(name)]
        cases += [Case(name, *layout) for name in residua.names() for layout in LAYOUTS[1:3]]
        for case in cases:
            model = case.model(dtype=torch.float32, depth=2)
            token_loss(model(ids()), ids()).backward()
            with torch.no_grad():
                cache = Cache()
                for part in ids().split([4, 1, 4], 1):
                    model(part, cache=cache)
        try:
            residua.ops.attend(torch.zeros(3), (torch.zeros(1, 1, 4),))
        except Exception as error:
            assert "jaxtyping" in type(error).__module__ or "TypeCheckError" in type(error).__name__, error
        else:
            raise SystemExit("a wrong shape passed: the hook is not on")
        """,
        OMP_NUM_THREADS="1",
    )
