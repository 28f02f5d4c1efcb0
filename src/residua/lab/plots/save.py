"""Figures as PNG and SVG, the same bytes for the same data, whatever the user's own settings are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from residua.lab.plots.style import styled

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
