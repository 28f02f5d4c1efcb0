"""Who may import whom. Every import counts: at the top of a module, inside a function, under `TYPE_CHECKING`.

A room is what `ls src/residua` and `ls src/residua/lab` show: `residua.ops`, `residua.plan`, `residua.lab.train`, ...
The root, `residua/__init__.py`, is a room as well. The rooms lie in storeys, and imports go downwards:

    command line    cli                                                  may import everything
    laboratory      lab.*                                                core, hf, scale, testing, and each other
    other engines   integrations                                         core, scale; nobody imports it
    integration     hf                                                   core
    scale           scale                                                core
    laws            testing                                              core
    core            model  counting  runner                              core; never hf, scale, lab, cli or testing
                    streams (the designs)
                    registry  stream
                    ops  native
                    plan  options  spec  cache  extras  _arrival  _version

1. Rooms form no circle.
2. Nor do modules, anywhere, by what they import when they run; for the sake of a type, two may know each other.
3. A design (`streams/<name>.py`) imports `stream`, `plan`, `registry`, `options`, `spec`, `ops` and the shared parts of
   its own folder (`streams/_*.py`), and nothing else of residua: no other design, no kernel, no model.
4. Imports go downwards, as drawn.
5. The root imports the core alone. What else it offers (`residua.convert`, `residua.compare`, ...) it finds by name
   when it is asked for.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import residua

SOURCE = Path(residua.__file__).parent
CORE = {
    "_arrival", "_version", "cache", "extras", "spec", "options", "plan", "stream", "registry", "ops", "native",
    "streams", "read_groups", "runner", "counting", "model",
}  # fmt: skip
STOREYS: Mapping[str, set[str]] = {
    **dict.fromkeys(CORE, CORE),
    "testing": CORE | {"testing"},
    "hf": CORE | {"hf"},
    "scale": CORE | {"scale"},
    "integrations": CORE | {"scale", "integrations"},
    "lab": CORE | {"hf", "scale", "testing", "lab", ""},
    "cli": CORE | {"hf", "scale", "testing", "lab", "cli", ""},
    "": CORE,
    "__main__": {"cli"},
}
"""A storey and those it may import; the root is the empty name."""
DESIGNS_MAY = {"stream", "plan", "registry", "options", "spec", "ops"}

Graph = dict[str, set[str]]


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(SOURCE.rglob("*.py"))}


def nodes(tree: ast.AST, types: bool) -> Iterator[ast.AST]:
    """Everything below a node; with or without what stands under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if types or not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            yield node
            yield from nodes(node, types)


def imported(module: str, types: bool = True) -> Iterator[str]:
    """The modules of residua that a module imports; `from residua.ops import mix` is `residua.ops.mix`, a module."""
    for node in nodes(ast.parse(FILES[module].read_text()), types):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}: write imports in full, so that they can be found"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            if name.partition(".")[0] == "residua":
                yield name if name in FILES else name.rpartition(".")[0]


@cache
def graph() -> Graph:
    """Who imports whom. Made by the first test that asks, not wherever these tests are only collected."""
    return {module: set(imported(module)) - {module} for module in FILES}


def storey(module: str) -> str:
    return module.removeprefix("residua").lstrip(".").partition(".")[0]


def room(module: str) -> str:
    parts = module.split(".")
    return ".".join(parts[:3] if storey(module) == "lab" else parts[:2])


def between_rooms() -> Graph:
    rooms: Graph = {room(module): set() for module in graph()}
    for module, others in graph().items():
        rooms[room(module)] |= {room(other) for other in others} - {room(module)}
    return rooms


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """A path that comes back to its start; empty if there is none."""
    done: set[str] = set()

    def follow(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node in done:
            return []
        for other in sorted(graph.get(node, ())):
            found = follow(other, [*path, node])
            if found:
                return found
        done.add(node)
        return []

    return next(filter(None, (follow(node, []) for node in sorted(graph))), [])


def test_circles_are_found():
    assert circle({"a": ["b"], "b": ["c"], "c": ["b"]}) == ["b", "c", "b"]
    assert circle({"a": ["b", "c"], "b": ["c"], "c": []}) == []


def test_rooms_form_no_circle():
    assert not circle(between_rooms())


def test_modules_form_no_circle():
    assert len(graph()) > 300
    assert not circle({module: set(imported(module, types=False)) - {module} for module in FILES})


def test_designs_import_the_contract_and_their_shared_parts():
    for module in graph():
        if storey(module) == "streams" and module != "residua.streams":
            for other in graph()[module]:
                shared = other.startswith("residua.streams._")
                assert shared or storey(other) in DESIGNS_MAY, f"{module} imports {other}"


def test_imports_go_downwards():
    for module, others in graph().items():
        assert storey(module) in STOREYS, f"{module} has no place in the drawing above"
        for other in others:
            assert storey(other) in STOREYS[storey(module)], f"{module} imports {other}"


def test_contributing_draws_these_rooms_and_this_order():
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    lines = text.partition("```text\n")[2].partition("```")[0].splitlines()
    drawn = {name: place for place, line in enumerate(lines) for name in re.findall(r"\w+", line[:48])}
    rooms = {name for name in STOREYS if name and not name.startswith("_")}
    assert rooms <= drawn.keys()
    folders = {path.name for path in (SOURCE / "lab").iterdir() if (path / "__init__.py").is_file()}
    assert folders <= set(re.findall(r"\w+", " ".join(lines)))
    for module, others in graph().items():
        for other in others:
            if storey(module) in drawn and storey(other) in drawn:
                assert drawn[storey(module)] <= drawn[storey(other)], (
                    f"{module} imports {other}, which is drawn above it"
                )
