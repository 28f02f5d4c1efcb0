"""A design is one file: the example of the docs, outside the package, works everywhere without another line."""

import sys
from pathlib import Path

import pytest
import torch

import residua
from residua.lab.cost import predict
from residua.lab.diagnose import record_routing
from residua.lab.diagnose.inspect import inspect_ids, tables
from residua.lab.report import write_inspection
from residua.model import ModelConfig, Transformer, generate, sizes_of
from residua.testing import Case, uncovered
from tests.hf.models import base, ids

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "03_write_your_own.py"


@pytest.fixture
def reminder(tmp_path, monkeypatch):
    """The class of the example in a module of its own; what the script does with it is left out."""
    source, _, _ = EXAMPLE.read_text().partition("torch.set_num_threads")
    (tmp_path / "reminder_design.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import reminder_design  # noqa: F401

    yield "reminder"
    residua.unregister("reminder")
    del sys.modules["reminder_design"]


def test_design_outside_the_package_is_converted_recorded_priced_drawn_and_decoded(reminder, tmp_path):
    assert not uncovered(reminder)
    plain = base("llama")
    before = plain(ids()).logits
    model = residua.convert(base("llama"), reminder)
    assert torch.equal(model(ids()).logits, before)  # it starts as the base
    with torch.no_grad():
        for share in model.model.stream.parameters():
            share.fill_(0.3)
    cached, uncached = (
        model.generate(ids(), max_new_tokens=5, do_sample=False, use_cache=use) for use in (True, False)
    )
    assert torch.equal(cached, uncached)
    assert not torch.equal(model(ids()).logits, before)
    model.save_pretrained(tmp_path / "saved")
    again = type(model).from_pretrained(tmp_path / "saved")
    assert torch.equal(again(ids()).logits, model(ids()).logits)

    with torch.no_grad(), record_routing(model) as record:
        model(ids())
    assert record.design == reminder
    assert all(site["stream_rms"] > 0 for site in record.summary()["sites"])
    found = inspect_ids(model, ids()[0], tokens=[str(one) for one in ids()[0].tolist()])
    assert reminder in tables(found)
    page = write_inspection(found, tmp_path / "page.html").read_text()
    assert reminder in page

    config = ModelConfig(vocab=23, width=16, depth=3, heads=2, design=reminder)
    cost, sizes = predict(config, 8), sizes_of(config, 8)
    assert cost.stream_parameters == sizes.stream_parameters == 6  # a share at the head, and at all sites but the first
    assert cost.state_bytes == 2 * 16 * 8 * 4  # h and e
    own = Transformer(config)
    assert generate(own, torch.randint(23, (1, 4)), 4).shape == (1, 8)
    assert Case(reminder).model()(torch.randint(23, (2, 9))).isfinite().all()
