"""The wheel carries the library, for its platform and any Python 3, and works where the tree is not."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from residua.native import build

ROOT = Path(__file__).parents[2]
USE = """
import json, torch, residua
from residua import ops
from residua.model import ModelConfig, Transformer, token_loss
from residua.native import status
ids = torch.randint(23, (2, 9), generator=torch.Generator().manual_seed(0))
losses = {}
for design in ("ddl:channels=2", "denseformer", "mhc"):
    for backend in ("cpu", "reference") if status()["binary"] else ("reference",):
        with ops.backend(backend):
            model = Transformer(ModelConfig(vocab=23, width=16, depth=2, heads=2, design=design), seed=1).double()
            loss = token_loss(model(ids), ids)
            loss.backward()
            losses[f"{design} {backend}"] = [loss.item(), model.stream.to(torch.float64) and sum(
                parameter.grad.abs().sum().item() for parameter in model.parameters())]
print(json.dumps({"file": residua.__file__, "status": status(), "losses": losses}))
"""


def wheel(folder, **environment):
    """The wheel of a copy of the tree, so that building leaves nothing in it."""
    tree = folder / "tree"
    tree.mkdir()
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("results", "recipes"):
        shutil.copytree(ROOT / name, tree / name)
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "dist"), str(tree)],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    (made,) = (folder / "dist").iterdir()
    return made


def use(folder, made, **environment):
    """Install a wheel into an environment that has the dependencies but not residua, and use it from elsewhere."""
    home = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    site = Path(subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip())  # fmt: skip
    # a path and no .pth of its own: the editable install of the tree is not followed
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index",
         "--ignore-installed", str(made)],
        check=True, capture_output=True,
    )  # fmt: skip
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RESIDUA_NATIVE")}
    done = subprocess.run(
        [python, "-c", USE],
        env={**clean, "RESIDUA_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", **environment},
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["file"].startswith(str(site))
    return found


@pytest.mark.parametrize(
    ("platform", "library", "tag"),
    [
        ("linux_x86_64", b"\0GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.29\0", "manylinux_2_34_x86_64"),
        ("linux_aarch64", b"\0GLIBC_2.17\0", "manylinux_2_17_aarch64"),
        ("linux_x86_64", b"no symbol of glibc: musl", "linux_x86_64"),
        ("macosx_14_0_arm64", b"\0GLIBC_2.17\0", "macosx_14_0_arm64"),
    ],
)
def test_wheel_is_tagged_by_what_its_library_needs(platform, library, tag):
    assert build.platform_tag(platform, library) == tag


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment_without_a_compiler(tmp_path):
    made = wheel(tmp_path)
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    names = zipfile.ZipFile(made).namelist()
    tag = build.platform_tag(platform, zipfile.ZipFile(made).read("residua/native/kernels.so"))
    assert tag.startswith("manylinux_2_") or not platform.startswith("linux")
    assert made.name.endswith(f"-py3-none-{tag}.whl")
    assert {"residua/native/kernels.so", "residua/native/mix.c", "residua/native/kernels.h"} <= set(names)
    assert {"residua/lab/advise/results/demo/results.json", "residua/lab/compare/recipes/demo.toml"} <= set(names)
    assert "residua/cli/table.json" in names
    found = use(tmp_path, made, CC="/no/such/compiler", RESIDUA_STRICT="1")
    assert found["status"]["binary"].endswith("residua/native/kernels.so")
    assert not (tmp_path / "cache").exists()
    for name, numbers in found["losses"].items():
        assert numbers == pytest.approx(found["losses"][name.split()[0] + " reference"], rel=1e-12)


@pytest.mark.slow
def test_wheel_made_without_a_compiler_works_and_says_why_it_is_slow(tmp_path):
    made = wheel(tmp_path, CC="/no/such/compiler")
    assert made.name.endswith("-py3-none-any.whl")
    found = use(tmp_path, made, CC="/no/such/compiler", RESIDUA_STRICT="0")
    assert found["status"]["binary"] is None
    assert "/no/such/compiler is not on the PATH" in found["status"]["reason"]
