"""Every figure of the page, read back in a real browser, equals the data it was made from."""

import re

import pytest

from residua.lab.plots.charts import MEASURED
from residua.lab.report.page import grid
from tests.report.browser import ATTNRES, DDL, MUDD, Opened, check_cells, shown
from tests.report.comparison import DESIGNS

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def numbers(text):
    """The numbers of a tip's last line."""
    return [float(part) for part in re.findall(r"[\d.]+(?:e-?\d+)?", text.splitlines()[-1])]


def check_rows(pictures, rows):
    """The last dot of a row is its value and the bar its ends, all on one scale."""
    places = pictures.evaluate_all(
        """all => all.map((one) => { const bar = one.querySelector('.whisker'), dots = one.querySelectorAll('.dot');
        const marks = [[dots[dots.length - 1], 'cx'], [bar, 'x1'], [bar, 'x2']];
        return marks.map(([mark, key]) => parseFloat(mark.getAttribute(key))); })"""
    )
    flat = [(value, x) for row, found in zip(rows, places, strict=True) for value, x in zip(row, found, strict=True)]
    (low, left), (high, right) = min(flat), max(flat)
    for value, x in flat:
        assert x == pytest.approx(left + (value - low) / (high - low) * (right - left), abs=0.02)


def test_table_shows_the_cells(chromium, files, data):
    with Opened(chromium, files / "report.html") as opened:
        rows = opened.page.locator("#results tbody tr:not(.verdict-row)")
        assert opened.page.locator(".verdict-row").all_inner_texts() == data["summary"]["sections"]
        for place, row in enumerate(data["summary"]["rows"]):
            assert rows.nth(place).locator("th").inner_text().startswith(data["series"][row["series"]]["label"])
            assert rows.nth(place).locator("td").all_inner_texts() == row["cells"]
        opened.page.locator("#summary details summary").click()
        more = opened.page.locator("#more-results tbody tr")
        for place, row in enumerate(data["summary"]["rows"]):
            assert more.nth(place).locator("td").all_inner_texts() == row["folded"]
        runs = opened.page.locator("#run-table tbody tr")
        for place, run in enumerate(data["runs"]["list"]):
            assert runs.nth(place).locator("td").all_inner_texts()[1] == f"{run['loss']:.4f}"


@pytest.mark.parametrize(("axis", "measure"), [("tokens", "loss"), ("cpu_seconds", "bits_per_byte")])
def test_curves_read_as_the_data(chromium, files, data, axis, measure):
    with Opened(chromium, files / "report.html") as opened:
        page = opened.page
        page.locator("#curves").scroll_into_view_if_needed()
        page.select_option("#curves-x", axis)
        page.select_option("#curves-y", measure)
        page.fill("#curves-from", "0")
        chart = page.locator("#curves-mount svg.figure[tabindex]")
        # one series at a time: those of processor time have points of their own
        keys = page.locator("#curves-mount .keys button")
        for place in range(1, len(DESIGNS)):
            keys.nth(place).click()
        for place, curve in enumerate(data["curves"]):
            chart.focus()
            for step in range(len(curve[axis])):
                page.keyboard.press("ArrowRight")
                said = numbers(opened.tip())
                values = [curve[measure][key][step] for key in ("mean", "low", "high")]
                assert said == [float(f"{value:.5g}") for value in values]
            page.keyboard.press("Escape")
            assert page.locator(".tip").is_hidden()
            if place + 1 < len(DESIGNS):
                keys.nth(place + 1).click()
                keys.nth(place).click()
        assert page.locator("#curves-mount g[data-series]").count() == 1


def test_every_mean_weight_reads_as_the_data(chromium, files, data):
    with Opened(chromium, files / "report.html") as opened:
        for place in (MUDD, ATTNRES):
            route = data["routing"][place]
            opened.choose("a", place)
            check_cells(opened, "a", route, grid(route, 0))
            opened.choose("seed", 1)
            check_cells(opened, "a", route, grid(route, 2))
            opened.choose("seed", -1)
        view = {"means": {"mean": data["routing"][MUDD]["means"]["v lane"]}}
        opened.choose("a", MUDD)
        opened.choose("view", "v lane")
        check_cells(opened, "a", data["routing"][MUDD], grid(data["routing"][MUDD] | view, 0))


def test_depth_reads_as_the_data(chromium, files, data):
    with Opened(chromium, files / "report.html") as opened:
        page = opened.page
        keys = page.locator("#depth-mount .keys button")
        for place in range(1, len(DESIGNS)):
            keys.nth(place).click()
        titles = page.locator("#depth-mount svg.figure text.title").all_text_contents()
        measured = {
            key: title
            for key, title in MEASURED.items()
            if any(value is not None for depth in data["depth"] for value in depth[key])
        }
        assert titles == list(measured.values())
        for series, depth in enumerate(data["depth"]):
            for panel, key in enumerate(measured):
                known = [value for value in depth[key] if value is not None]
                chart = page.locator("#depth-mount svg.figure[tabindex]").nth(panel)
                assert chart.locator("g[data-series]").count() == bool(known)
                if not known:
                    continue
                chart.scroll_into_view_if_needed()
                # a page that scrolls under the pointer moves the tip to what is now below it
                page.mouse.move(0, 0)
                page.wait_for_timeout(60)
                chart.focus()
                for value in known:
                    page.keyboard.press("ArrowRight")
                    assert numbers(opened.tip()) == [float(f"{value:.5g}")], (series, key)
            if series + 1 < len(DESIGNS):
                keys.nth(series + 1).click()
                keys.nth(series).click()


def test_axes_read_as_the_data(chromium, files, data):
    with Opened(chromium, files / "report.html") as opened:
        pairs = opened.page.locator("#axes-mount .pair")
        drawn = [axes for axes in data["axes"] if axes["depth"] or axes["sequence"]]
        assert pairs.count() == len(drawn) > 1
        for place, axes in enumerate(drawn):
            for side, (axis, unit) in enumerate((("depth", "source"), ("sequence", "token"))):
                part, figure = axes[axis], pairs.nth(place).locator("figure").nth(side)
                if not part:
                    assert figure.locator(".absent").count() == 1
                    continue
                columns = min(16, max(map(len, part["weights"])))
                canvas = figure.locator("canvas")
                canvas.scroll_into_view_if_needed()
                opened.page.wait_for_timeout(60)
                told = opened.read(canvas, len(part["sites"]), columns)
                for site, row, own in zip(part["sites"], told, part["weights"], strict=True):
                    padded = [*own, *[None] * columns][:columns]
                    assert row == [
                        f"{site}, {back} {unit}{'' if back == 1 else 's'} back: {shown(weight)}"
                        for back, weight in enumerate(padded)
                    ]


def test_differences_regimes_and_points_are_the_data(chromium, files, data):
    """The pictures that stay static: what each mark says, and how long the bars are."""
    with Opened(chromium, files / "report.html") as opened:
        page = opened.page
        labels = [series["label"] for series in data["series"]]
        told = page.locator("#summary .rows svg[role=img]")
        said = [each.get_attribute("aria-label") for each in told.all()]
        assert said == [f"{labels[row['series']]}: {row['words']}" for row in data["summary"]["differences"]]
        check_rows(told, [(row["mean"], row["low"], row["high"]) for row in data["summary"]["differences"]])

        bars = page.locator("#depth figure svg.figure rect:has(title)")
        beta = data["beta"][DDL]
        said = [(name, site, share) for name, shares in beta["regimes"].items()
                for site, share in zip(beta["sites"], shares, strict=True) if share]  # fmt: skip
        found = sorted(bars.locator("title").all_text_contents())
        assert found == sorted(f"{site}: {name} {share:.3f}" for name, site, share in said)
        shares = [float(text.rsplit(" ", 1)[1]) for text in bars.locator("title").all_text_contents()]
        widths = bars.evaluate_all("all => all.map((one) => Number(one.getAttribute('width')))")
        unit = max(widths) / max(shares)
        assert widths == pytest.approx([share * unit for share in shares], abs=0.4)

        speeds = page.locator("#costs .rows svg[role=img]")
        measured = [(place, cost["speed"]) for place, cost in enumerate(data["costs"]) if place]
        said = [each.get_attribute("aria-label") for each in speeds.all()]
        assert said == [f"{labels[place]}: {speed:.2f}x" for place, speed in measured]
        predicted = [sorted(data["costs"][place][key] for key in ("speed_by_operations", "speed_by_bytes"))
                     for place, _ in measured]  # fmt: skip
        check_rows(speeds, [(speed, *ends) for (_, speed), ends in zip(measured, predicted, strict=True)])
        for panel, key in enumerate(("speed", "memory")):
            points = page.locator("#costs .panels svg.figure").nth(panel).locator("g > title").all_text_contents()
            assert points == [
                f"{label}: {quality[key]:g}x, {quality['bits_per_byte']['mean']:.4f} bits per byte"
                for label, quality in zip(labels, data["quality"], strict=True)
            ]


def test_costs_and_claim_show_the_data(chromium, files, data):
    def ratio(value):
        return "-" if value is None else f"{value:.2f}x"

    def mebibytes(value):
        return "-" if value is None else f"{value / 2**20:,.1f}"

    with Opened(chromium, files / "report.html") as opened:
        rows = opened.page.locator("#cost-table tbody tr")
        for place, cost in enumerate(data["costs"]):
            assert rows.nth(place).locator("td").all_inner_texts() == [
                ratio(cost["speed"]), ratio(cost["speed_by_operations"]), ratio(cost["speed_by_bytes"]),
                mebibytes(cost["extra_memory"]), mebibytes(cost["extra_saved"]),
                f"{cost['tokens_per_cpu_second']:,.0f}", mebibytes(cost["peak_memory"]),
            ]  # fmt: skip
        claims = opened.page.locator("#claim tbody tr")
        routed = [depth for depth in data["depth"] if any(value is not None for value in depth["max_weight"])]
        assert claims.count() == len(routed)
        for place, depth in enumerate(routed):
            every = [value for value in depth["max_weight"] if value is not None]
            deep = [
                v for v, is_deep in zip(depth["max_weight"], depth["deep"], strict=True) if is_deep and v is not None
            ]
            told = claims.nth(place).locator("td").all_inner_texts()
            assert float(told[0]) == pytest.approx(sum(every) / len(every), abs=6e-4)
            assert told[1] == "-" if not deep else float(told[1]) == pytest.approx(sum(deep) / len(deep), abs=6e-4)
