"""A wheel carries the kernels compiled if there is a C compiler; without one it is pure Python, and works.

The tag is py3-none-<platform>: the library knows neither Python's interface nor torch's.
"""

import functools
import importlib.util
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("src", "residua", "native")


def builder():
    """residua.native.build, which needs neither residua nor torch."""
    spec = importlib.util.spec_from_file_location("residua_native_build", NATIVE / "build.py")
    module = importlib.util.module_from_spec(spec)
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


class BuildKernels(build_py):
    """Python files, and the library beside them; an editable install builds it on first use instead."""

    def run(self):
        super().run()
        if can_compile() and not self.editable_mode:
            build = builder()
            build.compile_to(Path(self.build_lib, *NATIVE.parts[1:], build.SHIPPED).absolute(), build.compiler())


class PlatformWheel(bdist_wheel):
    """Any Python 3 of the platform."""

    def get_tag(self):
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(distclass=Kernels, cmdclass={"build_py": BuildKernels, "bdist_wheel": PlatformWheel})
