"""The library that lets a process without residua's Python run an exported model: operators.cpp, compiled on demand.

    from residua.native import operators
    path = operators.write("deploy")                   # deploy/residua_operators.so, and deploy/kernels.so beside it
    ...
    torch.ops.load_library(path)                       # there; in C++: dlopen
    model = torch._inductor.aoti_load_package("model.pt2")

It takes a C++ compiler, as AOTInductor does, and PyTorch's headers, which its wheel carries.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

import torch

from residua.native import build
from residua.native.library import library, status
from residua.native.sealed import Unavailable

SOURCE = build.HERE / "operators.cpp"
SUFFIX = Path(build.SHIPPED).suffix


def compiler() -> list[str]:
    """The command of the C++ compiler: `CXX`, or the first of c++, g++ and clang++."""
    asked = os.environ.get("CXX")
    for command in [shlex.split(asked)] if asked else [["c++"], ["g++"], ["clang++"]]:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    raise Unavailable(f"no C++ compiler: {'CXX=' + asked if asked else 'c++, g++ or clang++'} is not on the PATH")


def write(folder: str | os.PathLike[str]) -> Path:
    """Put the operators and the kernels that they call into a folder; returns what is to be loaded."""
    library()  # `Unavailable` where there are no kernels
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    kernels, target = place / build.SHIPPED, place / f"residua_operators{SUFFIX}"
    shutil.copyfile(str(status()["binary"]), kernels)
    torch_home = Path(torch.__file__).parent
    beside = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    line = [
        *compiler(), "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-o", target.name, str(SOURCE),
        f"-I{torch_home / 'include'}", kernels.name, f"-L{torch_home / 'lib'}", "-ltorch_cpu", f"-Wl,-rpath,{beside}",
    ]  # fmt: skip
    build.run(line, place)  # in the folder: what is linked by its bare name is looked for beside the library
    return target
