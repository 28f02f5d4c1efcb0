"""Which plots there are, and their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from residua.plots import heat, lines
from residua.plots.style import SETTINGS, Figures

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(figures: Figures, out: Path | str) -> list[Path]:
    """Write every plot that the data allow into `out`; the files written."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the user's own settings are
        mpl.rcParams.update(SETTINGS)
        for name, figure in _plots(figures):
            # Not savefig, which draws everything a second time to find what the layout has found already.
            FigureCanvasAgg(figure).print_png(out / f"{name}.png")
            figure.set_layout_engine("none")  # the second format keeps the layout of the first
            FigureCanvasSVG(figure).print_svg(out / f"{name}.svg", metadata={"Date": None})
            written += [out / f"{name}.png", out / f"{name}.svg"]
    return written


def _plots(figures: Figures) -> Iterator[tuple[str, Figure]]:
    yield "curves-tokens", lines.curves(figures, "tokens", "training tokens", enlarged=0.5)
    yield "curves-time", lines.curves(figures, "cpu_seconds", "processor seconds of the updates", enlarged=0.75)
    if figures["routing"]:
        yield "routing", heat.page(figures)
        for slug in figures["routing"]:
            yield f"routing-{slug}", heat.alone(figures, slug)
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
            yield name, lines.over_depth(figures, shown, shares=name == "depth-weights")
    if sum(each["speed"] is not None for each in figures["quality"].values()) > 1:
        yield "quality-speed", lines.quality(figures)
