"""The data of paths, knock-outs and passes, against the models and against an independent sum; two models on a page."""

import json
import shlex

import pytest
import torch
from typer.testing import CliRunner

from residua.cli import app
from residua.lab.diagnose import ablate_sources
from residua.lab.report import gather, inspection
from residua.lab.report.extra import ABLATED, grid_of, passes
from residua.lab.report.page import _path_table, grid
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
    (row,) = [cells for site, cells in _path_table(each) if site == "head"]
    assert row == pytest.approx(expected, abs=2 * each["targets"][-1]["step"])
    assert each["targets"][-1]["logits"][-1] == pytest.approx(float(model(ids)[0, -1, target]), rel=1e-5)
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
