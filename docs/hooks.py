"""What the pages take from the code while they are built: designs, laws, layouts and examples.

A page asks with a comment of its own line, `<!-- residua: NAME -->`, and gets what the function NAME returns, here or
in `measured.py`. So no list of designs, options or laws is written twice; a comment that names nothing stops the build.
"""

from __future__ import annotations

import html
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

from markup import embedded, fence, folded, linked, marked, paragraphs, table
from measured import (
    REPORTS,
    bars,
    bench,
    claims,
    conversions,
    figure,
    finder,
    finetuned,
    repeated,
    reports,
    results,
    routing,
    task_results,
)
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import residua
from residua import testing
from residua.cli import designs
from residua.cli.designs import STARTS, details
from residua.lab.report.guide import VIEWS
from residua.options import options_of
from residua.registry import wrappers
from residua.spec import render_value
from residua.stream import Stream

ROOT = Path(__file__).resolve().parent.parent
ASKED = re.compile(r"^<!-- residua: (\w+)(?: (\S+))? -->$", re.MULTILINE)

COUNTED = residua.Plan.regular(768, 12)
"""The plan that the tables count in."""
SHOWN = residua.Plan.regular(64, 2)
"""The plan whose every site is listed."""


@cache
def describe(name: str) -> dict[str, Any]:
    """The row of a design in the table of `residua designs`."""
    return designs.describe(name, COUNTED)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """The committed reports, each a page that needs no other file, are part of the site as they are."""
    for name, page in reports().items():
        files.append(File.generated(config, f"{REPORTS}/{name}.html", abs_src_path=str(page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return filled(markdown, page.file.src_uri)


def filled(markdown: str, page: str = "the page") -> str:
    """The page with every comment answered."""

    def answer(found: re.Match[str]) -> str:
        name, argument = found.groups()
        if name not in ANSWERS:
            raise ValueError(f"{page} asks for {name!r}; docs/hooks.py answers {', '.join(ANSWERS)}")
        return ANSWERS[name](*([argument] if argument else []))

    return ASKED.sub(answer, markdown)


def design_table() -> str:
    """The table of `residua designs`."""
    titles = ("design", "equation", "mixes", "state/token", "params", "starts", "paper")
    rows = [
        (
            f'<a href="#{row["design"]}">{row["design"]}</a>',
            f"<code>{html.escape(row['equation'])}</code>",
            html.escape(row["sources"]),
            f"{row['state_per_token'] / COUNTED.width:g} d",
            f"{row['parameters_added']:,}",
            STARTS[row["starts"]],
            linked(row["paper"]),
        )
        for row in (describe(name) for name in residua.names())
    ]
    return table(titles, rows, ("equation",))


def design_sections() -> str:
    """A section for every registered design, from its docstring, its options and a plan of two blocks."""
    return "\n\n".join(design_section(name) for name in residua.names())


def design_section(name: str) -> str:
    """One design: equation, text, options, what it reads and keeps, how it starts, where it comes from."""
    cls, row, found = residua.design(name), describe(name), details(name, SHOWN)
    equation, *paragraphs = found["text"].split("\n\n")
    prose, notes = parted(paragraphs, set(found["options"]))
    parts = [
        f"## {name}",
        fence(textwrap.fill(re.sub(r"\s+", " ", equation), 76, break_long_words=False)),
        *(f"<p>{marked(one)}</p>" for one in prose),
        "**Options**",
        option_table(found["options"], notes) if found["options"] else "None.",
        f"**Reads** {row['sources']}. In {SHOWN.depth} blocks of `attn,mlp`:",
        table(("site", "reads", "lanes", "parameters at width 64"), list(site_rows(found["sites"]))),
        f"**State** (at most {row['state_per_token'] / COUNTED.width:g} widths a token in {COUNTED.depth} blocks)",
        fence(state_source(cls), "python"),
        folded("open, read and write", fence(methods_source(cls), "python")),
        f"**Starts** {STARTS[row['starts']]}. Every case that the laws run:",
        table(("spec", "starts"), list(case_rows(name))),
        f"**Paper** {linked(row['paper'])}",
    ]
    return "\n\n".join(parts)


def report_views() -> str:
    """The views of a report: what to look for, how each is used, and its legend."""
    parts = []
    for view in VIEWS.values():
        rows = [(html.escape(sign), html.escape(meaning)) for sign, meaning in view.legend]
        parts += [
            f"### {view.title}",
            f"*{view.look}*",
            view.more,
            table(("shown", "means"), rows, ("means",)) if rows else "",
        ]
    return "\n\n".join(part for part in parts if part)


def law_sections() -> str:
    """A section for every law, from its docstring."""
    return "\n\n".join(f"### {name}\n\n{paragraphs(law.__doc__ or '')}" for name, law in testing.LAWS.items())


def law_layouts() -> str:
    """The layouts that every design is checked in."""
    rows = [(f"<code>{layout}</code>", "decoder" if causal else "encoder") for layout, causal in testing.LAYOUTS]
    return table(("layout", "backbone"), rows)


def law_counts() -> str:
    """How much the laws are run over."""
    cases = sum(len(testing.specs(name)) for name in residua.names())
    cases += sum(len(one.cases) for one in wrappers().values())
    return (
        f"There are {len(testing.LAWS)} laws, {len(residua.names())} designs with {cases} option cases between them, "
        f"and {len(testing.LAYOUTS)} layouts; {len(testing.cases())} cases are made of them."
    )


def tolerances() -> str:
    """What `assert_close` allows."""
    rows = [
        (f"<code>{str(dtype).removeprefix('torch.')}</code>", f"{value:g}", f"{gradient:g}")
        for dtype, (value, gradient) in testing.TOLERANCE.items()
    ]
    return table(("type", "values", "gradients"), rows)


def sublayers() -> str:
    """What may stand in a layout."""
    from residua.model.sublayers import SUBLAYERS
    from residua.plan import LANES

    rows = []
    for kind, cls in SUBLAYERS.items():
        options = options_of(cls)
        prose, notes = parted(inspect.cleandoc(cls.__doc__ or "").split("\n\n"), set(options))
        taken = [
            marked(f"`{key}` {option.describe()}, {option.default} by default. {' '.join(notes.get(key, ()))}")
            for key, option in options.items()
        ]
        rows.append((f"<code>{kind}</code>", marked(" ".join(prose)), str(LANES[kind]), "<br>".join(taken) or "none"))
    return table(("kind", "what it is", "lanes", "options"), rows, ("what it is", "options"))


def value_forms() -> str:
    """What `value=` takes."""
    from residua.streams.value import FORMS, Valued

    prose = inspect.cleandoc(Valued.__doc__ or "").split("\n\n")[-1]
    found = re.split(rf"^({'|'.join(FORMS)}) +", prose, flags=re.MULTILINE)[1:]
    told = dict(zip(found[::2], found[1::2], strict=True))
    rows = [(f"<code>{form}</code>", marked(re.sub(r"\s+", " ", told[form]).strip())) for form in FORMS]
    return table(("value", "what attention mixes"), rows, ("what attention mixes",))


def example(name: str) -> str:
    """A file of `examples/`."""
    return fence((ROOT / "examples" / name).read_text(encoding="utf-8"), "python")


def map_table() -> str:
    """The table of `residua designs --map`."""
    from residua.cli.designs import MAP, _cell
    from residua.lab.taxonomy import entries

    rows = [
        tuple(f"<code>{one.design}</code>" if key == "design" else html.escape(_cell(getattr(one, key))) for key in MAP)
        for one in entries()
    ]
    return table(tuple(MAP.values()), rows, ("injection",))


def map_exceptions() -> str:
    """The designs that are no such read, or only just, and why."""
    from residua.lab.taxonomy import entries

    return "\n".join(f"- `{one.design}`: {one.why}." for one in entries() if one.why)


def map_picture() -> str:
    """The grid of the two axes."""
    from residua.lab.plots.grid import grid
    from residua.lab.taxonomy import variants

    found = variants()
    return picture(lambda: grid(found), "A grid of how weights are made against the axis and the window they run over")


def cost_table(size: str) -> str:
    """What every design costs at a named size, beside the standard network."""
    import torch

    from residua.lab.cost import predict
    from residua.lab.cost.targets import sized

    def cost(name: str, path: str) -> Any:
        return predict(sized(size).of(name).config, 2048, dtype=torch.bfloat16, path=path)

    plain, bound = cost("standard", "reference"), cost("standard", "fused")
    rows = []
    for name in residua.names():
        eager, fused = cost(name, "reference"), cost(name, "fused")
        rows.append(
            (
                f"<code>{name}</code>",
                f"{eager.stream_parameters:,}",
                f"{fused.flops / bound.flops:.3f}x",
                f"{eager.saved_bytes / plain.saved_bytes:.2f}x",
                f"{fused.saved_bytes / bound.saved_bytes:.2f}x",
                f"{eager.bytes_moved / plain.bytes_moved:.2f}x",
                f"{fused.bytes_moved / bound.bytes_moved:.2f}x",
                f"{eager.cut / plain.cut:g}x",
            )
        )
    titles = ("design", "parameters added", "FLOPs", "saved for backward", "saved, fused", "memory traffic",
              "traffic, fused", "pipeline cut")  # fmt: skip
    return table(titles, rows)


def asymmetry_picture(size: str) -> str:
    """What one window of attention adds, over tokens and over layers."""
    from residua.lab.cost.asymmetry import asymmetry
    from residua.lab.cost.targets import sized
    from residua.lab.plots.asymmetry import asymmetry as drawn

    data = asymmetry(sized(size))
    return picture(lambda: drawn(data), "Six quantities against the window: placed over tokens and placed over layers")


def picture(draw: Callable[[], Any], text: str) -> str:
    """A plot inside the page, as it is when the page is built."""
    import tempfile

    from residua.lab.plots.save import save

    with tempfile.TemporaryDirectory() as folder:
        _, drawn = save({"plot": draw}, folder)
        return embedded(drawn, text)


ANSWERS: dict[str, Callable[..., str]] = {
    function.__name__: function
    for function in (
        design_table,
        design_sections,
        report_views,
        law_sections,
        law_layouts,
        law_counts,
        tolerances,
        sublayers,
        value_forms,
        example,
        bench,
        bars,
        results,
        routing,
        repeated,
        figure,
        claims,
        task_results,
        finetuned,
        conversions,
        finder,
        map_table,
        map_exceptions,
        map_picture,
        cost_table,
        asymmetry_picture,
    )
}


def parted(paragraphs: list[str], options: set[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Prose, and what the docstring says of each option.

    An entry is `name   text`, at the start of a line or after a gap, and goes on over the indented lines below it.
    `compat=released   text` and `dilation, period   text` count for every option they name.
    """
    entry = re.compile(r"(?:^|(?<=\S)\s{4,})((?:[a-z_]+(?:=\w+)?)(?:, [a-z_]+)*) {2,}(?=\S)", re.MULTILINE)
    prose, notes = [], {}
    for paragraph in paragraphs:
        found = [match for match in entry.finditer(paragraph) if named(match[1]) <= options]
        if not found or found[0].start():
            prose.append(paragraph)
            continue
        for match, after in zip(found, [*(one.start() for one in found[1:]), len(paragraph)], strict=True):
            text = re.sub(r"\s+", " ", paragraph[match.end() : after]).strip()
            value = f"`{match[1]}`: " if "=" in match[1] else ""
            for option in named(match[1]):
                notes.setdefault(option, []).append(value + text)
    return prose, notes


def named(names: str) -> set[str]:
    """The options of `block, blocks` or `compat=released`."""
    return {one.partition("=")[0] for one in names.split(", ")}


def option_table(options: dict[str, dict[str, Any]], notes: dict[str, list[str]]) -> str:
    """Every option with what it takes, its default and what the docstring says of it."""
    rows = [
        (
            f"<code>{key}</code>",
            html.escape(option["takes"]),
            "not set" if option["default"] is None else html.escape(render_value(option["default"])),
            "<br>".join(marked(note) for note in notes.get(key, ())),
        )
        for key, option in options.items()
    ]
    return table(("option", "takes", "default", "meaning"), rows, ("meaning",))


def site_rows(sites: dict[str, dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    """What every site mixes; a dash where it reads the stream as it is."""
    for site, info in sites.items():
        yield site, " ".join(info["reads"]) or "-", str(info["lanes"]), f"{info['parameters']:,}"


def case_rows(name: str) -> Iterator[tuple[str, str]]:
    """The design's own cases and how each starts."""
    plan = testing.Case(name).config().plan
    for spec in testing.specs(name):
        yield f"<code>{spec}</code>", STARTS[residua.build(spec, plan).starts]


def state_source(cls: type[Stream[Any]]) -> str:
    """The classes of a design's state, or `Tensor` where it is one."""
    for base in cls.__mro__:
        for generic in getattr(base, "__orig_bases__", ()):
            for state in get_args(generic):
                if not isinstance(state, TypeVar):
                    return "\n\n".join(map(told, get_args(state) if isinstance(state, UnionType) else (state,)))
    raise ValueError(f"design {cls.name!r} does not say what its state is; subclass Stream[State]")


def told(state: Any) -> str:
    """One kind of state: the source of a NamedTuple, the name of what torch or Python has."""
    if get_origin(state) is tuple:
        return f"tuple[{', '.join('...' if one is Ellipsis else one.__name__ for one in get_args(state))}]"
    return inspect.getsource(state) if issubclass(state, tuple) else state.__name__


def methods_source(cls: type[Stream[Any]]) -> str:
    """The three verbs as they are written."""
    return "\n".join(textwrap.dedent(inspect.getsource(getattr(cls, verb))) for verb in ("open", "read", "write"))
