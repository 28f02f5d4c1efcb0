"""Kernel calls as files: recorded in this process, replayed by a C program that any processor may run.

A recording is a list of calls, each with its arguments, the bytes of every buffer that it was given, and the bytes
that were there afterwards. `program` writes C that makes the same calls and judges what it finds by RMS, per buffer.

    int64 calls
      int64 function, arguments
        int64 kind, and then: 0 int64; 1 double; 2 int64, a buffer, or -1 for NULL; 3 int64 count and as many buffers
      int64 buffers
        int64 type (0 float32, 1 float64, 2 bfloat16, 3 int64), bytes; before; after
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from residua.native import library
from residua.native.library import TYPES

HELD = TYPES | {torch.int64: 3}
"""What memory may hold: also the targets of a loss."""
C_TYPES = {
    ctypes.c_int: "int", ctypes.c_int64: "int64_t", ctypes.c_double: "double", ctypes.c_void_p: "void *",
}  # fmt: skip
INTEGER, REAL, BUFFER, BUFFERS = range(4)


@dataclass
class Recording:
    """Calls, and the functions that they are of."""

    functions: dict[str, tuple[type, ...]] = field(default_factory=dict)
    calls: list[bytes] = field(default_factory=list)

    def dump(self) -> bytes:
        """The file."""
        return struct.pack("<q", len(self.calls)) + b"".join(self.calls)


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record every call of a kernel inside a `with`."""
    from residua.ops.attend import native as attend
    from residua.ops.attend import together
    from residua.ops.mix import native as mix

    recording, plain, place_of = Recording(), library.entry, Tensor.data_ptr
    asked: dict[int, Tensor] = {}

    def data_ptr(tensor: Tensor) -> int:
        """Every address that C is handed was asked for here."""
        asked[place_of(tensor)] = tensor
        return place_of(tensor)

    users = [module for module in (library, attend, together, mix) if getattr(module, "entry", None) is plain]

    def entry(name: str, *types: type) -> Callable[..., int]:
        run = plain(name, *types)
        recording.functions[name] = types

        def call(*arguments: Any) -> int:
            before, memory = _packed(types, arguments, asked)
            then = [_bytes(buffer) for buffer in memory]
            answer = run(*arguments)
            place = list(recording.functions).index(name)
            head = struct.pack("<qq", place, len(arguments)) + before + struct.pack("<q", len(memory))
            for buffer, was in zip(memory, then, strict=True):
                head += struct.pack("<qq", HELD[buffer.dtype], len(was)) + was + _bytes(buffer)
            recording.calls.append(head)
            return answer

        return call

    for module in users:
        module.entry = entry
    Tensor.data_ptr = data_ptr  # type: ignore[method-assign]
    try:
        yield recording
    finally:
        Tensor.data_ptr = place_of  # type: ignore[method-assign]
        for module in users:
            module.entry = plain


def _bytes(buffer: Tensor) -> bytes:
    return bytes(buffer.contiguous().view(torch.uint8).numpy().tobytes())


def _packed(
    types: tuple[type, ...], arguments: tuple[Any, ...], tensors: dict[int, Tensor]
) -> tuple[bytes, list[Tensor]]:
    """The arguments, and the memory that they point to: all of each tensor from where it begins to where it ends."""
    memory: list[Tensor] = []
    known: dict[int, int] = {}

    def buffer(address: int | None) -> int:
        if not address:
            return -1
        if address not in known:
            found = tensors[address].detach()
            rest = found.untyped_storage().nbytes() // found.element_size() - found.storage_offset()
            known[address] = len(memory)
            memory.append(torch.as_strided(found, (rest,), (1,)))
        return known[address]

    made = b""
    for kind, value in zip(types, arguments, strict=True):
        if kind is ctypes.c_double:
            made += struct.pack("<qd", REAL, value)
        elif kind is not ctypes.c_void_p:
            made += struct.pack("<qq", INTEGER, value)
        elif isinstance(value, ctypes.Array):
            places = [buffer(each) for each in value]
            made += struct.pack(f"<qq{len(places)}q", BUFFERS, len(places), *places)
        else:
            made += struct.pack("<qq", BUFFER, buffer(value))
    return made, memory


def program(recording: Recording) -> str:
    """C that replays a file of such calls: prints the largest error of every function, and fails above the bound."""
    prototypes = "\n".join(
        f"int {name}({', '.join(C_TYPES[each] for each in types)});" for name, types in recording.functions.items()
    )
    cases = "\n".join(
        f"    case {place}: return {name}({', '.join(_argument(at, each) for at, each in enumerate(types))});"
        for place, (name, types) in enumerate(recording.functions.items())
    )
    names = ", ".join(f'"{name}"' for name in recording.functions)
    return TEMPLATE.replace("PROTOTYPES", prototypes).replace("CASES", cases).replace("NAMES", names)


def _argument(at: int, kind: type) -> str:
    if kind is ctypes.c_double:
        return f"given[{at}].real"
    return f"given[{at}].pointer" if kind is ctypes.c_void_p else f"({C_TYPES[kind]})given[{at}].integer"


TEMPLATE = r"""
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

PROTOTYPES

typedef union { int64_t integer; double real; void *pointer; } argument;

static int run(int64_t function, argument *given) {
    switch (function) {
CASES
    }
    return -1;
}

static const char *const name[] = {NAMES};

static FILE *file;

static void take(void *to, size_t bytes) {
    if (bytes && fread(to, bytes, 1, file) != 1) {
        fprintf(stderr, "the recording ends early\n");
        exit(2);
    }
}

static int64_t number(void) {
    int64_t x;
    take(&x, sizeof x);
    return x;
}

static double read_as(int64_t type, const char *from, int64_t i) {
    if (type == 1) {
        double x;
        memcpy(&x, from + 8 * i, 8);
        return x;
    }
    if (type == 3) {
        int64_t x;
        memcpy(&x, from + 8 * i, 8);
        return (double)x;
    }
    uint32_t bits = 0;
    if (type == 2) {
        uint16_t half;
        memcpy(&half, from + 2 * i, 2);
        bits = (uint32_t)half << 16;
    } else {
        memcpy(&bits, from + 4 * i, 4);
    }
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

int main(int count, char **arguments) {
    static const int64_t size[] = {4, 8, 2, 8};
    double worst[64] = {0};
    int64_t made[64] = {0};
    int failed = 0;
    if (count != 2 || !(file = fopen(arguments[1], "rb"))) {
        fprintf(stderr, "usage: replay RECORDING\n");
        return 2;
    }
    const int64_t calls = number();
    for (int64_t c = 0; c < calls; c++) {
        const int64_t function = number(), parameters = number();
        argument given[64];
        int64_t kind[64], *places[64] = {0}, length[64] = {0};
        for (int64_t p = 0; p < parameters; p++) {
            kind[p] = number();
            if (kind[p] == 3) {
                length[p] = number();
                places[p] = malloc((size_t)(length[p] + 1) * sizeof(int64_t));
                take(places[p], (size_t)length[p] * sizeof(int64_t));
            } else {
                take(&given[p], 8);
            }
        }
        const int64_t buffers = number();
        char **now = calloc((size_t)buffers + 1, sizeof(char *)), **after = calloc((size_t)buffers + 1, sizeof(char *));
        int64_t *type = calloc((size_t)buffers + 1, 8), *bytes = calloc((size_t)buffers + 1, 8);
        for (int64_t b = 0; b < buffers; b++) {
            type[b] = number();
            bytes[b] = number();
            now[b] = malloc((size_t)bytes[b] + 1);
            after[b] = malloc((size_t)bytes[b] + 1);
            take(now[b], (size_t)bytes[b]);
            take(after[b], (size_t)bytes[b]);
        }
        for (int64_t p = 0; p < parameters; p++) {
            if (kind[p] == 2) {
                given[p].pointer = given[p].integer < 0 ? NULL : now[given[p].integer];
            } else if (kind[p] == 3) {
                char **row = malloc((size_t)(length[p] + 1) * sizeof(char *));
                for (int64_t i = 0; i < length[p]; i++) {
                    row[i] = places[p][i] < 0 ? NULL : now[places[p][i]];
                }
                given[p].pointer = row;
            }
        }
        run(function, given);
        for (int64_t b = 0; b < buffers; b++) {
            double gap = 0, whole = 0;
            for (int64_t i = 0; i < bytes[b] / size[type[b]]; i++) {
                const double x = read_as(type[b], now[b], i), y = read_as(type[b], after[b], i);
                if (x != x && y != y) {
                    continue;
                }
                gap += (x - y) * (x - y);
                whole += y * y;
            }
            const double error = gap == 0 ? 0 : sqrt(gap / whole);
            /* a call begins with its type; what it adds up in float32 may be handed over in float64 */
            const double allowed = type[b] == 2 ? 1e-2 : given[0].integer == 1 ? 1e-11 : 5e-6;
            if (!(error <= allowed)) {
                failed++;
                printf("%s: buffer %ld of call %ld is %g off\n", name[function], (long)b, (long)c, error);
            }
            if (error > worst[function]) {
                worst[function] = error;
            }
        }
        made[function]++;
    }
    for (size_t f = 0; f < sizeof name / sizeof *name; f++) {
        printf("%-28s %4ld calls, largest error %.2g\n", name[f], (long)made[f], worst[f]);
    }
    return failed > 0;
}
"""
