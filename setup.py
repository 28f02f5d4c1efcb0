"""A wheel carries the kernels compiled if there is a C compiler; without one it is pure Python, and works.

The tag is py3-none-<platform>: the library knows neither Python's interface nor torch's. On Linux the platform is the
manylinux that the library was found to need, which is what a package index takes. It also carries copies of the
result files that `residua advise` cites and of the plans in `recipes/`, which are kept in those two places alone.
"""

import functools
import importlib.util
import shutil
import sys
import types
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("src", "residua", "native")
CITED = ("*/results.json", "*/conversions.json", "*/tasks/*.json")
"""What `residua advise` reads of `results/`."""


def builder():
    """residua.native.build, which needs neither the package around it nor torch."""
    for name in ("residua", "residua.native"):
        sys.modules.setdefault(name, types.ModuleType(name))
    for name in ("sealed", "build"):
        spec = importlib.util.spec_from_file_location(f"residua.native.{name}", NATIVE / f"{name}.py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@functools.cache
def can_compile():
    """Whether there is a C compiler; says so once where there is none."""
    build = builder()
    try:
        build.compiler()
    except build.Unavailable as reason:
        print(f"residua: a wheel without compiled kernels: {reason}", file=sys.stderr)
        return False
    return True


class Kernels(Distribution):
    """Made for one platform if there is a compiler."""

    def has_ext_modules(self):
        return can_compile()


class BuildWhole(build_py):
    """Python files, the library, the cited results and the plans; an editable install builds the library on first use,
    and reads the others where they are."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        copy_files("results", CITED, Path(self.build_lib, "residua", "lab", "advise", "results"))
        copy_files("recipes", ("*.toml",), Path(self.build_lib, "residua", "lab", "compare", "recipes"))
        if can_compile():
            build = builder()
            build.compile_to(Path(self.build_lib, *NATIVE.parts[1:], build.SHIPPED).absolute(), build.compiler())


def copy_files(source, patterns, folder):
    """Files of the repository, under their own names; a tree without them cannot make a whole wheel."""
    found = sorted(file for pattern in patterns for file in Path(source).glob(pattern))
    if not found:
        raise SystemExit(f"residua: {source}/ holds no files to ship; build from a checkout or from an sdist")
    for file in found:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, copy)


class PlatformWheel(bdist_wheel):
    """Any Python 3 of the platform."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        if self.root_is_pure:
            return python, abi, platform
        build = builder()
        made = Path(self.get_finalized_command("build_py").build_lib, *NATIVE.parts[1:], build.SHIPPED)
        # an editable wheel has no library in it, and stays on the machine that made it
        return "py3", "none", build.platform_tag(platform, made.read_bytes() if made.exists() else b"")


setup(distclass=Kernels, cmdclass={"build_py": BuildWhole, "bdist_wheel": PlatformWheel})
