"""The data of paths, knock-outs and passes, against the models and against an independent sum; two models on a page."""

import json
import math
import re
import shlex
from xml.etree import ElementTree

import pytest
import torch
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.diagnose import ablate_sources
from residua.lab.report import gather, inspection, render
from residua.lab.report.extra import ABLATED, grid_of, passes
from residua.lab.report.page import _path_table, grid
from residua.lab.report.summary import ladder
from residua.lab.train import load_model
from residua.model import token_loss
from residua.runner import observed
from residua.testing import Case
from tests.report.comparison import DESIGNS, byte_tokens, inspected

pytestmark = pytest.mark.slow  # models are trained

ATTNRES = DESIGNS.index("attnres:heads=2")


def test_knockouts_are_the_loss_of_the_model_without_a_source(compared, ablated):
    """Measured again here, on the same validation text, by reading without it."""
    each = ablated["knockouts"][ATTNRES]
    assert each["seeds"] == [0, 1, 2]
    valid = torch.from_numpy(byte_tokens().valid.astype("int64"))
    count = min(ABLATED, (len(valid) - 1) // 24)
    ids, targets = valid[: 24 * count].view(count, 24), valid[1 : 24 * count + 1].view(count, 24)
    model = load_model(compared / "runs/attnres-heads-2/seed1").eval()
    stream = model.stream
    site = stream.plan.head
    with torch.no_grad():
        loss = token_loss(model(ids), targets).item()
    assert each["loss"][1] == pytest.approx(loss, rel=1e-5)
    own = grid_of(each, each["each"][1])[each["sites"].index("head")]

    class Lost:
        """Mixes anew, with the weight of one source at zero."""

        def __init__(self, place):
            self.place = place

        def opened(self, x): ...
        def read(self, state, at, lanes, read): ...
        def wrote(self, at, y, state): ...

        def lanes(self, state, at, lanes):
            if at != site:
                return lanes
            routing = stream.routing(state, at)
            weights = routing.weights.clone()
            weights[:, self.place] = 0
            return tuple(routing._replace(weights=weights).mixed())

    for place, change in enumerate(own):
        with torch.no_grad(), observed(stream, Lost(place)):
            assert token_loss(model(ids), targets).item() - loss == pytest.approx(change, abs=2e-5)
    whole = ablate_sources(model, ids, targets)
    assert list(whole.change["head"].values()) == pytest.approx(own, abs=2e-5)
    assert ablated["knockouts"][0] is None, "standard mixes nothing"


def test_knockouts_need_models_and_are_asked_for(compared, data):
    assert data["knockouts"] == [None] * len(DESIGNS)
    assert "--ablate" in data["absent"]["knockouts"]
    with pytest.raises(ValueError, match="drop --ablate or --no-checkpoints"):
        gather(compared, checkpoints=False, ablate=True)


def test_paths_are_those_of_the_first_seed(compared, data):
    """The head's parts of the last token, by hand: the unembedding of the target on each weighted source."""
    each = data["paths"][ATTNRES]
    assert each["exact"]
    assert each["seed"] == 0
    assert each["sites"] == data["routing"][ATTNRES]["sites"]
    model = load_model(compared / "runs/attnres-heads-2/seed0").eval()
    tokens = data["routing"][ATTNRES]["tokens"]
    ids = torch.tensor([list("".join(tokens).replace("\u00b7", " ").encode())])
    with torch.no_grad():
        *_, head = model.walk(ids)
        routing = model.stream.routing(head.state, model.plan.head)
        raw, target = head.lanes[0][0, -1], int(model(ids)[0, -1].argmax())
        scale = (raw.square().mean() + model.norm.eps).sqrt()
        direction = model.embed.weight[target] * model.norm.weight.flatten() / scale
        weights = routing.weights[0, :, 0, -1].repeat_interleave(raw.shape[-1] // routing.weights.shape[-1], -1)
        expected = [
            float((weight * value[0, -1]) @ direction) for weight, value in zip(weights, routing.values, strict=True)
        ]
        logit = float(model(ids)[0, -1, target])
    (row,) = [cells for site, cells in _path_table(each) if site == "head"]
    assert row == pytest.approx(expected, abs=2 * each["targets"][-1]["step"])
    assert each["targets"][-1]["logits"][-1] == pytest.approx(logit, rel=1e-5)
    assert data["paths"][0] is None


def test_passes_are_rows_of_the_mean_weights():
    route = {
        "sites": ["l0_mlp", "l1_attn", "l1_mlp", "l1p1_attn", "l1p1_mlp", "head"], "sources": ["embed", "a", "b"],
        "reads": [[0], [0, 1], [0, 1], [0, 2], [0, 1, 2], [0]], "signed": False,
        "means": {"mean": [[1.0, 0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.5, 0.1, 1.0]]},
    }  # fmt: skip
    found = passes(route)
    assert found["sites"] == ["l1_attn", "l1_mlp"]
    cells = grid(route, 0)
    assert found["weights"] == [[cells[1], cells[2]], [cells[3], cells[4]]]
    assert passes(route | {"sites": ["l0_mlp", "l1_attn", "l1_mlp", "l2_attn", "l2_mlp", "head"]}) is None
    assert passes(None) is None


def test_two_models_on_a_page_are_told_apart():
    first, second = inspected("attnres"), inspected("attnres", model="after")
    assert [each["label"] for each in inspection(first, second)["series"]] == ["attnres | tiny", "attnres | after"]
    assert [each["label"] for each in inspection(first, inspected("delta"))["series"]] == ["attnres", "delta"]
    twice = inspection(first, first)
    assert [each["label"] for each in twice["series"]] == ["attnres | tiny, first", "attnres | tiny, second"]
    other = second | {"tokens": ["?"] * len(second["tokens"])}
    assert any("different tokens" in note for note in inspection(first, other)["notes"])
    with pytest.raises(ValueError, match="one model or two, not 3"):
        inspection(first, first, first)


def test_the_command_on_the_page_writes_the_page_again(compared, tmp_path, monkeypatch, html):
    """Typed in the directory of the runs, it gives the same bytes."""
    data = gather(compared, checkpoints=False)
    line = data["runs"]["commands"][-1]
    assert line["what"].startswith("this page")
    assert shlex.split(line["command"]) == ["residua", "report", ".", "--no-checkpoints"]
    monkeypatch.chdir(compared)
    done = CliRunner().invoke(app, [*shlex.split(line["command"])[1:], "-o", str(tmp_path / "again.html")])
    assert done.exit_code == 0, done.output
    found = json.loads(CliRunner().invoke(app, [*shlex.split(line["command"])[1:], "--json"]).stdout)
    assert found["runs"]["commands"] == json.loads(json.dumps(data["runs"]["commands"]))
    both = [compared / "runs/standard/seed0", compared / "runs/mudd/seed0"]
    several = gather(*both, checkpoints=False, prompt="a b")
    command = several["runs"]["commands"][-1]["command"]
    assert command == "residua report standard/seed0 mudd/seed0 -o report.html --prompt 'a b' --no-checkpoints"


def test_looking_at_a_design_without_a_head_read_has_slopes_alone():
    from residua.lab.diagnose.inspect import paths_of

    model = Case("delta:blocks=2").model(dtype=torch.float32)
    found = paths_of(model, torch.arange(6), str)
    assert not found["exact"]
    assert "head" not in found["sources"]
    assert [len(each["tokens"]) for each in found["targets"]] == [6, 6]


def laddered(results):
    """Results as a comparison over sizes has them: rungs on L = 2 + 100 C^-0.5, and rows worth 2 times and nothing."""
    rungs = [
        {"size": size, "compute": compute, "loss": 2 + 100 * compute**-0.5, "parameters": 1, "tokens": 1, "lr": 1e-3,
         "cpu_seconds": 1.0, "seeds": 3}
        for size, compute in (("1x8", 1e4), ("2x16", 1e5), ("4x16", 1e6))
    ]  # fmt: skip
    band = {"value": 2.0, "low": 1.9, "high": 2.1}
    curve = {"limit": band, "exponent": {"value": 0.5, "low": 0.4, "high": 0.6}, "scale": 100.0}
    clear = {"factor": 2.0, "low": 1.5, "high": 2.5, "significant": True, "extrapolated": False}
    noise = {"factor": 1.1, "low": 0.8, "high": None, "significant": False, "extrapolated": True}
    never = {"factor": None, "low": None, "high": None, "significant": True, "extrapolated": True}
    rows = []
    for place, row in enumerate(results["rows"]):
        worth = None if row["baseline"] else {"per_token": (clear, noise, never)[place % 3], "per_cpu_second": None}
        rows.append(row | {"size": "2x16", "speedup": worth})
    return results | {"rows": rows, "ladder": {"rungs": rungs, "curves": {"per_token": curve}}}


def test_ladders_are_shown_where_results_have_them(compared, data):
    assert data["ladder"] is None
    places = {each["label"]: place for place, each in enumerate(data["series"])}
    results = laddered(json.loads((compared / "results.json").read_text()))
    found = ladder(results, places)
    assert [row["compute"] for row in found["rows"]] == [1e5] * (len(DESIGNS) - 1)
    page = render(data | {"ladder": found})
    assert 'id="ladder"' in page
    root = ElementTree.fromstring(
        re.search(r'<svg[^>]*aria-label="Validation loss of the baseline.*?</svg>', page, re.S)[0]
    )
    told = [each.text for each in root.iter("title")]
    assert told[:3] == [f"{rung['size']}: {rung['loss']:.4f}" for rung in found["rungs"]]
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in root.iter("circle")]
    across = [(math.log(x), cx) for x, (cx, _) in zip((1e4, 1e5, 1e6), dots, strict=False)]
    assert across[1][1] - across[0][1] == pytest.approx(across[2][1] - across[1][1], abs=0.15), "a log axis"
    for words in (
        "2.00 times (1.50 to 2.50)",
        "not significant: 1.10 times (0.80 to no bound), beyond the largest size",
        "more than any compute would give the baseline",
    ):
        assert words in page
    assert 'id="ladder"' not in render(data)


def test_comparison_over_sizes_has_a_picture_of_them(data):
    assert 'id="sizes"' not in render(data)
    sized = [{**each, "label": f"delta & co | {2**place}x16"} for place, each in enumerate(data["series"])]
    page = render(data | {"series": sized})
    (panels,) = re.findall(r'<div class="panels" id="sizes">(.*?)</div>\n<p class="note">(.*?)</p>', page, re.DOTALL)
    assert panels[0].count("<figure>") == 2
    assert {"1x16", "2x16"} <= set(re.findall(r'class="tick middle"[^>]*>(\d+x\d+)', panels[0]))
    assert re.findall(r"<bdi>(.*?)</bdi>", panels[1]) == ["delta &amp; co"], "one line for all sizes of a design"
