"""comparison_html(...): the pictures of a comparison as a notebook shows them: one piece of HTML, nothing fetched.

The same drawings as in the page of `residua report`, light or dark as the notebook is.
"""

from __future__ import annotations

from collections.abc import Sequence

from residua.lab.common.files import Record
from residua.lab.plots import rows, svg
from residua.lab.plots.charts import curve_charts, depth_charts, measured_in, named, weight_maps
from residua.lab.plots.standalone import DEPTH, legend, listed
from residua.lab.plots.style import Figures


def comparison_html(figures: Figures, differences: Sequence[tuple[str, Record]]) -> str:
    """Differences (label and what is known of each), curves, the mean weights, and the reads over depth."""
    data = listed(figures)
    places = {each["label"]: place for place, each in enumerate(data["series"])}
    forest = rows.forest([(*named(data, places[label]), gap) for label, gap in differences if label in places])
    maps = [(figures["labels"][slug], each) for slug, each in figures["routing"].items()]
    measured = [one for one in measured_in(data) if one[0] in DEPTH]
    panels = [*curve_charts(data), *weight_maps(maps, headed=True), *depth_charts(data, measured)]
    names = legend(data["series"], 900)
    # the variables of the style stay inside this piece
    style = f"{svg.STYLE}{rows.STYLE}".replace(":root", ".residua")
    shown = "".join(f'<div class="panel">{panel}</div>' for panel in panels if panel)
    layout = ".residua .panels { display: flex; flex-wrap: wrap; gap: 1rem; } .residua .panel { overflow-x: auto; }"
    keys = f'<svg class="figure" width="932" viewBox="0 0 932 {names[1] + 16:.0f}" aria-hidden="true">{names[0]}</svg>'
    return f'<div class="residua"><style>{style}{layout}</style>{forest}{keys}<div class="panels">{shown}</div></div>'
