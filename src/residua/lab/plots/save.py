"""Figures as PNG and SVG, the same bytes for the same data, whatever the user's own settings are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from residua.lab.plots import heat, lines
from residua.lab.plots.style import Figures, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save(plots: Mapping[str, Callable[[], Figure]], out: Path | str) -> list[Path]:
    """Draw every plot and write it into `out` under its name; the files written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with styled():
        for name, draw in plots.items():
            figure = draw()
            # Not savefig, which draws everything a second time to find what the layout has found already.
            FigureCanvasAgg(figure).print_png(out / f"{name}.png")
            figure.set_layout_engine("none")  # the second format keeps the layout of the first
            FigureCanvasSVG(figure).print_svg(out / f"{name}.svg", metadata={"Date": None})
            written += [out / f"{name}.png", out / f"{name}.svg"]
    return written


def draw(figures: Figures, out: Path | str) -> list[Path]:
    """Write every plot that the data allow into `out`; the files written."""
    return save(dict(_plots(figures)), out)


def _plots(figures: Figures) -> Iterator[tuple[str, Callable[[], Figure]]]:
    curves = partial(lines.curves, figures)
    yield "curves-tokens", partial(curves, "tokens", "training tokens", enlarged=0.5)
    yield "curves-time", partial(curves, "cpu_seconds", "processor seconds of the updates", enlarged=0.75)
    if figures["routing"]:
        yield "routing", partial(heat.page, figures)
        for slug in figures["routing"]:
            yield f"routing-{slug}", partial(heat.alone, figures, slug)
    over_depth = {
        "depth-weights": {
            "max_weight": "largest weight of a read",
            "normalised_entropy": "entropy of a read (1: all sources alike)",
        },
        "stream-rms": {
            "stream_rms": "RMS of what the site reads",
            "output_rms": "RMS of what the sublayer adds",
            "gradient_norm": "gradient norm at the sublayer's output",
        },
    }
    for name, panels in over_depth.items():
        shown = {key: title for key, title in panels.items() if lines.defined(figures, key)}
        if shown:
            yield name, partial(lines.over_depth, figures, shown, shares=name == "depth-weights")
    if sum(each["speed"] is not None for each in figures["quality"].values()) > 1:
        yield "quality-speed", partial(lines.quality, figures)
