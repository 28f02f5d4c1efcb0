"""piece(...): figures as a notebook shows them: one element with its style inside, nothing fetched and nothing run.

The same drawings as in the page of `residua report`, light or dark as the notebook is.
"""

from __future__ import annotations

from collections.abc import Sequence

from residua.lab.common.files import Record
from residua.lab.plots import rows, svg
from residua.lab.plots.charts import curve_charts, depth_charts, designs, measured_in, named, weight_maps
from residua.lab.plots.standalone import DEPTH, legend, listed
from residua.lab.plots.style import Figures

THEMES = """
.residua { background: var(--page); color: var(--ink); padding: 0.5rem; border-radius: 6px; overflow-x: auto; }
[data-jp-theme-light="true"] .residua, .vscode-light .residua { color-scheme: light; }
[data-jp-theme-light="false"] .residua, .vscode-dark .residua { color-scheme: dark; }
.residua .residua { padding: 0; }
.residua .panels { display: flex; flex-wrap: wrap; gap: 1rem; }
.residua .panel { overflow-x: auto; }
"""
"""A ground of its own, and the colours of the notebook where it says which it has, not those of the system."""


def piece(*parts: str) -> str:
    """One element with the style of the figures, whose variables stay inside it."""
    style = f"{svg.STYLE}{rows.STYLE}".replace(":root", ".residua") + THEMES
    return f'<div class="residua"><style>{style}</style>{"".join(parts)}</div>'


def comparison_html(figures: Figures, differences: Sequence[tuple[str, Record]]) -> str:
    """Differences (label and what is known of each), curves, the mean weights, and the reads over depth."""
    data = listed(figures)
    places = {each["label"]: place for place, each in enumerate(data["series"])}
    forest = rows.forest([(*named(data, places[label]), gap) for label, gap in differences if label in places])
    maps = [(figures["labels"][slug], each) for slug, each in figures["routing"].items()]
    measured = [one for one in measured_in(data) if one[0] in DEPTH]
    panels = [*curve_charts(data), *weight_maps(maps, headed=True), *depth_charts(data, measured)]
    names = legend(designs(data), 900)
    shown = "".join(f'<div class="panel">{panel}</div>' for panel in panels if panel)
    keys = f'<svg class="figure" width="932" viewBox="0 0 932 {names[1] + 16:.0f}" aria-hidden="true">{names[0]}</svg>'
    return piece(forest, keys, f'<div class="panels">{shown}</div>')
